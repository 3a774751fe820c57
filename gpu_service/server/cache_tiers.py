"""What each tier of the prefix cache holds, for those who ask what is cached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpu_service.cache.tiers.digests import is_state
from gpu_service.cache.tiers.disk_tier import DiskTier
from gpu_service.cache.tiers.prefix_tiers import PrefixTiers
from gpu_service.cache.tiers.ram_tier import RamTier
from gpu_service.core.interface import EngineLoad
from protos import engine_pb2 as pb


def cache_tiers(
    load: EngineLoad, page_size: int, page_bytes: int, below: PrefixTiers | None
) -> Iterator[pb.CacheTier]:
    """Yields the tiers that there are, the device first. Counting takes as long as there are blocks.

    `page_bytes`: of one page on the device. `below`: None: what the device evicts is computed again.
    """
    yield pb.CacheTier(
        name="device",
        tokens=load.cached_pages * page_size,
        bytes=load.cached_pages * page_bytes,
        total_bytes=load.usable_pages * page_bytes,
        hit_tokens=load.hit_tokens,
        kept_tokens=load.kept_pages * page_size,
    )
    if below is None:
        return
    if (ram := below.ram) is not None:
        yield _tier("ram", ram, ram.used_bytes, ram.total_bytes, below.hit_tokens, page_size)
    if (disk := below.disk) is not None:
        yield _tier("disk", disk, disk.held_bytes, disk.budget, below.hit_tokens, page_size)


def _tier(
    name: str,
    tier: RamTier | DiskTier,
    nbytes: int,
    total_bytes: int,
    hit_tokens: Mapping[str, int],
    page_size: int,
) -> pb.CacheTier:
    return pb.CacheTier(
        name=name,
        tokens=_tokens(tier.keys, page_size),
        bytes=nbytes,
        total_bytes=total_bytes,
        hit_tokens=hit_tokens[name],
        kept_tokens=_tokens(tier.kept_keys, page_size),
    )


def _tokens(keys: Sequence[bytes], page_size: int) -> int:
    return page_size * sum(not is_state(key) for key in keys)
