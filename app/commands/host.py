"""`moebius version` and `moebius topology`: what is installed here, and the machine as Moebius sees it."""

from __future__ import annotations

import platform
from importlib import metadata

import typer

from moebius import __version__

SHOWN_PACKAGES = ("torch", "transformers", "grpcio")


def register(app: typer.Typer) -> None:
    """Adds the two commands."""

    @app.command()
    def topology() -> None:
        """Print NUMA nodes, usable CPUs, memory and the CPU limit."""
        from moebius.host.topology import Topology, format_cpu_list

        found = Topology.detect()
        for node in found.nodes:
            total, free = node.memory_total_bytes / 2**30, node.memory_free_bytes / 2**30
            usable = found.usable_cpus(node.id)
            print(
                f"node {node.id}: CPUs {format_cpu_list(node.cpus)}, usable {format_cpu_list(usable)}", end=""
            )
            print(f", memory {total:.1f} GiB, free {free:.1f} GiB", end="")
            print(f", recommended threads {found.recommended_threads(node.id)}")
        print(f"allowed CPUs: {format_cpu_list(found.allowed_cpus)} ({len(found.allowed_cpus)})")
        quota = found.cpu_quota
        print(f"cgroup CPU limit: {'none' if quota is None else f'{quota:g} CPUs'}")

    @app.command()
    def version() -> None:
        """Print the versions of Moebius, kernels and libraries."""
        from moebius.kernels import isa_level

        print(f"moebius {__version__}")
        print(f"kernels {isa_level()}")
        print(f"python {platform.python_version()}")
        for name in SHOWN_PACKAGES:
            print(f"{name} {_installed(name)}")


def _installed(name: str) -> str:
    """Returns the version in the package's metadata; importing torch to ask it would take a second."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
