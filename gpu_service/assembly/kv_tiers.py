"""The tiers below the KV cache that the settings ask for: RAM, disk, both or none."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path

import structlog
import torch

from gpu_service.cache.kv_cache import AttendedPages
from gpu_service.cache.prefix_events import PrefixEvents
from gpu_service.cache.request_cache import RequestCache
from gpu_service.cache.state_cache import StateSlots
from gpu_service.cache.tiers.digests import ENGINE_BYTES, identity_digest, rank_identity
from gpu_service.cache.tiers.disk_cipher import read_cipher
from gpu_service.cache.tiers.disk_tier import DiskTier
from gpu_service.cache.tiers.payloads import Payloads, make_payloads
from gpu_service.cache.tiers.piece_locks import make_piece_locks
from gpu_service.cache.tiers.prefix_tiers import PrefixTiers
from gpu_service.cache.tiers.ram_segment import RamSegment, slots_within
from gpu_service.cache.tiers.ram_tier import RamTier, slot_size
from gpu_service.core.interface import Inbox, RunOperation
from gpu_service.device.pinned import registrar
from gpu_service.device.stream import CudaDeviceStream, DeviceStream, HostDeviceStream
from gpu_service.engine.step_check import StepCheck
from gpu_service.parallel.group import RankGroup
from gpu_service.telemetry.kv_event_stream import KvEventStream
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from moebius.kv_events import read_kv_events
from moebius.kv_tiers import ram_tier_path, rank_tier_bytes
from moebius.process.limits import available_memory

_log = structlog.get_logger(__name__)
# The operation that other threads post when something has come or gone.
TIERS_MOVED = "tiers moved"
# The operation after which the tree's prefixes are requests' ones: on every rank at the same step.
OPEN_TIERS = "open tiers"
_GIB = 2**30


def check_tiers(config: MoebiusConfig) -> None:
    """Raises UserError for settings that cannot be met, ConfigError for those of another form, before
    anything is loaded."""
    gpu = config.gpu
    read_kv_events(gpu.kv_events_config)
    read_cipher(gpu.kv_disk_key_file)
    if gpu.kv_disk_gib and not gpu.kv_disk_dir:
        raise UserError(f"kv_disk_gib: {gpu.kv_disk_gib:g} needs kv_disk_dir, the directory of its files")


def follow_prefixes(config: MoebiusConfig, identity: str, cache: RequestCache, group: RankGroup) -> None:
    """Publishes what a cache holds if settings ask for it: rank 0's, as all have the same prefixes.

    Raises ConfigError for settings of another form, UserError where they cannot be met.
    """
    wanted = read_kv_events(config.gpu.kv_events_config)
    if not (wanted.is_on and cache.prefix_caching) or group.parallel.rank:
        return
    cache.tree.events = PrefixEvents(KvEventStream(wanted), cache.page_size, identity_digest(identity))
    _log.info("prefixes are published", endpoint=wanted.endpoint, replay_endpoint=wanted.replay_endpoint)


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
    ram_bytes = group.minimum("RAM of prefixes", _ram_bytes(config)) if cache.prefix_caching else 0
    if not cache.prefix_caching or not (ram_bytes or gpu.kv_disk_gib):
        return {}
    device = kv_cache.device
    stream = CudaDeviceStream(device) if device.type == "cuda" else HostDeviceStream()
    payloads = make_payloads(kv_cache, states, stream)
    chosen, form = _identity_texts(config, identity, kv_cache, states)
    if group.parallel.size > 1:
        parallel = group.parallel
        place = f"rank {parallel.rank}, {parallel.tp_size} x {parallel.num_stages}"
        if parallel.stage_sizes:
            place += f" of {parallel.stage_sizes}"
        named = _keyed(config, rank_identity(chosen, f"{place}\n{form}"))
        return _make_rank_tiers(config, ram_bytes, cache, payloads, named, stream, group, inbox)
    named = _keyed(config, identity_digest(f"{chosen}\n{form}"))
    ram, disk = _ram_tier(config, ram_bytes, named, payloads, stream), _disk_tier(config, named)
    _log_tiers(config, ram, disk)

    def wake() -> None:
        inbox.post(RunOperation(TIERS_MOVED, "", Future()))

    tiers = PrefixTiers(cache, payloads, named, ram, disk, wake, lambda: check.prompt_token_seconds)
    return {TIERS_MOVED: lambda _: tiers.poll()}


def _keyed(config: MoebiusConfig, identity: bytes) -> bytes:
    """Returns what blocks are named by: names on an encrypted disk say nothing of prompts."""
    cipher = read_cipher(config.gpu.kv_disk_key_file)
    if cipher is None:
        return identity
    engine, rank = identity[:ENGINE_BYTES], identity[ENGINE_BYTES:]
    return cipher.keyed_identity(engine) + cipher.keyed_identity(rank)


def _log_tiers(config: MoebiusConfig, ram: RamTier | None, disk: DiskTier | None) -> None:
    _log.info(
        "evicted prefixes are kept",
        ram_gib=round(ram.total_bytes / _GIB, 3) if ram else 0,
        inherited_blocks=len(ram) if ram else 0,
        disk_gib=config.gpu.kv_disk_gib,
        disk_blocks=len(disk) if disk else 0,
    )


def _disk_tier(config: MoebiusConfig, identity: bytes) -> DiskTier | None:
    gpu = config.gpu
    if not gpu.kv_disk_gib:
        return None
    return DiskTier(
        *(Path(gpu.kv_disk_dir), identity, int(gpu.kv_disk_gib * _GIB)),
        num_writers=config.parallel.num_ranks,
        cipher=read_cipher(gpu.kv_disk_key_file),
    )


def _make_rank_tiers(
    config: MoebiusConfig,
    nbytes: int,
    cache: RequestCache,
    payloads: Payloads,
    identity: bytes,
    stream: DeviceStream,
    group: RankGroup,
    inbox: Inbox,
) -> dict[str, Callable[[str], None]]:
    """Tiers of this rank's own, for its part of each block.

    The ranks' RAM holds the same blocks, since all that decides it is equal on all of them: what was
    computed, in which order, how many slots there are, and the time, which rank 0 gives. Their disks need
    not: `cache.tiers.rank_disk`.
    """
    tree = cache.tree

    def now() -> float:
        return tree.now_s

    largest = {"page": payloads.page_bytes, "state": payloads.state_bytes}
    page_bytes, state_bytes = (-group.minimum(f"{what} bytes", -size) for what, size in largest.items())
    ram = None
    if nbytes:
        size = slot_size(page_bytes)
        segment = RamSegment(identity, size, slots_within(nbytes, size))
        _page_lock(segment, stream)
        ram = RamTier(segment, payloads.page_bytes, payloads.state_bytes, now, (page_bytes, state_bytes))
    disk = _disk_tier(config, identity)
    tiers = PrefixTiers(
        *(cache, payloads, identity, ram, disk),
        wake=lambda: group.report(0, 0),
        clock=now,
        wall_clock=now,
        ranks=group,
    )
    _log_tiers(config, ram, disk)

    def reported(fetch: int, blocks: int) -> None:
        inbox.post(RunOperation(TIERS_MOVED, f"{fetch} {blocks}", Future()))

    if inbox.is_entry:
        group.on_report, inbox.prepare = reported, tiers.look
    return {TIERS_MOVED: lambda argument: tiers.agreed(*(int(number) for number in argument.split()))}


def _ram_bytes(config: MoebiusConfig) -> int:
    """Returns the bytes of this rank's part. Raises UserError where all parts of this host together are more
    than is free, but for what a predecessor has filled.
    """
    engines = rank_tier_bytes(config) * len(config.parallel.host_ranks) * config.parallel.data_parallel_size
    path = _ram_path(config)
    held = path.stat().st_blocks * 512 if path is not None and path.exists() else 0
    free = available_memory() + held
    if engines > free:
        raise UserError(
            f"kv_offload_gib: {engines / _GIB:g} GiB are wanted, and {free / _GIB:.1f} GiB of RAM are free"
        )
    return rank_tier_bytes(config)


def _ram_path(config: MoebiusConfig) -> Path | None:
    """Returns the file of an engine without further ranks; None: its memory is its own."""
    directory, parallel = config.gpu.kv_offload_dir, config.parallel
    if not directory or parallel.num_ranks > 1:
        return None
    return ram_tier_path(directory, parallel.data_parallel_rank)


def _ram_tier(
    config: MoebiusConfig,
    nbytes: int,
    identity: bytes,
    payloads: Payloads,
    stream: DeviceStream,
) -> RamTier | None:
    if not nbytes:
        return None
    size = slot_size(payloads.page_bytes)
    segment = RamSegment(identity, size, slots_within(nbytes, size), _ram_path(config))
    _page_lock(segment, stream)
    return RamTier(segment, payloads.page_bytes, payloads.state_bytes)


def _page_lock(segment: RamSegment, stream: DeviceStream) -> None:
    """Page-locks the slots of a GPU's engine, in the background as blocks reach them."""
    if stream.device.type == "cuda":
        segment.locks = make_piece_locks(torch.from_numpy(segment.slots), registrar(stream.device))


def _identity_texts(
    config: MoebiusConfig, identity: str, kv_cache: AttendedPages, states: StateSlots | None
) -> tuple[str, str]:
    """Returns everything that decides what a block holds, and its form, in which ranks may differ."""
    gpu, experts = config.gpu, config.experts
    tensors = [*kv_cache.page_tensors(), *([] if states is None else states.tensors())]
    form = [f"{tuple(tensor.shape[1:])} {tensor.dtype}" for tensor in tensors]
    chosen = (
        *(config.model.dtype, config.model.dense_weights, config.model.experts_per_token),
        *(config.model.max_model_len, gpu.page_size, gpu.kv_cache_dtype),
        *(experts.expert_dtype, experts.defer_experts),
    )
    return "\n".join((version("moebius"), identity, repr(chosen))), "\n".join(form)
