"""Experts on disk with some of them in RAM: how much RAM they have, how many are missed, what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from app.planning.capacity import DEFAULT_CONTEXT, DoesNotFit
from app.planning.hardware import Hardware
from app.planning.memory import (
    EXPERTS_OF_SERVER,
    RAM,
    Component,
    Residency,
    packed_expert,
    total_bytes,
)
from app.planning.speed import ColdReads, predict_decode
from moebius.errors import ConfigError
from moebius.experts.placement import recorded_counts

if TYPE_CHECKING:
    from app.planning.planner import Planner

GIB = 2**30
# Of what a token's experts take, the share that `auto` lets it read from disk.
MOST_MISSED = 0.05
# Of the RAM that nothing else takes: some is left for the pages through which the file is written.
ROOM_SHARE = 0.98
# What kernels/moe/cold_experts.h needs of a layer, and what a slot takes beside its expert.
FEWEST_SLOTS, SLOT_OVERHEAD = 3, 8192
# Bytes per second where nothing can be read here: an NVMe disk of PCIe 3, with reads of half a MiB.
ASSUMED_DISK_BANDWIDTH = 2e9
_READ_BYTES, _READS, _THREADS = 512 * 2**10, 96, 16


@dataclass(frozen=True, slots=True)
class ColdExperts:
    """Filled by `with_cold_experts`; bytes, of all expert servers."""

    memory_bytes: int
    file_bytes: int
    # Share of the experts that one token chooses which is read from disk.
    missed: float
    # "even routing", or the file of recorded routing.
    routing: str
    # Bytes per second, and "measured here" or "assumed".
    disk_bandwidth: float
    disk_origin: str


@dataclass(frozen=True)
class Routing:
    """How probable each expert is for one choice; filled by `routing_of`."""

    # float64 `[layers, experts]`, descending in each layer.
    shares: NDArray[np.float64]
    top_k: float
    name: str

    def missed(self, held: float, rows: float) -> float:
        """Returns which share of the different experts that `rows` tokens choose is not among the most
        frequent ones, `held` (0 to 1) of each layer.
        """
        chosen = 1.0 - (1.0 - np.minimum(1.0, self.top_k * self.shares)) ** rows
        kept = int(held * self.shares.shape[1])
        return float(chosen[:, kept:].sum() / chosen.sum())


def routing_of(planner: Planner) -> Routing:
    """Returns what `expert_statistics` recorded, else even routing."""
    geometry, placement = planner.geometry, planner.config.placement
    recorded: Mapping[int, NDArray[np.int64]] | None = recorded_counts(placement, geometry)
    if recorded is None:
        even = np.full((1, geometry.num_experts), 1.0 / geometry.num_experts)
        return Routing(even, geometry.mean_top_k, "even routing")
    counts = np.stack([np.sort(recorded[layer])[::-1] + 1e-9 for layer in geometry.moe_layers])
    shares = counts / counts.sum(axis=1, keepdims=True)
    return Routing(shares, geometry.mean_top_k, placement.expert_statistics)


def measured_disk(model: str) -> float | None:
    """Returns how fast the disk with the model's largest file is read past the page cache, bytes per second;
    None: it cannot be measured. Takes tens of milliseconds on an NVMe disk.
    """
    import time

    from moebius import _kernels

    path = Path(model)
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    try:
        largest = max(files, key=lambda file: file.stat().st_size, default=None)
        rows = 0 if largest is None else largest.stat().st_size // _READ_BYTES
        if largest is None or rows < 2 * _READS:
            return None
        threads = _kernels.ReadThreads(_THREADS)
        reader = _kernels.RowReader(threads, [(_READ_BYTES, [(str(largest.resolve()), 0, rows)])], 0)
        if not reader.is_direct:
            return None
        begin = time.perf_counter()
        _kernels.RowFetch(reader, np.linspace(0, rows - 1, _READS).astype(np.int64)).wait()
    except (OSError, RuntimeError):
        return None
    return _READS * _READ_BYTES / (time.perf_counter() - begin)


def with_cold_experts(planner: Planner, hardware: Hardware, residency: Residency) -> Planner:
    """Returns the planner with what `cold_experts` becomes.

    Raises ConfigError for experts on disk beside a GPU, DoesNotFit where RAM holds too few of them, or where
    `auto` would read too much.
    """
    experts = planner.config.experts
    if planner.on_gpu and experts.cold_experts == "disk":
        raise ConfigError(
            "cold_experts: disk is for engines without a GPU, which read packed experts in RAM; allowed: "
            "ram, auto"
        )
    is_served_here = planner.stored and not residency.is_everything and not experts.expert_addresses
    if planner.on_gpu or experts.cold_experts == "ram" or not is_served_here:
        return planner
    parts = list(planner.ram_parts(hardware, residency, planner.cpu_kv()))
    packed = sum(part.nbytes for part in parts if part.part.startswith(EXPERTS_OF_SERVER))
    wanted = total_bytes(parts, RAM)
    if experts.cold_experts == "auto" and wanted <= hardware.ram_bytes:
        return planner
    room = int(ROOM_SHARE * (hardware.ram_bytes - (wanted - packed)))
    memory = min(int(experts.expert_memory_gib * GIB) or room, packed)
    if memory < _least_bytes(planner):
        if experts.cold_experts == "auto":
            return planner  # Refused as all else that RAM is too small for.
        raise DoesNotFit(
            f"experts on disk need {_least_bytes(planner) / GIB:.2f} GiB of RAM for {FEWEST_SLOTS} of each "
            f"layer, {max(0, memory) / GIB:.2f} GiB are left for them"
        )
    found = _with(planner, hardware, memory, packed)
    assert found.cold is not None
    if experts.cold_experts == "auto" and found.cold.missed > MOST_MISSED:
        work = found.work(residency, hardware)
        speed = predict_decode(work, hardware, (1,), min(DEFAULT_CONTEXT, planner.model.max_model_len))[0]
        try:
            planner.check_ram(hardware, parts, 0, fill=False, explain=False)
        except DoesNotFit as error:
            raise DoesNotFit(
                f"{error}; with experts on disk (--cold-experts disk) {cost(found.cold)}, "
                f"{speed.tokens_per_second:.2g} tokens/s; auto does so up to {MOST_MISSED:.0%}"
            ) from error
    return found


def cost(cold: ColdExperts) -> str:
    """Returns what it costs, as part of a sentence."""
    return (
        f"{cold.missed:.1%} of a token's experts are read from disk ({cold.routing}) at "
        f"{cold.disk_bandwidth / 1e9:.1f} GB/s ({cold.disk_origin})"
    )


def cold_parts(parts: tuple[Component, ...], cold: ColdExperts | None) -> tuple[Component, ...]:
    """Returns the components of RAM with what servers have there of experts that are on disk."""
    if cold is None:
        return parts
    share = cold.memory_bytes / cold.file_bytes
    return tuple(
        replace(part, nbytes=int(part.nbytes * share)) if part.part.startswith(EXPERTS_OF_SERVER) else part
        for part in parts
    )


def _with(planner: Planner, hardware: Hardware, memory: int, packed: int) -> Planner:
    # What a slot takes beside its expert is not for experts.
    slots = [_expert_bytes(planner, layer) + SLOT_OVERHEAD for layer in planner.stored]
    held = min(1.0, memory / (planner.geometry.num_experts * sum(slots)))
    routing = routing_of(planner)
    bandwidth = measured_disk(planner.config.model.model)
    chosen = ColdExperts(
        memory,
        packed,
        routing.missed(held, 1),
        routing.name,
        bandwidth or ASSUMED_DISK_BANDWIDTH,
        "measured here" if bandwidth else "assumed",
    )
    reads = ColdReads(chosen.disk_bandwidth, lambda rows: routing.missed(held, rows))
    return planner.with_cold(chosen, reads)


def _expert_bytes(planner: Planner, layer: int) -> int:
    geometry, dtype = planner.geometry, planner.config.experts.expert_dtype
    inner = geometry.moe_intermediate_size
    return packed_expert(planner.stored[layer], geometry.hidden_size, inner, dtype).expert_bytes


def _least_bytes(planner: Planner) -> int:
    return sum(
        min(FEWEST_SLOTS, planner.geometry.num_experts) * (_expert_bytes(planner, layer) + SLOT_OVERHEAD)
        for layer in planner.stored
    )
