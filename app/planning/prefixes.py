"""RAM for prefixes below the KV cache: what `moebius plan` counts, and what `serve` and `doctor` refuse."""

from __future__ import annotations

from pathlib import Path

from app.doctor.facts import read_volume
from moebius.config import MoebiusConfig
from moebius.kv_tiers import rank_tier_bytes


def prefix_bytes(config: MoebiusConfig) -> int:
    """Returns the bytes of RAM that one rank may fill with prefixes: its part of `kv_offload_gib`, and
    of `kv_disk_gib` where `kv_disk_dir` lies in memory.
    """
    return rank_tier_bytes(config) + _shared_bytes(config)


def _shared_bytes(config: MoebiusConfig) -> int:
    gpu = config.gpu
    if not (gpu.prefix_caching and gpu.kv_disk_gib and gpu.kv_disk_dir):
        return 0
    directory = Path(gpu.kv_disk_dir).absolute()
    # The first engine makes it.
    existing = next(path for path in (directory, *directory.parents) if path.is_dir())
    in_memory = read_volume(existing).in_memory
    return int(gpu.kv_disk_gib * 2**30) // config.parallel.num_ranks if in_memory else 0
