"""Guards the division of CPUs among expert servers: local, complete, never empty, within the quota."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius.app.supervisor.placement import place_experts


def test_one_server_per_socket() -> None:
    """Two sockets, two servers: each is bound to one node and has all its CPUs."""
    first, second = place_experts({0: (0, 1, 2), 1: (3, 4, 5)}, 2, None)
    assert (first.numa_node, first.cpus, first.threads) == (0, (0, 1, 2), 3)
    assert (second.numa_node, second.cpus, second.threads) == (1, (3, 4, 5), 3)


def test_two_servers_on_one_socket_divide_it() -> None:
    """Servers of one node get disjoint CPUs and are not bound to the only node there is."""
    first, second = place_experts({0: (0, 1, 2)}, 2, None)
    assert (first.cpus, second.cpus) == ((0,), (1, 2))
    assert first.numa_node == second.numa_node == -1


def test_nodes_without_cpus_are_left_out() -> None:
    """A memory-only node (CXL) or one outside our cpuset gets no server."""
    placements = place_experts({0: (0, 1), 2: ()}, 2, None)
    assert [placement.cpus for placement in placements] == [(0,), (1,)]


def test_quota_cuts_threads_not_cpus() -> None:
    """A cgroup limit of 3 CPUs on 8 gives two servers one thread each, anywhere on their CPUs."""
    placements = place_experts({0: tuple(range(8))}, 2, 3.0)
    assert [placement.threads for placement in placements] == [1, 1]
    assert [len(placement.cpus) for placement in placements] == [4, 4]


def test_engines_on_gpus_have_cpus_without_compute_threads() -> None:
    """One for each, on large nodes, taken from a node's last server; small machines have none to spare."""
    (alone,) = place_experts({0: tuple(range(16))}, 1, None, num_engines=1)
    assert (len(alone.cpus), alone.threads) == (16, 15)
    first, second = place_experts({0: tuple(range(8)), 1: tuple(range(8, 16))}, 2, None, num_engines=2)
    assert (first.threads, second.threads) == (7, 7)
    first, second = place_experts({0: tuple(range(16))}, 2, None, num_engines=2)
    assert (first.threads, second.threads) == (8, 6)
    assert place_experts({0: tuple(range(7))}, 1, None, num_engines=1)[0].threads == 7
    assert place_experts({0: tuple(range(16))}, 1, 4.0, num_engines=1)[0].threads == 4


def test_no_cpu_is_an_error() -> None:
    """An empty machine is refused instead of giving servers without CPUs."""
    with pytest.raises(ValueError, match="no CPU"):
        place_experts({0: ()}, 1, None)


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    servers=st.integers(1, 12),
    quota=st.none() | st.floats(0.1, 32),
)
def test_every_server_has_its_own_cpus(sizes: list[int], servers: int, quota: float | None) -> None:
    """Any machine: CPUs of one node only, disjoint while there are enough, at least one thread."""
    begins = [sum(sizes[:node]) for node in range(len(sizes))]
    nodes = {node: tuple(range(begins[node], begins[node] + size)) for node, size in enumerate(sizes)}
    placements = place_experts(nodes, servers, quota)
    assert len(placements) == servers
    for index, placement in enumerate(placements):
        assert set(placement.cpus) <= set(nodes[index % len(nodes)])
        assert 1 <= placement.threads <= len(placement.cpus)
    for node, cpus in nodes.items():
        own = [placement.cpus for index, placement in enumerate(placements) if index % len(nodes) == node]
        if own and len(own) <= len(cpus):
            assert sorted(cpu for part in own for cpu in part) == list(cpus)
