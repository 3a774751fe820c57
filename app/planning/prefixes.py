"""RAM for prefixes below the KV cache: how much engines on GPUs have by `auto`, what `moebius plan` counts,
and what `serve` and `doctor` refuse.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from app.doctor.facts import read_volume
from app.planning.memory import (
    EXPERT_BYTES,
    EXPERTS_OF_SERVER,
    GATEWAY_BYTES,
    GPU_ENGINE_BYTES,
    MAILBOX,
    RAM,
    Residency,
    total_bytes,
)
from moebius.config import MoebiusConfig
from moebius.kv_tiers import default_tier_bytes, rank_tier_bytes, with_tier_bytes
from moebius.process.limits import lockable_memory

if TYPE_CHECKING:
    from app.planning.hardware import Hardware
    from app.planning.planner import Planner


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


def with_prefix_room(
    config: MoebiusConfig, on_gpu: bool, free_bytes: int, expert_bytes: int, root: Path = Path("/")
) -> MoebiusConfig:
    """Returns the settings with what `kv_offload_gib` auto becomes: `default_tier_bytes` of `kv_tiers`, 0
    on a CPU, whose pages are RAM themselves, and without a prefix cache.

    `free_bytes`: of RAM, what can be had now. `expert_bytes`: what packed experts, mailboxes and a
    `kv_disk_dir` in memory will take of it on this host.
    """
    if not on_gpu or not config.gpu.prefix_caching:
        return with_tier_bytes(config, 0)
    taken = expert_bytes + _process_bytes(config)
    return with_tier_bytes(config, default_tier_bytes(free_bytes, taken, lockable_memory(root)))


def _process_bytes(config: MoebiusConfig) -> int:
    """Returns what the processes of this host have without weights and caches."""
    ranks = len(config.parallel.host_ranks) * config.parallel.data_parallel_size
    return GATEWAY_BYTES + config.experts.expert_servers * EXPERT_BYTES + ranks * GPU_ENGINE_BYTES


def with_prefixes(planner: Planner, hardware: Hardware, residency: Residency) -> Planner:
    """Returns the planner with what `kv_offload_gib` auto becomes beside all else in RAM; never so much
    that a plan would not fit because of it.
    """
    if planner.config.gpu.kv_offload_gib != "auto" or not planner.on_gpu:
        return planner
    # On a GPU's host no part of RAM depends on the KV cache.
    parts = planner.ram_parts(hardware, residency, planner.cpu_kv())
    of_experts = sum(
        part.nbytes for part in parts if part.part.startswith(EXPERTS_OF_SERVER) or part.part == MAILBOX
    )
    ranks = len(planner.forecast.ranks)
    experts = of_experts + ranks * _shared_bytes(planner.config)
    config = with_prefix_room(planner.config, planner.on_gpu, hardware.ram_bytes, experts)
    if prefix_bytes(config) * ranks > hardware.ram_bytes - total_bytes(parts, RAM):
        config = with_tier_bytes(planner.config, 0)
    return planner.with_settings(config)
