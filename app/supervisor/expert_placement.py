"""Which cores each expert server computes on, and with how many threads.

`serve`, `plan` and `doctor` ask the same function, `place_experts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from app.supervisor.core_claims import OtherInstance
from moebius.errors import StartupError
from moebius.host.read_curves import ReadCurve

# Fewer cores of a node are too few to leave any of them to others.
SPARED_FROM = 8
# Of a node's cores: a later instance shares all of them rather than compute on fewer than this part.
LEAST_LEFT = 0.25


@dataclass(frozen=True)
class NodeCores:
    """CPUs of one NUMA node that this process may use; filled by `usable_nodes`."""

    cpus: tuple[int, ...]
    # The CPUs of each physical core that computes, in the order in which threads take them.
    cores: tuple[tuple[int, ...], ...]
    # How fast they read memory together; None: not measured.
    curve: ReadCurve | None = None
    # Instances that compute on some of the cores; and whether so few are left that they have to be shared.
    others: tuple[str, ...] = ()
    is_shared: bool = False

    @property
    def leaders(self) -> tuple[int, ...]:
        """One CPU of each core."""
        return tuple(core[0] for core in self.cores)

    @property
    def other_cpus(self) -> tuple[int, ...]:
        """CPUs of no core that computes, such as a hybrid processor's efficiency cores."""
        computing = set(chain(*self.cores))
        return tuple(cpu for cpu in self.cpus if cpu not in computing)

    def without(self, others: Sequence[OtherInstance], wanted: int) -> NodeCores:
        """Returns what other instances leave of it, or all cores, shared, where that is too little.

        `wanted` is how many cores a setting asks for; 0: as many as there are.
        """
        here = tuple(other for other in others if not other.cpus.isdisjoint(self.cpus))
        taken = frozenset[int]().union(*(other.cpus for other in here))
        left = tuple(core for core in self.cores if taken.isdisjoint(core))
        names = tuple(
            other.name for other in here if any(not other.cpus.isdisjoint(core) for core in self.cores)
        )
        if len(left) < (wanted or max(1.0, LEAST_LEFT * len(self.cores))):
            return replace(self, others=names, is_shared=bool(names))
        cpus = tuple(sorted((*chain(*left), *self.other_cpus)))
        return replace(self, cores=left, cpus=cpus, others=names)


@dataclass(frozen=True)
class ServerBinding:
    """Where one expert server runs; filled by `place_experts`."""

    # -1: not bound, because the machine has one node (or none that we may use).
    numa_node: int
    cpus: tuple[int, ...]
    threads: int
    # Why there are as many threads, for people.
    reason: str
    # Whether other instances compute on the same cores.
    is_shared: bool = False

    def __str__(self) -> str:
        """Returns how many threads there are, and why."""
        return f"{self.threads} ({self.reason})"


def usable_nodes() -> tuple[dict[int, NodeCores], float | None]:
    """NUMA node -> what we may use there (-1: the machine tells no nodes), and the cgroup's limit in CPUs.

    Raises StartupError where neither /sys nor /proc says what CPUs there are.
    """
    from moebius.host.topology import Topology

    try:
        topology = Topology.detect()
    except RuntimeError as error:
        raise StartupError(f"{error}: both have to be mounted, as they are in any container") from None
    nodes = [node.id for node in topology.nodes if topology.usable_cpus(node.id)] or [-1]
    found = {node: NodeCores(topology.usable_cpus(node), topology.cores(node)) for node in nodes}
    return found, topology.cpu_quota


