"""Which worker runs which file of tests, where they are spread over workers (`--dist loadfile`).

A file's tests stay together, so that what they share, a served model often, is made once.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# These workers begin with files of services, whose tests start several processes each and wait for them half
# of the time: two at a time are enough for a small machine.
WORKERS_OF_SERVICES = ("gw0", "gw1")
# Files that take longest, in that order: begun last they would leave the other workers without work.
LONGEST = (
    "tests/service/test_end_to_end.py",
    "tests/service/test_end_to_end",
    "tests/service/test_tools_end_to_end.py",
    "tests/service/test_pod_processes.py",
    "tests/service/test_streaming_ranks.py",
    "tests/service/test_traced_walk.py",
    "tests/service/test_parallel_serve.py",
    "tests/service/test_trace_end_to_end.py",
    "tests/service/test_docs_commands.py",
    "tests/service/test_supervisor",
    "tests/unit/gpu_service/ops/triton/test_compile.py",
    "tests/equality/test_parallel_ranks.py",
    "tests/service/test_gateway_",
    "tests/k8s/test_chart.py",
    "tests/parity/test_tiny",
    "tests/parity/test_vision.py",
    "tests/equality/test_decode_graphs.py",
    "tests/kernels/test_grouped_panels.py",
    "tests/equality/test_demo",
)


def give_way() -> None:
    """Called in a worker: one that does not begin with services lets those go first that do.

    Every token of a served model goes through several processes, and at each of them it would wait for a core
    that a test of a single process has for milliseconds.
    """
    if os.environ["PYTEST_XDIST_WORKER"] not in WORKERS_OF_SERVICES:
        os.nice(10)


def next_file(worker: str, waiting: Collection[str]) -> str:
    """Returns the file that a worker begins with next: of services or not, as is its own while there are
    some.
    """
    own = worker in WORKERS_OF_SERVICES
    return min(waiting, key=lambda path: (_is_of_services(path) != own, _rank(path)))


def _is_of_services(path: str) -> bool:
    """Returns the tests of the gateway alone start one process or none: they run like all others."""
    return path.startswith("tests/service/") and not path.startswith("tests/service/test_gateway_")


def _rank(path: str) -> int:
    """When a file begins: by the first name in `LONGEST` that its own begins with."""
    return next((rank for rank, begin in enumerate(LONGEST) if path.startswith(begin)), len(LONGEST))


class FileScheduling(LoadScopeScheduling):
    """Gives a worker the tests of one file after another, those that take long first."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.split("::", 1)[0]

    def _assign_work_unit(self, node: Any) -> None:
        """The base class would take the first, and count through all that a worker has done at every test."""
        files = self.assigned_work[node]
        for done in [path for path, tests in files.items() if all(tests.values())]:
            del files[done]
        self.workqueue.move_to_end(next_file(node.gateway.id, self.workqueue), last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling | None:
    """Returns the scheduler of the process that hands tests to workers.

    Other ways to spread tests are xdist's own.
    """
    return FileScheduling(config, log) if config.getvalue("dist") == "loadfile" else None
