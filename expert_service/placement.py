"""Where this process computes: its CPUs, and how many threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import structlog

from moebius.config import ExpertConfig
from moebius.host.topology import Topology, node_of_cpus, pin_thread

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ThreadPlacement:
    """Filled by `place_process`."""

    # -1: not bound.
    numa_node: int
    num_threads: int
    # CPU of each compute thread; empty: threads go where this process may go.
    cpus: tuple[int, ...]


# Cores that a server may leave to others, at most, and still has the rest to itself.
SPARED = 2


def place_process(experts: ExpertConfig, topology: Topology | None = None) -> ThreadPlacement:
    """Pin the calling thread, and all it starts, to the node's CPUs that this process may use.

    Without a node the process stays where its parent put it. Unless set, there is a thread for each physical
    core, no more than the cgroup's quota allows, divided by the number of servers when servers are not bound
    to nodes. Threads get a CPU each, on a core of its own, where the process has nearly as many cores to
    itself. Raises ValueError when the node does not exist or holds no usable CPU, or when "cpuset" finds the
    CPUs of several nodes.
    """
    topology = topology or Topology.detect()
    node = experts.numa_node
    if isinstance(node, str):
        node = node_of_cpus(topology, node, experts.split_index)
        log.info("NUMA node found", numa_node=node, setting=experts.numa_node)
    if node < 0:
        threads = experts.expert_threads or max(1, topology.recommended_threads(-1) // experts.split_count)
        return ThreadPlacement(-1, threads, _own_cpus(topology.cores(), threads))
    nodes = [known.id for known in topology.nodes]
    cpus = topology.usable_cpus(node) if node in nodes else ()
    if not cpus:
        raise ValueError(f"numa_node is {node}; nodes here: {nodes}, and it needs a CPU this process may use")
    pinned = pin_thread(cpus)
    if not pinned.applied:
        log.warning("not pinned to the node's CPUs", numa_node=node, reason=pinned.message)
    threads = experts.expert_threads or topology.recommended_threads(node)
    return ThreadPlacement(node, threads, _own_cpus(topology.cores(node), threads))


def _own_cpus(cores: Sequence[Sequence[int]], threads: int) -> tuple[int, ...]:
    """Returns a CPU for each thread, one of each core first; none where more than `SPARED` cores are without
    one.

    Then others may have the same CPUs, and threads that spin are not moved apart for milliseconds when two of
    them meet on one.
    """
    cpus = [cpu for thread in zip_longest(*cores) for cpu in thread if cpu is not None]
    has_them_alone = len(cores) - SPARED <= threads <= len(cpus) and threads > SPARED
    return tuple(cpus[:threads]) if has_them_alone else ()
