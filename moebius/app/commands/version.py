"""`moebius version`: the version, and what this machine's kernels can do."""

from __future__ import annotations

import platform
from importlib import metadata

import typer

from moebius import __version__

SHOWN_PACKAGES = ("torch", "transformers", "grpcio")


def register(app: typer.Typer) -> None:
    """Adds the command."""

    @app.command()
    def version() -> None:
        """Print the versions of Moebius, its kernels and what it builds on."""
        from moebius.kernels import isa_level

        print(f"moebius {__version__}")
        print(f"kernels {isa_level()}")
        print(f"python {platform.python_version()}")
        for name in SHOWN_PACKAGES:
            print(f"{name} {_installed(name)}")


def _installed(name: str) -> str:
    """The version in the package's metadata; importing torch to ask it would take a second."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
