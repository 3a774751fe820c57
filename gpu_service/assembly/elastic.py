"""One pool of memory for KV pages and experts: whether there is one, its chunks, the first pages."""

from __future__ import annotations

from dataclasses import dataclass

import structlog
import torch

from gpu_service.assembly.kv_memory import CacheShape
from gpu_service.cache.elastic_pages import ElasticPages
from gpu_service.cache.kv_cache import PagedCache
from gpu_service.cache.request_cache import RequestCache
from gpu_service.device.host_virtual_memory import HostVirtualMemory
from gpu_service.device.stream import DeviceStream
from gpu_service.device.virtual_memory import (
    PhysicalPool,
    VirtualMemory,
    VirtualMemoryUnavailable,
    VirtualRange,
)
from gpu_service.engine.step_check import StepCheck
from gpu_service.experts.adaptive.placement import AdaptivePlacement
from gpu_service.memory.device_memory import make_device_memory
from gpu_service.memory.elastic import ElasticMemory, first_groups, stale_after
from gpu_service.memory.plan import useful_pages
from gpu_service.parallel.group import RankGroup
from gpu_service.scheduler.supply import PageSupply
from moebius.config import MoebiusConfig
from moebius.errors import brief
from moebius.models.config import ModelConfig
from moebius.process.progress import phase

_log = structlog.get_logger(__name__)
# A group of pages takes at most this part of a GPU's memory, in chunks as large as that allows: moving many
# small ones would take the host longer.
_GROUP_PART, _LARGEST_CHUNK = 256, 16 * 2**20
# Requests, and tokens of each, whose pages experts never get where no size of the KV cache is set.
_FLOOR_REQUESTS, _FLOOR_TOKENS = 4, 8192


def make_pool(
    config: MoebiusConfig, shape: CacheShape, group: RankGroup, follows_traffic: bool
) -> PhysicalPool | None:
    """Returns the pool that pages and experts share; None: each has its own memory as long as the engine
    runs.

    So it is where residents do not change, with a number of pages that is set, with several ranks, which
    would have to agree on every page, on a CPU that is not asked, and where the device cannot map memory.
    """
    gpu, device = config.gpu, shape.device
    is_asked = gpu.elastic_memory == "on" or (gpu.elastic_memory == "auto" and device.type == "cuda")
    if not (is_asked and follows_traffic and gpu.num_pages is None and group.parallel.size == 1):
        return None
    memory = make_virtual_memory(device)
    return None if memory is None else PhysicalPool(memory, chunk_bytes(memory.granularity, shape))


def make_virtual_memory(device: torch.device) -> VirtualMemory | None:
    """Returns what maps memory of a device; None, and one log line, where it cannot."""
    try:
        if device.type == "cuda":
            from gpu_service.device.cuda_virtual_memory import CudaVirtualMemory

            memory: VirtualMemory = CudaVirtualMemory(device)
        else:
            memory = HostVirtualMemory()
        try_out(memory)
        return memory
    except (ImportError, OSError, RuntimeError) as error:  # of the driver, of torch, and our own
        _log.warning(
            "KV pages and experts keep the memory that they have: the device cannot map any",
            because=brief(error),
        )
        return None


def try_out(memory: VirtualMemory) -> None:
    """Writes through a range, and reads what moved to another one.

    Raises VirtualMemoryUnavailable where that is not what was written.
    """
    pool = PhysicalPool(memory, memory.granularity)
    pool.add(1)
    first, second = (VirtualRange(pool, 2 * pool.chunk_bytes) for _ in range(2))
    one, other = first.tensor(), second.tensor()
    first.map([1])
    one[-8:] = 7
    # The device is done with it.
    written = one[-8:].tolist()
    first.unmap([1])
    second.map([1])
    if written != other[-8:].tolist():
        raise VirtualMemoryUnavailable("bytes did not move with their memory")


def chunk_bytes(granularity: int, shape: CacheShape) -> int:
    """Returns the bytes of a chunk: the more memory a GPU has, the larger; on a CPU as small as may be."""
    memory, size = make_device_memory(shape.device), granularity
    if memory is None:
        return size
    most = min(_LARGEST_CHUNK, memory.use().total // _GROUP_PART // max(1, len(shape.row_bytes())))
    while 2 * size <= most:
        size *= 2
    return size


@dataclass(frozen=True, eq=False, slots=True)
class EngineCache:
    """The KV cache of a rank; filled by `make_engine_cache`."""

    cache: PagedCache
    num_pages: int  # The most that there may be.
    pages: ElasticPages | None = None  # None: all have memory, for good.
    floor_pages: int = 0  # Experts never get these.

    @property
    def absent(self) -> list[int]:
        """Pages without memory now."""
        return [] if self.pages is None else self.pages.absent_pages()


def make_engine_cache(
    config: MoebiusConfig,
    shape: CacheShape,
    model: ModelConfig,
    num_pages: int,
    placement: AdaptivePlacement | None,
) -> EngineCache:
    """Returns a cache with memory for up to `num_pages`, from the pool of `placement` where it has one."""
    if placement is None or placement.supply is None:
        return EngineCache(shape.make_pool(num_pages), num_pages)
    pool, rows = placement.supply.pool, shape.row_bytes()
    per_page, size = sum(rows), pool.chunk_bytes
    chunks = num_pages * per_page // size
    # Each tensor may need a chunk more than its bytes.
    most = (chunks + pool.size - len(rows)) * size // per_page
    most = max(num_pages, min(most, useful_pages(config, model)))
    pages = ElasticPages(pool, most, max(rows))
    with phase("allocating the KV pool"):
        pool.add(max(chunks, 1))
        cache = shape.make(most, pages.allocate)
        floor = _floor_pages(config, model, num_pages)
        lacking = pages.chunks_for(range(-(-floor // pages.pages_per_group))) - pool.free
        pool.add(max(0, lacking))
        pages.add(first_groups(pages, pool.free, num_pages))
    _log.info(
        "KV pages and experts share memory",
        pool_gib=round(pool.nbytes / 2**30, 3),
        chunk_mib=round(size / 2**20, 3),
        pages=len(pages.present) * pages.pages_per_group,
        least_pages=floor,
        most_pages=most,
    )
    return EngineCache(cache, most, pages, floor)


def _floor_pages(config: MoebiusConfig, model: ModelConfig, num_pages: int) -> int:
    gpu = config.gpu
    if gpu.kv_cache_gib is not None:
        return num_pages
    tokens = max(_FLOOR_REQUESTS * min(model.max_model_len, _FLOOR_TOKENS), gpu.num_batched_tokens)
    return min(num_pages, 1 + -(-tokens // gpu.page_size))


def make_page_supply(
    kv: EngineCache,
    cache: RequestCache,
    placement: AdaptivePlacement | None,
    stream: DeviceStream,
    check: StepCheck,
) -> PageSupply | None:
    """Returns what moves memory while the engine serves; None: none moves.

    `cache` accounts for the pages of `kv`.
    """
    pages = kv.pages
    if pages is None or placement is None:
        return None
    token_bytes = pages.row_bytes / cache.page_size

    def stale_after_s(hit_share: float) -> float:
        return stale_after(hit_share, check.prompt_token_seconds, token_bytes, placement.value_per_byte)

    return ElasticMemory(pages, cache, placement, stream, kv.floor_pages, stale_after_s)
