"""Invariant: where tests are spread over workers, a file's stay on one of them, and each runs once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.spreading import LONGEST, FileScheduling, next_file, pytest_xdist_make_scheduler

ROOT = Path(__file__).parents[3]
FILES = {
    "tests/service/test_hub.py": 3,
    "tests/service/test_end_to_end.py": 5,
    "tests/service/test_gateway_http.py": 4,
    "tests/unit/gpu_service/engine/test_step.py": 1,
    "tests/unit/moebius/network/test_tls.py": 7,
    "tests/unit/gpu_service/ops/triton/test_compile.py": 1,
}


class Worker:
    """Notes what it is given."""

    def __init__(self, name: str) -> None:
        self.gateway, self.shutting_down = SimpleNamespace(id=name), False
        self.given: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def test_a_file_is_one_workers() -> None:
    """One worker has a file, also where it is much slower than the others; nothing is left, and nothing runs
    twice.
    """
    config: Any = SimpleNamespace(
        getvalue={"tx": ["3*popen"], "dist": "loadfile"}.get, option=SimpleNamespace(loadscopereorder=True)
    )
    ids = [f"{path}::test_{number}[a::b]" for path, count in FILES.items() for number in range(count)]
    scheduling: Any = pytest_xdist_make_scheduler(config, None)
    assert isinstance(scheduling, FileScheduling)
    workers = [Worker(f"gw{number}") for number in range(3)]
    for worker in workers:
        scheduling.add_node(worker)
        scheduling.add_node_collection(worker, ids)
    scheduling.schedule()
    done: dict[Worker, int] = dict.fromkeys(workers, 0)
    turn = 0
    while not scheduling.tests_finished or any(done[each] < len(each.given) for each in workers):
        for worker in workers[: 3 if turn % 4 == 0 else 2]:
            if done[worker] < len(worker.given):
                done[worker] += 1
                scheduling.mark_test_complete(worker, worker.given[done[worker] - 1])
        turn += 1
        assert turn < 1000
    assert sorted(index for worker in workers for index in worker.given) == list(range(len(ids)))
    files = [{ids[index].split("::")[0] for index in worker.given} for worker in workers]
    assert sum(map(len, files)) == len(FILES)
    assert all(worker.shutting_down for worker in workers)
    # A worker that begins with services begins with the longest of them, and the others leave those to it.
    assert ids[workers[0].given[0]].startswith("tests/service/test_end_to_end.py")
    assert ids[workers[2].given[0]].startswith("tests/unit/gpu_service/ops/triton/test_compile.py")


def test_workers_turn_to_others_files_when_theirs_are_done() -> None:
    """And the gateway's own tests, which start few processes, are everybody's."""
    both = ["tests/unit/moebius/network/test_tls.py", "tests/service/test_hub.py"]
    assert next_file("gw0", both) == both[1]
    assert next_file("gw2", both) == both[0]
    assert next_file("gw2", ["tests/service/test_hub.py"]).endswith("hub.py")
    assert next_file("gw3", ["tests/service/test_hub.py", "tests/service/test_gateway_http.py"]).endswith(
        "http.py"
    )


def test_other_ways_to_spread_are_xdists() -> None:
    config: Any = SimpleNamespace(getvalue={"dist": "load"}.get)
    assert pytest_xdist_make_scheduler(config, None) is None


def test_make_spreads_by_file(request: pytest.FixtureRequest) -> None:
    """The hook is registered, and asked for by the Makefile; files that take long are there by name."""
    assert request.config.pluginmanager.hasplugin("spreading")
    assert "--numprocesses $(WORKERS) --dist loadfile\n" in (ROOT / "Makefile").read_text()
    assert not [begin for begin in LONGEST if not list(ROOT.glob(f"{begin}*"))]
