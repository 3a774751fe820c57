"""Guards that two instances of a host divide its cores, as processes of their own, and survive kill -9."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from app.supervisor import core_division
from app.supervisor.core_claims import CoreClaims
from app.supervisor.core_division import divided_cores
from app.supervisor.expert_placement import NodeCores, ServerBinding, place_experts
from moebius.config import ExpertConfig

# 16 cores of two nodes, with two hardware threads each.
NODES = {
    node: NodeCores(
        (*range(8 * node, 8 * node + 8), *range(8 * node + 16, 8 * node + 24)),
        tuple((cpu, cpu + 16) for cpu in range(8 * node, 8 * node + 8)),
    )
    for node in (0, 1)
}
INSTANCE = """
import sys
from pathlib import Path
from tests.unit.app.supervisor.test_core_division import start

claims, servers = start(Path(sys.argv[1]), int(sys.argv[2]))
print(*(cpu for server in servers for cpu in server.cpus if cpu < 16), flush=True)
sys.stdin.read()
"""


def start(directory: Path, threads: int) -> tuple[object, tuple[ServerBinding, ...]]:
    """Starts as `serve` does on a machine of `NODES`, with expert_threads; the claim, and its servers."""
    experts = ExpertConfig.model_validate({"expert_threads": threads})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_division, "DIRECTORY", directory)
        patch.setattr(core_division, "usable_nodes", lambda: (dict(NODES), None))
        with divided_cores(experts, measures=False) as division:
            cores = division.cores
            servers = place_experts(cores.nodes, 2, cores.quota, 0, threads)
            return division.hold(f"threads {threads}", servers), servers


@contextmanager
def instance(directory: Path, threads: int) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process of its own, and the cores that it computes on."""
    command = [sys.executable, "-c", INSTANCE, str(directory), str(threads)]
    root = Path(__file__).resolve().parents[4]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    ) as process:
        assert process.stdout is not None
        yield process, [int(word) for word in process.stdout.readline().split()]


def cores_of(servers: tuple[ServerBinding, ...]) -> list[int]:
    """Returns the first CPU of each core."""
    return [cpu for server in servers for cpu in server.cpus if cpu < 16]


def test_two_instances_divide_a_host(tmp_path: Path) -> None:
    """The first takes as many as are set, a later one what is left, the next shares; each says so."""
    with ExitStack() as stack:
        _, first = stack.enter_context(instance(tmp_path, 3))
        assert first == [0, 1, 2, 8, 9, 10]
        _, second = stack.enter_context(instance(tmp_path, 0))
        assert second == [3, 4, 5, 6, 7, 11, 12, 13, 14, 15]
        claim, third = start(tmp_path, 0)
        assert cores_of(third) == list(range(16))
        assert {(server.threads, server.is_shared) for server in third} == {(2, True)}
        assert all("shared with threads 3, threads 0" in server.reason for server in third)
        del claim
    _, alone = start(tmp_path, 0)
    assert [(server.threads, server.is_shared) for server in alone] == [(8, False), (8, False)]


def test_cores_of_a_killed_instance_are_free_at_once(tmp_path: Path) -> None:
    """The kernel drops its lock; nothing has to be cleaned up."""
    with instance(tmp_path, 0) as (process, cores):
        assert cores == list(range(16))
        process.send_signal(signal.SIGKILL)
        process.wait()
        _, servers = start(tmp_path, 0)
    assert {(server.threads, server.reason) for server in servers} == {(8, "one for each physical core")}


def test_a_directory_that_is_kept_locked_stops_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then all cores are ours, as where there is no directory."""
    monkeypatch.setattr("app.supervisor.core_claims._WAIT_S", 0.05)
    with CoreClaims(tmp_path).exclusive():
        claim, servers = start(tmp_path, 0)
    assert claim is None
    assert len(cores_of(servers)) == 16
    claim, _ = start(tmp_path / "no" / "parent", 0)
    assert claim is None
