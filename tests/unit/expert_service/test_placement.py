"""Guards how an expert server that is bound to no node places its threads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from expert_service import placement
from expert_service.placement import place_process
from moebius.config import ExpertConfig
from moebius.host.topology import BindResult, Topology, node_of_cpus


@pytest.mark.parametrize(
    ("cpus", "recommended", "settings", "threads", "pinned"),
    [
        (range(16), 16, {"expert_threads": 15}, 15, tuple(range(15))),
        (range(4, 12), 8, {}, 8, tuple(range(4, 12))),
        # A cgroup's quota, or another server on the same CPUs: the scheduler had better choose.
        (range(16), 4, {}, 4, ()),
        (range(16), 16, {"split_count": 2}, 8, ()),
        # More threads than CPUs, and machines so small that everything has to share.
        (range(4), 4, {"expert_threads": 6}, 6, ()),
        (range(2), 2, {}, 2, ()),
    ],
)
def test_threads_have_a_cpu_each_where_the_server_has_them_to_itself(
    monkeypatch: pytest.MonkeyPatch,
    cpus: range,
    recommended: int,
    settings: dict[str, int],
    threads: int,
    pinned: tuple[int, ...],
) -> None:
    """All but two at most; else threads go where the process may go."""
    topology = SimpleNamespace(
        cores=lambda: tuple((cpu,) for cpu in cpus), recommended_threads=lambda node: recommended, nodes=()
    )
    monkeypatch.setattr(placement, "Topology", SimpleNamespace(detect=lambda: topology))
    found = place_process(ExpertConfig.model_validate(settings))
    assert (found.numa_node, found.num_threads, found.cpus) == (-1, threads, pinned)


@pytest.mark.parametrize(
    ("threads", "pinned"), [(0, (0, 2, 4, 6)), (3, (0, 2, 4)), (6, (0, 2, 4, 6, 1, 3)), (9, ())]
)
def test_threads_share_a_core_only_when_there_are_more_of_them(
    monkeypatch: pytest.MonkeyPatch, threads: int, pinned: tuple[int, ...]
) -> None:
    """Siblings have neighbouring numbers here: the first four CPUs are threads of two cores."""
    nodes = (SimpleNamespace(id=0, memory_allowed=True),)
    topology = SimpleNamespace(
        nodes=nodes,
        usable_cpus=lambda node: tuple(range(8)),
        cores=lambda node: ((0, 1), (2, 3), (4, 5), (6, 7)),
        recommended_threads=lambda node: 4,
    )
    monkeypatch.setattr(placement, "pin_thread", lambda cpus: BindResult(True, ""))
    settings = ExpertConfig.model_validate({"expert_threads": threads, "numa_node": 0})
    found = place_process(settings, cast(Topology, topology))
    assert (found.num_threads, found.cpus) == (threads or 4, pinned)


def two_nodes(usable: dict[int, tuple[int, ...]], memory: tuple[int, ...] = (0, 1)) -> Topology:
    """Nodes 0 and 1, of which a process may use some CPUs and the memory of some."""
    nodes = tuple(SimpleNamespace(id=node, memory_allowed=node in memory) for node in (0, 1))
    found = SimpleNamespace(
        nodes=nodes,
        usable_cpus=lambda node: usable.get(node, ()),
        server_nodes=lambda: tuple(node for node in (0, 1) if usable.get(node) and node in memory),
    )
    return cast(Topology, found)


def test_a_server_finds_the_node_that_its_container_was_given() -> None:
    """CPUs of one node name it; of several, "auto" takes turns and "cpuset" says which setting would help."""
    pinned = two_nodes({1: (4, 5)})
    assert node_of_cpus(pinned, "auto", 0) == node_of_cpus(pinned, "cpuset", 0) == 1
    shared = two_nodes({0: (0, 1), 1: (4, 5)})
    assert [node_of_cpus(shared, "auto", index) for index in range(3)] == [0, 1, 0]
    with pytest.raises(ValueError, match=r"of 2 nodes \(node 0: 0-1, node 1: 4-5\).*topologyManagerPolicy"):
        node_of_cpus(shared, "cpuset", 0)
    with pytest.raises(
        ValueError, match=r"CPUs .* of node 1, its memory of \[0\]; .*memoryManagerPolicy Static"
    ):
        node_of_cpus(two_nodes({1: (4, 5)}, memory=(0,)), "cpuset", 0)
    one = cast(Topology, SimpleNamespace(nodes=(SimpleNamespace(id=0, memory_allowed=True),)))
    assert node_of_cpus(one, "cpuset", 1) == -1
