"""Typed face of the machine's topology, pinning and memory placement (`kernels/topology`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moebius import _kernels
from moebius.host.physical_cores import physical_cores


@dataclass(frozen=True)
class NumaNode:
    """One memory node; filled by `Topology.detect`."""

    id: int
    cpus: tuple[int, ...]  # online CPUs, ascending; empty for memory-only nodes
    memory_total_bytes: int
    memory_free_bytes: int
    memory_allowed: bool  # whether the process's cpuset lets it allocate here


@dataclass(frozen=True)
class BindResult:
    """Outcome of pinning or binding; a refusal is not an error, because placement is an optimisation."""

    applied: bool
    message: str  # empty when applied; otherwise what was refused, and what would allow it


class Topology:
    """What the machine has, and what this process may use of it."""

    def __init__(self, kernel: _kernels.Topology, sysfs_root: str) -> None:
        """Use `detect`."""
        self._kernel, self._sysfs = kernel, Path(sysfs_root)
        self.nodes: tuple[NumaNode, ...] = tuple(
            NumaNode(
                node.id,
                tuple(node.cpus),
                node.memory_total_bytes,
                node.memory_free_bytes,
                node.memory_allowed,
            )
            for node in kernel.nodes
        )
        self.allowed_cpus: tuple[int, ...] = tuple(kernel.allowed_cpus)
        self.cpu_quota: float | None = kernel.cpu_quota

    @classmethod
    def detect(
        cls, sysfs_root: str = "/sys", proc_root: str = "/proc", cgroup_root: str = "/sys/fs/cgroup"
    ) -> Topology:
        """Reads nodes, the affinity mask, the cpuset and the cgroup v2 quota.

        Raises:
            RuntimeError: a file is malformed (names it), or no CPU is left to use.
        """
        return cls(_kernels.Topology.detect(sysfs_root, proc_root, cgroup_root), sysfs_root)

    def usable_cpus(self, node: int = -1) -> tuple[int, ...]:
        """Returns allowed CPUs of `node`, of the whole machine for -1.

        Raises ValueError for an unknown node.
        """
        return tuple(self._kernel.usable_cpus(node))

    def cores(self, node: int = -1) -> tuple[tuple[int, ...], ...]:
        """Usable CPUs of each physical core of `node` (-1: of all) that computes, see `physical_cores`.

        Raises ValueError for an unknown node, RuntimeError for a malformed file.
        """
        return physical_cores(self.usable_cpus(node), self._sysfs, parse_cpu_list)

    def recommended_threads(self, node: int = -1) -> int:
        """Returns one thread for each core of `cores`, at most the quota's whole CPUs, at least 1."""
        return max(1, min(len(self.cores(node)), self._kernel.recommended_threads(node)))

    def server_nodes(self) -> tuple[int, ...]:
        """Returns nodes whose CPUs and memory are both usable: one expert server each. (-1,) when none
        qualifies.
        """
        return tuple(self._kernel.server_nodes())


def format_cpu_list(cpus: Sequence[int]) -> str:
    """Returns CPUs in the kernel's notation, ascending: (2, 1, 0, 8) becomes "0-2,8"; none becomes "none"."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in ranges) or "none"


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Returns the inverse of `format_cpu_list` for non-empty lists.

    Raises RuntimeError for a malformed one.
    """
    return tuple(_kernels.parse_cpu_list(text, "CPU list"))


def pin_thread(cpus: Sequence[int]) -> BindResult:
    """Restricts the calling thread, and threads it starts later, to `cpus`. Raises ValueError when empty."""
    return _result(_kernels.pin_thread(list(cpus)))


def bind_memory(node: int) -> BindResult:
    """Memory this thread touches first from now on comes from `node` only; -1 restores the default."""
    return _result(_kernels.bind_memory(node))


def bind_range(address: int, nbytes: int, node: int) -> BindResult:
    """Pages of the range come from `node`; those already touched are moved."""
    return _result(_kernels.bind_range(address, nbytes, node))


def page_nodes(address: int, nbytes: int) -> list[int]:
    """Returns the node of each page of the range, or a negative errno (-2 or -14: not touched yet).

    Raises:
        OSError: the kernel refuses the query.
    """
    return _kernels.page_nodes(address, nbytes)


def _result(kernel: _kernels.BindResult) -> BindResult:
    return BindResult(kernel.applied, kernel.message)


def node_of_cpus(topology: Topology, setting: str, split_index: int) -> int:
    """Returns the node that all CPUs of this process are of; -1: the machine has one node, or none that it
    tells.

    Where they are of several, "auto" takes one in turn, by `split_index`, and "cpuset" refuses: the container
    was to have CPUs of one node for itself, and does not. Raises ValueError.
    """
    if len(topology.nodes) < 2:
        return -1
    nodes = [node.id for node in topology.nodes if topology.usable_cpus(node.id)]
    if len(nodes) == 1:
        allowed = [node.id for node in topology.nodes if node.memory_allowed]
        if setting == "cpuset" and nodes[0] not in allowed:
            raise ValueError(
                f"numa_node is cpuset, but the CPUs given to this process are of node {nodes[0]}, its memory "
                f"of {allowed}; the kubelet aligns both with memoryManagerPolicy Static and "
                "topologyManagerPolicy restricted or single-numa-node; numa_node auto does without"
            )
        return nodes[0]
    if setting == "auto":
        usable = topology.server_nodes()
        return usable[split_index % len(usable)]
    parts = ", ".join(f"node {node}: {format_cpu_list(topology.usable_cpus(node))}" for node in nodes)
    raise ValueError(
        f"numa_node is cpuset, but the CPUs given to this process are of {len(nodes)} nodes ({parts}); in a "
        "Pod the kubelet gives those of one with cpuManagerPolicy static, topologyManagerPolicy restricted "
        "or single-numa-node, equal integer CPU requests and limits of all containers, and no more CPUs for "
        "this one than a node has; numa_node auto does without"
    )
