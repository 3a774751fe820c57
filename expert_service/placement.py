"""Where this process computes: its CPUs, and how many threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from moebius.config import ExpertConfig
from moebius.topology import Topology, node_of_cpus, pin_thread

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ThreadPlacement:
    """Filled by `place_process`."""

    # -1: not bound.
    numa_node: int
    num_threads: int
    # CPU of each compute thread; empty: threads go where this process may go.
    cpus: tuple[int, ...]


# CPUs that a server of this many or more leaves to others, at most, and still has the rest to itself.
SPARED = 2


def place_process(experts: ExpertConfig, topology: Topology | None = None) -> ThreadPlacement:
    """Pin the calling thread, and all it starts, to the node's CPUs that this process may use.

    Without a node the process stays where its parent put it; its threads get a CPU each where the process
    has nearly as many to itself. Unless set, the number of threads is what cores and cgroup quota allow,
    divided by the number of servers when servers are not bound to nodes. Raises ValueError when the
    node does not exist or holds no usable CPU, or when "cpuset" finds the CPUs of several nodes.
    """
    topology = topology or Topology.detect()
    node = experts.numa_node
    if isinstance(node, str):
        node = node_of_cpus(topology, node, experts.split_index)
        log.info("NUMA node found", numa_node=node, setting=experts.numa_node)
    if node < 0:
        share = max(1, topology.recommended_threads(-1) // experts.split_count)
        threads = experts.expert_threads or share
        return ThreadPlacement(-1, threads, _own_cpus(topology.usable_cpus(), threads))
    nodes = [known.id for known in topology.nodes]
    cpus = topology.usable_cpus(node) if node in nodes else ()
    if not cpus:
        raise ValueError(f"numa_node is {node}; nodes here: {nodes}, and it needs a CPU this process may use")
    pinned = pin_thread(cpus)
    if not pinned.applied:
        log.warning("not pinned to the node's CPUs", numa_node=node, reason=pinned.message)
    threads = experts.expert_threads or min(len(cpus), topology.recommended_threads(node))
    return ThreadPlacement(node, threads, tuple(cpus[:threads]) if threads <= len(cpus) else ())


def _own_cpus(cpus: Sequence[int], threads: int) -> tuple[int, ...]:
    """A CPU for each thread where these leave at most `SPARED`, else none: others may have the same CPUs.

    Threads that spin are not moved apart for milliseconds when two of them meet on a CPU.
    """
    return tuple(cpus[:threads]) if len(cpus) - SPARED <= threads <= len(cpus) and threads > SPARED else ()
