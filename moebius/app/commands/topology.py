"""`moebius topology`: sockets, cores, memory and limits as Moebius sees them."""

from __future__ import annotations

from collections.abc import Sequence

import typer


def register(app: typer.Typer) -> None:
    """Adds the command."""

    @app.command()
    def topology() -> None:
        """Print NUMA nodes, usable CPUs, memory and the cgroup's CPU limit."""
        from moebius.topology import Topology

        found = Topology.detect()
        for node in found.nodes:
            total, free = node.memory_total_bytes / 2**30, node.memory_free_bytes / 2**30
            usable = found.usable_cpus(node.id)
            print(f"node {node.id}: CPUs {cpu_ranges(node.cpus)}, usable {cpu_ranges(usable)}", end="")
            print(f", memory {total:.1f} GiB, free {free:.1f} GiB", end="")
            print(f", recommended threads {found.recommended_threads(node.id)}")
        print(f"allowed CPUs: {cpu_ranges(found.allowed_cpus)} ({len(found.allowed_cpus)})")
        quota = found.cpu_quota
        print(f"cgroup CPU limit: {'none' if quota is None else f'{quota:g} CPUs'}")


def cpu_ranges(cpus: Sequence[int]) -> str:
    """`0-3,8` for (0, 1, 2, 3, 8), the notation of sysfs; `none` when empty."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1][1:] = [cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(map(str, run)) for run in runs) or "none"
