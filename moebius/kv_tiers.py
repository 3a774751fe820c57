"""Where the RAM tier of the prefix cache lies, and how large it is, for the supervisor and its engine."""

from __future__ import annotations

from pathlib import Path

from moebius.config import MoebiusConfig


def ram_tier_path(directory: str) -> Path:
    """Returns the file of an engine whose directory this is; two engines never share one."""
    return Path(directory) / "engine.kv"


def rank_tier_bytes(config: MoebiusConfig) -> int:
    """Returns the bytes of RAM that a rank has for prefixes: an equal part of `kv_offload_gib`."""
    return config.gpu.kv_offload_bytes // config.parallel.num_ranks
