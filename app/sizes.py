"""Sizes of files as people read them."""

from __future__ import annotations


def size(nbytes: int) -> str:
    """Returns decimal units, as disks are sold: `12.30 GB`, `4.5 MB`, `800 kB`."""
    if nbytes >= 1e9:
        return f"{nbytes / 1e9:.2f} GB"
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.0f} kB"
