"""The RAM tier of the prefix cache: where it lies, how large it is, for the supervisor and its engines."""

from __future__ import annotations

from pathlib import Path

from moebius.config import MoebiusConfig

_GIB = 2**30
# Of the RAM that nothing else takes: the page cache, other programs and a plan's errors have the rest.
_FREE_PART = 5
# Less would hold few prefixes, and takes memory that a small host needs more.
_FEWEST_BYTES = _GIB
# A default is a whole number of these, a tenth of a GiB.
_UNITS = 10


def default_tier_bytes(free_bytes: int, taken_bytes: int, lockable_bytes: int | None = None) -> int:
    """Returns the RAM that a host's engines on GPUs have for prefixes together where `kv_offload_gib` is
    auto, bytes; 0: there is too little.

    `free_bytes`: that can be had now, within a container's limit. `taken_bytes`: what experts and processes
    of this host will take of it. `lockable_bytes`: what a GPU's driver page-locks at most, of which experts
    need their part first; None: there is no known limit.
    """
    nbytes = (free_bytes - taken_bytes) // _FREE_PART
    if lockable_bytes is not None:
        nbytes = min(nbytes, lockable_bytes - taken_bytes)
    return nbytes * _UNITS // _GIB * _GIB // _UNITS if nbytes >= _FEWEST_BYTES else 0


def with_tier_bytes(config: MoebiusConfig, host_bytes: int) -> MoebiusConfig:
    """Returns the settings with what `kv_offload_gib` auto becomes on a host whose engines together have
    `host_bytes` for prefixes: the setting is of all hosts' ranks.
    """
    if config.gpu.kv_offload_gib != "auto":
        return config
    gib = round(host_bytes * config.parallel.rank_hosts / _GIB, 3)
    return config.model_copy(update={"gpu": config.gpu.model_copy(update={"kv_offload_gib": gib})})


def ram_tier_path(directory: str, engine: int = 0) -> Path:
    """Returns the file of an engine whose directory this is, `engine` of those behind one port; no two
    engines share one.
    """
    return Path(directory) / (f"engine-{engine}.kv" if engine else "engine.kv")


def rank_tier_bytes(config: MoebiusConfig) -> int:
    """Returns the bytes of RAM that a rank has for prefixes: an equal part of `kv_offload_gib`, as has each
    engine.
    """
    return config.gpu.kv_offload_bytes // (config.parallel.num_ranks * config.parallel.data_parallel_size)
