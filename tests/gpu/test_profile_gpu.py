"""Invariant: `moebius profile` and `moebius top` show a served model on a GPU as they do on a CPU.

Kernels of CUDA graphs, the mailbox's kernels among them, stand in one trace with the threads of both expert
servers, on one clock. The CPU's case, in another file, shares a larger model with other tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.random_model import RandomModelOptions, write_random_model
from tests.helpers.profiled import check_profile, check_top
from tests.helpers.stack import Stack, running_stack
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer


@pytest.fixture(
    scope="module",
    params=[pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.full)],
)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def stack(device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Four layers of 32 experts on two servers. By default a GPU would hold or fetch all of them and hand off
    no rows.
    """
    directory = tmp_path_factory.mktemp("profiled")
    write_random_model(directory / "model", RandomModelOptions("small", "int4_g32"))
    write_tokenizer(directory / "model", byte_level_tokenizer())
    flags = (
        "--served-model-name",
        "small",
        "--expert-servers",
        "2",
        "--kv-cache-gib",
        "1",
        "--gpu-experts-ratio",
        "0",
        "--fetch-experts",
        "off",
    )
    with running_stack(directory / "model", directory, *flags, "--device", device, timeout_s=280) as running:
        yield running


def test_top(stack: Stack, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_top(stack, "small", 4, device, capsys)


def test_profile(stack: Stack, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_profile(stack, "small", device, tmp_path, capsys)
