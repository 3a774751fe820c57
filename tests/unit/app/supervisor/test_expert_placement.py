"""Guards the division of cores among expert servers: local, complete, never empty, within the quota."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.supervisor.core_claims import OtherInstance
from app.supervisor.expert_placement import NodeCores, ServerBinding, place_experts
from moebius.host.read_curves import MeasuredCores, ReadCurve

CURVE = ReadCurve(MeasuredCores("cpu", "0-15", None), ((4, 60e9), (8, 117e9), (12, 119e9), (16, 120e9)))


def cores(cpus: Iterable[int], siblings: int = 0) -> NodeCores:
    """Returns a node of these CPUs, each on a core of its own; CPU n + `siblings` is the sibling of CPU n."""
    found = tuple((cpu, cpu + siblings) if siblings else (cpu,) for cpu in cpus)
    return NodeCores(tuple(sorted(cpu for core in found for cpu in core)), found)


def other(cpus: Iterable[int], name: str = "port 8000") -> OtherInstance:
    """Returns another instance."""
    return OtherInstance(name, frozenset(cpus))


def test_one_server_per_socket() -> None:
    """Two sockets, two servers: each is bound to one node and has all its CPUs."""
    first, second = place_experts({0: cores(range(3)), 1: cores(range(3, 6))}, 2, None)
    assert (first.numa_node, first.cpus, first.threads) == (0, (0, 1, 2), 3)
    assert (second.numa_node, second.cpus, second.threads) == (1, (3, 4, 5), 3)


def test_two_servers_on_one_socket_divide_it() -> None:
    """Servers of one node get disjoint CPUs and are not bound to the only node there is."""
    first, second = place_experts({0: cores(range(3))}, 2, None)
    assert (first.cpus, second.cpus) == ((0,), (1, 2))
    assert first.numa_node == second.numa_node == -1


def test_nodes_without_cpus_are_left_out() -> None:
    """A memory-only node (CXL) or one outside our cpuset gets no server."""
    placements = place_experts({0: cores((0, 1)), 2: cores(())}, 2, None)
    assert [placement.cpus for placement in placements] == [(0,), (1,)]


def test_quota_cuts_threads_not_cpus() -> None:
    """A cgroup limit of 3 CPUs on 8 gives two servers one thread each, anywhere on their CPUs."""
    placements = place_experts({0: cores(range(8))}, 2, 3.0)
    assert [placement.threads for placement in placements] == [1, 1]
    assert [len(placement.cpus) for placement in placements] == [4, 4]


def test_engines_on_gpus_have_cpus_without_compute_threads() -> None:
    """One for each, on large nodes, taken from a node's last server; small machines have none to spare."""
    (alone,) = place_experts({0: cores(range(16))}, 1, None, num_engines=1)
    assert (len(alone.cpus), alone.threads) == (16, 15)
    first, second = place_experts({0: cores(range(8)), 1: cores(range(8, 16))}, 2, None, num_engines=2)
    assert (first.threads, second.threads) == (7, 7)
    first, second = place_experts({0: cores(range(16))}, 2, None, num_engines=2)
    assert (first.threads, second.threads) == (8, 6)
    assert place_experts({0: cores(range(7))}, 1, None, num_engines=1)[0].threads == 7
    assert place_experts({0: cores(range(16))}, 1, 4.0, num_engines=1)[0].threads == 4


def test_no_cpu_is_an_error() -> None:
    """An empty machine is refused instead of giving servers without CPUs."""
    with pytest.raises(ValueError, match="no CPU"):
        place_experts({0: cores(())}, 1, None)


def test_siblings_are_left_to_the_engine() -> None:
    """A thread for each of 32 cores; no core is spared, because an engine has the second thread of any."""
    nodes = {0: cores(range(16), siblings=32), 1: cores(range(16, 32), siblings=32)}
    first, second = place_experts(nodes, 2, None, num_engines=2)
    assert (first.threads, second.threads) == (16, 16)
    assert first.cpus == (*range(16), *range(32, 48))
    assert str(second) == "16 (one for each physical core)"
    # A cpuset with second threads of some cores only.
    partly = NodeCores(tuple(range(10)), ((0, 8), (1, 9), *((cpu,) for cpu in range(2, 8))))
    assert [place_experts({0: partly}, 1, None, engines)[0].threads for engines in (2, 3)] == [8, 7]