def place_experts(
    node_cores: Mapping[int, NodeCores],
    num_servers: int,
    quota: float | None,
    num_engines: int = 0,
    threads: int = 0,
) -> tuple[ServerBinding, ...]:
    """Spreads servers over nodes, and each node's cores over its servers; every server gets one at least.

    `node_cores` maps NUMA node -> what we may use there (nodes without CPUs are left out). A server has a
    thread for each of its physical cores, or as many as `threads` (a setting; 0: none). `quota` is the
    cgroup's limit in CPUs: more runnable threads than that would only be throttled, so threads are cut
    to each server's part of it. With more servers than cores, servers share cores.

    `num_engines` processes drive GPUs. An engine for which there is no second hardware thread of a core has a
    core without a compute thread, on nodes of 8 cores or more: a thread there would be pushed aside several
    times a step, and all others wait for it. GPUs take long prompts, so that decoding decides how many
    threads compute: no more than `ReadCurve.knee`. Without a GPU they compute prompts, too, on all cores.
    """
    nodes = {node: found for node, found in node_cores.items() if found.cpus}
    if not nodes:
        raise ValueError("no CPU is usable")
    placements = []
    for index in range(num_servers):
        node = list(nodes)[index % len(nodes)]
        place, found = index // len(nodes), nodes[node]
        neighbours = len(range(index % len(nodes), num_servers, len(nodes)))
        is_last = neighbours == place + 1
        spared = _spared_cores(found, -(-num_engines // len(nodes))) if is_last else 0
        share = replace(found, cores=_share(found.cores, place, neighbours))
        count, reason = threads, "set by expert_threads"
        if threads and found.is_shared:
            reason += f", on cores that are shared with {', '.join(found.others)}"
        if not threads:
            knee = -(-found.curve.knee // neighbours) if found.curve and num_engines else None
            count, reason = _num_threads(share, spared, knee, quota and quota / num_servers)
        bound = node if len(nodes) > 1 else -1
        cpus = _held_cpus(share, count + spared, neighbours, quota)
        placements.append(ServerBinding(bound, cpus, count, reason, found.is_shared))
    return tuple(placements)


def _spared_cores(node: NodeCores, num_engines: int) -> int:
    """Returns the number of cores without a compute thread: for engines that have no CPU besides those of
    compute threads.
    """
    idle_cpus = len(node.cpus) - len(node.cores)
    return max(0, num_engines - idle_cpus) if len(node.cores) >= SPARED_FROM else 0


def _num_threads(share: NodeCores, spared: int, knee: int | None, quota: float | None) -> tuple[int, str]:
    """Returns how many threads a server has that nothing was set for, and why: the smallest of all limits."""
    cores = len(share.cores)
    has_siblings = any(len(core) > 1 for core in share.cores)
    kind = "physical core" if has_siblings else "CPU"
    left = f" that {', '.join(share.others)} leaves" if share.others else ""
    limits = [(cores, f"one for each {kind}{left}")]
    if spared:
        limits.append((cores - spared, f"one for each {kind}{left}, {spared} of which left to the engine"))
    if share.is_shared:
        part = max(1, cores // (1 + len(share.others)))
        limits.append((part, f"of {cores} cores that are shared with {', '.join(share.others)}"))
    if knee is not None:
        limits.append((knee, f"of {cores} cores: more read memory no faster, as measured"))
    if quota is not None:
        limits.append((int(quota), f"the cgroup allows {quota:g} CPUs"))
    count, reason = min(limits, key=lambda limit: limit[0])
    return max(1, count), reason


def _held_cpus(share: NodeCores, count: int, neighbours: int, quota: float | None) -> tuple[int, ...]:
    """Returns CPUs of `count` cores of the share; of all where a quota or other instances let the scheduler
    choose.

    A node's only server also has `NodeCores.other_cpus`, for threads that do not compute.
    """
    everything = quota is not None or share.is_shared or count > len(share.cores)
    cores = share.cores if everything else share.cores[:count]
    return tuple(sorted((*chain(*cores), *(share.other_cpus if neighbours == 1 else ()))))


def _share(cores: Sequence[tuple[int, ...]], index: int, count: int) -> tuple[tuple[int, ...], ...]:
    """The index-th of `count` contiguous, nearly equal parts; one core, in turn, when there are too few."""
    if count > len(cores):
        return (cores[index % len(cores)],)
    begin, end = index * len(cores) // count, (index + 1) * len(cores) // count
    return tuple(cores[begin:end])
