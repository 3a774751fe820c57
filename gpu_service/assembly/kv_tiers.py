"""The tiers below the KV cache that the settings ask for: RAM, disk, both or none."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path

import structlog

from gpu_service.cache.kv_cache import AttendedPages
from gpu_service.cache.request_cache import RequestCache
from gpu_service.cache.state_cache import StateSlots
from gpu_service.cache.tiers.digests import identity_digest
from gpu_service.cache.tiers.disk_tier import DiskTier
from gpu_service.cache.tiers.payloads import Payloads, make_payloads
from gpu_service.cache.tiers.prefix_tiers import PrefixTiers
from gpu_service.cache.tiers.ram_segment import RamSegment, slots_within
from gpu_service.cache.tiers.ram_tier import RamTier, slot_size
from gpu_service.core.interface import Inbox, RunOperation
from gpu_service.device.stream import CudaDeviceStream, DeviceStream, HostDeviceStream, page_lock
from gpu_service.engine.step_check import StepCheck
from gpu_service.parallel.group import RankGroup
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from moebius.kv_tiers import ram_tier_path, rank_tier_bytes
from moebius.process.limits import available_memory

_log = structlog.get_logger(__name__)
# The operation that other threads post when something has come or gone.
TIERS_MOVED = "tiers moved"
# The operation after which the tree's prefixes are requests' ones: on every rank at the same step.
OPEN_TIERS = "open tiers"
_GIB = 2**30


def check_tiers(config: MoebiusConfig) -> None:
    """Raises UserError for settings that cannot be met, before anything is loaded."""
    gpu, num_ranks = config.gpu, config.parallel.num_ranks
    if gpu.kv_disk_gib and not gpu.kv_disk_dir:
        raise UserError(f"kv_disk_gib: {gpu.kv_disk_gib:g} needs kv_disk_dir, the directory of its files")
    if gpu.kv_disk_gib and num_ranks > 1:
        raise UserError(
            f"kv_disk_gib is for engines of one rank, not of {num_ranks}, which would have to see a block "
            "arrive at the same step; allowed: 0, and kv_offload_gib for prefixes in RAM"
        )


def make_tiers(
    config: MoebiusConfig,
    identity: str,
    cache: RequestCache,
    kv_cache: AttendedPages,
    states: StateSlots | None,
    inbox: Inbox,
    check: StepCheck,
    group: RankGroup,
) -> dict[str, Callable[[str], None]]:
    """Puts tiers below a cache, and returns the engine's operations that they need; none: what the KV cache
    evicts is computed again. `identity`: of the model's files. All ranks call it at once.

    Raises UserError for more RAM than is free, and for places that cannot be used.
    """
    gpu = config.gpu
    ram_bytes = _ram_bytes(config)
    if not cache.prefix_caching or not (ram_bytes or gpu.kv_disk_gib):
        return {}
    device = kv_cache.device
    stream = CudaDeviceStream(device) if device.type == "cuda" else HostDeviceStream()
    payloads = make_payloads(kv_cache, states, stream)
    named = identity_digest(_identity_text(config, identity, kv_cache, states))
    if group.parallel.size > 1:
        return _make_rank_tiers(cache, payloads, named, ram_bytes, stream, group)
    ram = _ram_tier(config, ram_bytes, named, payloads, stream)
    disk = None
    if gpu.kv_disk_gib:
        disk = DiskTier(Path(gpu.kv_disk_dir), named, int(gpu.kv_disk_gib * _GIB))
    _log.info(
        "evicted prefixes are kept",
        ram_gib=round(ram.total_bytes / _GIB, 3) if ram else 0,
        inherited_blocks=len(ram) if ram else 0,
        disk_gib=gpu.kv_disk_gib,
        disk_blocks=len(disk) if disk else 0,
    )

    def wake() -> None:
        inbox.post(RunOperation(TIERS_MOVED, "", Future()))

    tiers = PrefixTiers(cache, payloads, named, ram, disk, wake, lambda: check.prompt_token_seconds)
    return {TIERS_MOVED: lambda _: tiers.poll()}


def _make_rank_tiers(
    cache: RequestCache,
    payloads: Payloads,
    identity: bytes,
    nbytes: int,
    stream: DeviceStream,
    group: RankGroup,
) -> dict[str, Callable[[str], None]]:
    """A tier in RAM of this rank's own, for its part of each block.

    The ranks' tiers hold the same blocks, since all that decides it is equal on all of them: what was
    computed, in which order, how many slots there are, and the time, which rank 0 gives.
    """
    tree = cache.tree

    def now() -> float:
        return tree.now_s

    largest = {"page": payloads.page_bytes, "state": payloads.state_bytes}
    page_bytes, state_bytes = (-group.minimum(f"{what} bytes", -size) for what, size in largest.items())
    size = slot_size(page_bytes)
    segment = RamSegment(identity, size, slots_within(nbytes, size))
    _page_lock(segment, stream)
    ram = RamTier(segment, payloads.page_bytes, payloads.state_bytes, now, (page_bytes, state_bytes))
    PrefixTiers(
        *(cache, payloads, identity, ram, None),
        wake=lambda: None,
        clock=now,
        wall_clock=now,
        fail_ranks=group.fail,
    )
    _log.info("evicted prefixes are kept", ram_gib=round(ram.total_bytes / _GIB, 3))
    return {}


def _ram_bytes(config: MoebiusConfig) -> int:
    """Returns the bytes of this rank's part. Raises UserError where all parts together are more than there
    is.
    """
    wanted = config.gpu.kv_offload_gib
    free = available_memory()
    if config.gpu.kv_offload_bytes > free:
        raise UserError(
            f"kv_offload_gib: {wanted:g} GiB are wanted, and {free / _GIB:.1f} GiB of RAM are free"
        )
    return rank_tier_bytes(config)


def _ram_tier(
    config: MoebiusConfig,
    nbytes: int,
    identity: bytes,
    payloads: Payloads,
    stream: DeviceStream,
) -> RamTier | None:
    if not nbytes:
        return None
    directory, size = config.gpu.kv_offload_dir, slot_size(payloads.page_bytes)
    path = ram_tier_path(directory) if directory else None
    segment = RamSegment(identity, size, slots_within(nbytes, size), path)
    _page_lock(segment, stream)
    return RamTier(segment, payloads.page_bytes, payloads.state_bytes)


def _page_lock(segment: RamSegment, stream: DeviceStream) -> None:
    if stream.device.type == "cuda":
        page_lock(segment.tensor, stream.device, "the RAM tier of the prefix cache")


def _identity_text(
    config: MoebiusConfig, identity: str, kv_cache: AttendedPages, states: StateSlots | None
) -> str:
    """Everything that decides what a block holds, and its form."""
    gpu, experts = config.gpu, config.experts
    tensors = [*kv_cache.page_tensors(), *([] if states is None else states.tensors())]
    form = [f"{tuple(tensor.shape[1:])} {tensor.dtype}" for tensor in tensors]
    chosen = (
        *(config.model.dtype, config.model.dense_weights, config.model.experts_per_token),
        *(config.model.max_model_len, gpu.page_size, gpu.kv_cache_dtype),
        *(experts.expert_dtype, experts.defer_experts),
    )
    return "\n".join((version("moebius"), identity, repr(chosen), *form))
