"""Files in which the kernel says what a machine is."""

from __future__ import annotations

from pathlib import Path


def file_text(path: Path) -> str:
    """Returns a file's text without white space around it; empty: there is none, or none that may be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