def test_with_a_gpu_no_more_threads_than_read_faster() -> None:
    """8 of 16 cores read within 3 % of the most; without a GPU the rest is there for prompts."""
    node = replace(cores(range(16), siblings=16), curve=CURVE)
    (server,) = place_experts({0: node}, 1, None, num_engines=1)
    assert server.threads == 8
    assert server.cpus == (*range(8), *range(16, 24))
    assert "as measured" in server.reason
    assert [found.threads for found in place_experts({0: node}, 2, None, num_engines=1)] == [4, 4]
    assert place_experts({0: node}, 1, None)[0].threads == 16
    assert place_experts({0: node}, 1, 6.0, num_engines=1)[0].threads == 6


def test_a_setting_wins() -> None:
    """A setting wins over cores, quota, knee and other instances; the reason says so."""
    node = replace(cores(range(16)), curve=CURVE)
    assert place_experts({0: node}, 1, 4.0, 1, threads=12)[0].threads == 12
    taken = node.without([other(range(8))], 12)
    (server,) = place_experts({0: taken}, 1, None, 1, threads=12)
    assert (server.threads, server.is_shared) == (12, True)
    assert server.reason == "set by expert_threads, on cores that are shared with port 8000"
    # So few that what is left is enough.
    (server,) = place_experts({0: node.without([other(range(14))], 2)}, 1, None, threads=2)
    assert (server.cpus, server.is_shared) == ((14, 15), False)


def test_a_later_instance_takes_what_is_left() -> None:
    """Whole cores only: one whose sibling computes is taken; other nodes' cores are none of it."""
    node = cores(range(8), siblings=8)
    left = node.without([other((0, 1, 10, 11, 100))], 0)
    (server,) = place_experts({0: left}, 1, None)
    assert server.cpus == (4, 5, 6, 7, 12, 13, 14, 15)
    assert (server.threads, server.is_shared) == (4, False)
    assert str(server) == "4 (one for each physical core that port 8000 leaves)"
    assert node.without([other(range(100, 108))], 0) == node


def test_too_few_cores_are_shared_and_it_is_said() -> None:
    """One of 16 is no place to compute; then each instance has its part of all cores' threads."""
    node = cores(range(16)).without([other(range(10)), other(range(10, 15), "port 9000")], 0)
    (server,) = place_experts({0: node}, 1, None)
    assert (server.threads, server.is_shared, server.cpus) == (5, True, tuple(range(16)))
    assert str(server) == "5 (of 16 cores that are shared with port 8000, port 9000)"


def test_efficiency_cores_compute_nothing() -> None:
    """A server's other threads may run there."""
    hybrid = NodeCores(tuple(range(8)), ((0, 1), (2, 3)))
    (server,) = place_experts({0: hybrid}, 1, None)
    assert (server.threads, server.cpus) == (2, tuple(range(8)))


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    servers=st.integers(1, 12),
    quota=st.none() | st.floats(0.1, 32),
    taken=st.sets(st.integers(0, 36)),
)
def test_every_server_has_its_own_cores(
    sizes: list[int], servers: int, quota: float | None, taken: set[int]
) -> None:
    """Any machine: cores of one node only, disjoint while there are enough, at least one thread."""
    begins = [sum(sizes[:node]) for node in range(len(sizes))]
    nodes = {
        node: cores(range(begins[node], begins[node] + size)).without([other(taken)], 0)
        for node, size in enumerate(sizes)
    }
    placements = place_experts(nodes, servers, quota)
    assert len(placements) == servers
    by_node: dict[int, list[ServerBinding]] = {node: [] for node in nodes}
    for index, placement in enumerate(placements):
        node = nodes[index % len(nodes)]
        by_node[index % len(nodes)].append(placement)
        assert set(placement.cpus) <= set(node.cpus)
        assert 1 <= placement.threads <= len(placement.cpus)
        assert placement.is_shared or taken.isdisjoint(placement.cpus)
    for number, own in by_node.items():
        node = nodes[number]
        if own and len(own) <= len(node.cores):
            assert sum(placed.threads for placed in own) <= len(node.cores)
            assert sorted(cpu for placed in own for cpu in placed.cpus) == list(node.cpus)
