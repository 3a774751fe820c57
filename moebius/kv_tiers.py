"""Where the RAM tier of the prefix cache lies, for the supervisor that holds it and its engine."""

from __future__ import annotations

from pathlib import Path


def ram_tier_path(directory: str) -> Path:
    """The file of an engine whose directory this is; two engines never share one."""
    return Path(directory) / "engine.kv"
