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
from gpu_service.cache.tiers.payloads import make_payloads
from gpu_service.cache.tiers.prefix_tiers import PrefixTiers
from gpu_service.cache.tiers.ram_segment import RamSegment, slots_within
from gpu_service.cache.tiers.ram_tier import RamTier, slot_size
from gpu_service.core.interface import Inbox, RunOperation
from gpu_service.core.parallel import ParallelContext
from gpu_service.device.stream import CudaDeviceStream, DeviceStream, HostDeviceStream, page_lock
from gpu_service.engine.step_check import StepCheck
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from moebius.kv_tiers import ram_tier_path
from moebius.process.limits import available_memory

_log = structlog.get_logger(__name__)
# The operation that other threads post when something has come or gone.
TIERS_MOVED = "tiers moved"
_GIB = 2**30


def check_tiers(config: MoebiusConfig) -> None:
    """Raises UserError for settings that cannot be met, before anything is loaded."""
    gpu, num_ranks = config.gpu, config.parallel.num_ranks
    if gpu.kv_disk_gib and not gpu.kv_disk_dir:
        raise UserError(f"kv_disk_gib: {gpu.kv_disk_gib:g} needs kv_disk_dir, the directory of its files")
    if (gpu.kv_offload_gib or gpu.kv_disk_gib) and num_ranks > 1:
        raise UserError(
            f"kv_offload_gib and kv_disk_gib are for engines of one rank, not of {num_ranks}, which would "
            "have to see a block arrive at the same step; allowed: 0"
        )


def make_tiers(
    config: MoebiusConfig,
    identity: str,
    cache: RequestCache,
    kv_cache: AttendedPages,
    states: StateSlots | None,
    inbox: Inbox,
    check: StepCheck,
    parallel: ParallelContext,
) -> dict[str, Callable[[str], None]]:
    """Puts tiers below a cache, and returns the engine's operations that they need; none: what the KV cache
    evicts is computed again. `identity`: of the model's files.

    Raises UserError for more RAM than is free, and for places that cannot be used.
    """
    gpu = config.gpu
    ram_bytes = _ram_bytes(config)
    if not cache.prefix_caching or parallel.size > 1 or not (ram_bytes or gpu.kv_disk_gib):
        return {}
    device = kv_cache.device
    stream = CudaDeviceStream(device) if device.type == "cuda" else HostDeviceStream()
    payloads = make_payloads(kv_cache, states, stream)
    named = identity_digest(_identity_text(config, identity, kv_cache, states))
    ram = _ram_tier(config, ram_bytes, named, payloads.page_bytes, payloads.state_bytes, stream)
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


def _ram_bytes(config: MoebiusConfig) -> int:
    """Raises UserError for more than there is."""
    wanted = config.gpu.kv_offload_gib
    nbytes, free = config.gpu.kv_offload_bytes, available_memory()
    if nbytes > free:
        raise UserError(
            f"kv_offload_gib: {wanted:g} GiB are wanted, and {free / _GIB:.1f} GiB of RAM are free"
        )
    return nbytes


def _ram_tier(
    config: MoebiusConfig,
    nbytes: int,
    identity: bytes,
    page_bytes: int,
    state_bytes: int,
    stream: DeviceStream,
) -> RamTier | None:
    if not nbytes:
        return None
    directory, size = config.gpu.kv_offload_dir, slot_size(page_bytes)
    path = ram_tier_path(directory) if directory else None
    segment = RamSegment(identity, size, slots_within(nbytes, size), path)
    if stream.device.type == "cuda":
        page_lock(segment.tensor, stream.device, "the RAM tier of the prefix cache")
    return RamTier(segment, page_bytes, state_bytes)


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
