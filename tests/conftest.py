"""Set-up that must happen before any test module is imported."""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import structlog
import torch
from hypothesis import settings

from tests import selection, spreading
from tests.helpers import authorities, tls_everywhere

# What modules and tests are made of stays until the end: Python's collector has no need to look at it,
# neither while it is made, which took half of the time, nor in each of its rounds afterwards.
gc.disable()

# Examples follow from the test's name and code, so that a red suite means that a change broke something.
# `--full` has more of them; `--hypothesis-profile=explore` draws new ones, and many more.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=10)
settings.register_profile("full", settings.get_profile("repeatable"), max_examples=100)
settings.register_profile("explore", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile("repeatable")

# httpx gives up after five seconds without an answer, which a machine full of tests may take. All
# its calls and clients share this object, where they do not name a time of their own.
for waits_for in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, waits_for, 60.0)
authorities.share_contexts()

if "--tls" in sys.argv or tls_everywhere.is_on():
    # Not when pytest has read its options: other conftest.py files, which import our settings, come before.
    tls_everywhere.switch_on(Path(tempfile.mkdtemp(prefix="moebius-tests-tls-")))

if not torch.cuda.is_available():
    # Triton's own interpreter: GPU kernels run here on numpy, slowly, and are compared with torch. The
    # decorator looks at it when a kernel's module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if "PYTEST_XDIST_WORKER" in os.environ:
    # One of several workers: more threads would only wait for one another's cores.
    torch.set_num_threads(1)
    spreading.give_way()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """See `gc.disable` above; also of the process that only hands tests to others."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A test's random numbers do not depend on which tests came before it, in its process."""
    # `torch.manual_seed` would write down where it was called from, for devices that are not begun with yet.
    (torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed)(0)
    np.random.seed(0)
    random.seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    selection.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--full") and not config.getoption("--hypothesis-profile", ""):
        settings.load_profile("full")
    config.pluginmanager.register(selection.Selection(config), "selection")
    config.pluginmanager.register(spreading, "spreading")


@pytest.fixture(scope="module", autouse=True)
def _reference_ops() -> Iterator[None]:
    """A file's tests begin with torch's ops: engines of an earlier file, in this process, chose others."""
    yield
    if backends := sys.modules.get("gpu_service.ops.backends"):
        for device_type in ("cpu", "cuda"):
            backends.uninstall(device_type)


@pytest.fixture(scope="module", autouse=True)
def _own_logging() -> Iterator[None]:
    """A file's tests begin with structlog as it is imported: commands that ran in this process set it up."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


@pytest.fixture(scope="module", autouse=True)
def _own_environment() -> Iterator[None]:
    """A file's tests begin with the variables of the first: engines and libraries in this process set some,
    with which nothing would be forked any more of what was warmed up without them (`warm_processes.fits`)."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="module", autouse=True)
def _https(request: pytest.FixtureRequest) -> Iterator[None]:
    """With `--tls` servers speak HTTPS, but in files that are marked otherwise."""
    tls_everywhere.use_https(request.node.get_closest_marker("plain_http") is None)
    yield
    tls_everywhere.use_https(False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests for devices that this machine lacks, saying so."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        names = {mark.name for mark in item.iter_markers()}
        if "pod" in names and not item.config.getoption("--pods"):
            item.add_marker(pytest.mark.skip(reason="builds an image and runs Pods: make test-pod"))
        wanted = 2 if "multigpu" in names else 1 if "gpu" in names else 0
        if wanted > devices:
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} CUDA device(s), {devices} here"))
