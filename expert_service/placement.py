"""Where this process computes: its CPUs, and how many threads."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from moebius.config import ExpertConfig
from moebius.topology import Topology, pin_thread

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Placement:
    """Filled by `place_process`."""

    # -1: not bound.
    numa_node: int
    num_threads: int
    # CPU of each compute thread when bound to a node; empty: threads go where this process may go.
    cpus: tuple[int, ...]


def place_process(experts: ExpertConfig) -> Placement:
    """Pin the calling thread, and all it starts, to the node's CPUs that this process may use.

    Without a node the process stays where its parent put it. Unless set, the number of threads is what
    cores and cgroup quota allow, divided by the number of servers when those are not told apart by node.
    Raises ValueError when the node does not exist or holds no usable CPU.
    """
    topology = Topology.detect()
    node = experts.numa_node
    if node < 0:
        share = max(1, topology.recommended_threads(-1) // experts.split_count)
        return Placement(-1, experts.expert_threads or share, ())
    nodes = [known.id for known in topology.nodes]
    cpus = topology.usable_cpus(node) if node in nodes else ()
    if not cpus:
        raise ValueError(f"numa_node is {node}; nodes here: {nodes}, and it needs a CPU this process may use")
    pinned = pin_thread(cpus)
    if not pinned.applied:
        log.warning("not pinned to the node's CPUs", numa_node=node, reason=pinned.message)
    threads = experts.expert_threads or min(len(cpus), topology.recommended_threads(node))
    return Placement(node, threads, tuple(cpus[:threads]) if threads <= len(cpus) else ())
