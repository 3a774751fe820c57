"""Which CPUs each expert server gets: its NUMA node's, divided among the servers of that node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Fewer CPUs of a node are too few to leave any of them to others.
SPARED_FROM = 8


@dataclass(frozen=True)
class ExpertPlacement:
    """Where one expert server runs; filled by `place_experts`."""

    # -1: not bound, because the machine has one node (or none that we may use).
    numa_node: int
    cpus: tuple[int, ...]
    threads: int


def usable_cpus() -> tuple[dict[int, tuple[int, ...]], float | None]:
    """NUMA node -> CPUs we may use there (-1: the machine tells no nodes), and the cgroup's limit in CPUs."""
    from moebius.topology import Topology

    topology = Topology.detect()
    nodes = {node.id: tuple(topology.usable_cpus(node.id)) for node in topology.nodes}
    nodes = {node: cpus for node, cpus in nodes.items() if cpus} or {-1: tuple(topology.usable_cpus())}
    return nodes, topology.cpu_quota


def place_experts(
    node_cpus: Mapping[int, Sequence[int]], num_servers: int, quota: float | None, num_engines: int = 0
) -> tuple[ExpertPlacement, ...]:
    """Spreads servers over nodes, and each node's CPUs over its servers; every server gets one at least.

    `node_cpus` maps NUMA node -> CPUs we may use there (nodes without any are left out). `quota` is the
    cgroup's limit in CPUs: more runnable threads than that would only be throttled, so threads are cut
    to each server's part of it. With more servers than CPUs, servers share CPUs.

    `num_engines` processes drive GPUs: for each a CPU has no compute thread, on nodes of 8 CPUs or more. A
    thread there would be pushed aside several times a step, and all others wait for it.
    """
    nodes = [node for node, cpus in node_cpus.items() if cpus]
    if not nodes:
        raise ValueError("no CPU is usable")
    placements = []
    for index in range(num_servers):
        node = nodes[index % len(nodes)]
        neighbours = len(range(index % len(nodes), num_servers, len(nodes)))
        cpus = _share(sorted(node_cpus[node]), index // len(nodes), neighbours)
        threads = len(cpus)
        if neighbours == index // len(nodes) + 1 and len(node_cpus[node]) >= SPARED_FROM:
            threads = max(1, threads - -(-num_engines // len(nodes)))
        if quota is not None:
            threads = max(1, min(threads, int(quota / num_servers)))
        placements.append(ExpertPlacement(node if len(nodes) > 1 else -1, cpus, threads))
    return tuple(placements)


def _share(cpus: Sequence[int], index: int, count: int) -> tuple[int, ...]:
    """The index-th of `count` contiguous, nearly equal parts; one CPU, in turn, when there are too few."""
    if count > len(cpus):
        return (cpus[index % len(cpus)],)
    begin, end = index * len(cpus) // count, (index + 1) * len(cpus) // count
    return tuple(cpus[begin:end])
