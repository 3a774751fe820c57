"""What each tier of the prefix cache holds, for those who ask what is cached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpu_service.cache.tiers.digests import is_state
from gpu_service.cache.tiers.prefix_tiers import PrefixTiers
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
        yield _tier("ram", _tokens(ram.keys, page_size), ram.used_bytes, ram.total_bytes, below)
    if (disk := below.disk) is not None:
        yield _tier("disk", _tokens(disk.keys, page_size), disk.held_bytes, disk.budget, below)


def _tier(name: str, tokens: int, nbytes: int, total_bytes: int, below: PrefixTiers) -> pb.CacheTier:
    hits = below.hit_tokens[name]
    return pb.CacheTier(name=name, tokens=tokens, bytes=nbytes, total_bytes=total_bytes, hit_tokens=hits)


def _tokens(keys: Sequence[bytes], page_size: int) -> int:
    return page_size * sum(not is_state(key) for key in keys)
