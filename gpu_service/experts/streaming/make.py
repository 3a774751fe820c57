"""From settings to a streamer: whether there is one, how large its ring is, where its experts come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import structlog
import torch

from gpu_service.core.parallel import ParallelContext
from gpu_service.device.pinned import (
    LEFT_BYTES,
    MORE_PINNED,
    Registrar,
    in_place,
    may_be_limited,
    pinned_limit,
    registrar,
)
from gpu_service.device.stream import DeviceStream
from gpu_service.experts.client import ExpertClient
from gpu_service.experts.costs import ExpertCosts
from gpu_service.experts.resident.experts import ResidentExperts, Share
from gpu_service.experts.resident.make import make_kernels
from gpu_service.experts.resident.panels import LayerFormat, layer_format
from gpu_service.experts.streaming.measure import (
    MeasuredCosts,
    measure_costs,
    measure_link,
    measure_products,
)
from gpu_service.experts.streaming.opening import open_segments, segment_paths
from gpu_service.experts.streaming.plan import RingLayout, ring_layout
from gpu_service.experts.streaming.ring import BufferRing, transfer_device
from gpu_service.experts.streaming.segments import ExpertSegments
from gpu_service.experts.streaming.share import ShareChooser
from gpu_service.experts.streaming.source import SegmentSource
from gpu_service.experts.streaming.step import StreamedExperts
from gpu_service.experts.streaming.streamer import ExpertStreamer
from moebius.config import MoebiusConfig
from moebius.errors import UserError, brief
from moebius.experts.placement import make_placement, recorded_counts
from moebius.experts.slices import REQUANTISED, SliceRequest, plan_slice
from moebius.models.expert_checkpoint import ExpertCheckpoint
from moebius.models.geometry import MoeGeometry
from moebius.process.progress import phase

_log = structlog.get_logger(__name__)
# The ring takes at most this part of a GPU's memory; with less of it pieces are smaller.
_MOST_OF_DEVICE = 12


def streams(config: MoebiusConfig, device_type: str) -> bool:
    """Returns whether the settings ask for streaming on such a device ("cuda", "cpu").

    Raises UserError where they ask for what cannot be.
    """
    mode = config.gpu.prefill_experts
    if mode == "cpu" or (mode == "auto" and device_type != "cuda"):
        return False
    if not config.experts.expert_weights_dir:
        if mode == "stream":
            raise UserError(
                "prefill_experts is 'stream', but expert_weights_dir is empty: expert servers keep their "
                "weights to themselves; allowed here: auto, cpu"
            )
        return False
    return True


@dataclass(frozen=True, slots=True)
class StoredFormats:
    """How expert servers pack a layer; filled from the checkpoint's headers."""

    gate_up: str
    down: str
    has_bias: bool


@dataclass(frozen=True, slots=True)
class ServedPart:
    """What one server holds of a layer; filled by `served_parts`."""

    # Without those that are resident.
    num_experts: int
    kind: LayerFormat


def served_parts(
    config: MoebiusConfig,
    geometry: MoeGeometry,
    stored: Mapping[int, StoredFormats],
    group: int,
    resident: Mapping[int, Sequence[int]],
) -> dict[int, tuple[ServedPart, ...]]:
    """Returns the parts by layer of `stored`, as the servers divide it. `group`: channels that stay together,
    over all layers.

    Raises ValueError naming the setting for a division that cannot be.
    """
    request, count = SliceRequest.from_config(config), config.experts.split_count
    slices = [plan_slice(geometry, replace(request, split_index=index), group) for index in range(count)]
    return {
        layer: tuple(
            ServedPart(
                part.num_held(resident.get(layer, ())),
                layer_format(
                    found.gate_up,
                    found.down,
                    geometry.hidden_size,
                    part.intermediate_size,
                    found.has_bias,
                    geometry.is_gated,
                ),
            )
            for part in slices
        )
        for layer, found in stored.items()
    }


def read_parts(
    config: MoebiusConfig, geometry: MoeGeometry, layers: Sequence[int]
) -> dict[int, tuple[ServedPart, ...]]:
    """Returns the parts of this rank's layers. Raises CheckpointError, and ValueError as `served_parts`."""
    checkpoint = ExpertCheckpoint.open(config.model.model, geometry, config.model.expert_checkpoint)
    first = {layer: checkpoint.expert(layer, 0) for layer in geometry.moe_layers}
    target = REQUANTISED.get(config.experts.expert_dtype)
    stored = {
        layer: StoredFormats(*((target, target) if target else first[layer].formats), first[layer].has_bias)
        for layer in layers
    }
    group = math.lcm(*(found.intermediate_multiple for found in first.values()))
    resident = make_placement(config.placement, geometry).resident
    return served_parts(config, geometry, stored, group, resident)


def ring_of(
    parts: Mapping[int, Sequence[ServedPart]], ranks: int, device_bytes: int | None
) -> RingLayout | None:
    """Returns the ring of one of `ranks` tensor-parallel ranks; None: every expert is resident.

    `device_bytes`: of the GPU's memory; None: no limit. Raises UserError when that is too small.
    """
    held = [[part for part in found if part.num_experts] for found in parts.values()]
    layers = [sum(-(-part.num_experts // ranks) * part.kind.expert_bytes for part in found) for found in held]
    if not any(layers):
        return None
    largest = max(part.kind.expert_bytes for found in held for part in found)
    most = None if device_bytes is None else device_bytes // _MOST_OF_DEVICE
    try:
        return ring_layout(max(layers), largest, max(map(len, held)), most)
    except ValueError as error:
        raise UserError(f"prefill_experts: {error}; allowed here: cpu") from error


@dataclass(frozen=True)
class StreamingPlan:
    """What a rank will stream, known before anything is loaded; filled by `plan_streaming`."""

    layers: tuple[int, ...]
    parts: Mapping[int, Sequence[ServedPart]]
    layout: RingLayout
    device_bytes: int | None = None  # of the GPU's memory; None: it is not limited
    pinned_bytes: int | None = None  # That may be page-locked; None: all that is streamed.

    @property
    def layer_bytes(self) -> dict[int, int]:
        """Bytes of each layer's experts in the segments of all servers."""
        return {
            layer: sum(part.num_experts * part.kind.expert_bytes for part in found)
            for layer, found in self.parts.items()
        }

    @property
    def layers_in_place(self) -> frozenset[int]:
        """Layers that the device copies from where they are; the others go through a buffer."""
        sizes = self.layer_bytes
        return frozenset(list(sizes)[: in_place(list(sizes.values()), self.pinned_bytes)])

    @property
    def kinds(self) -> frozenset[LayerFormat]:
        """Every format that pieces have."""
        return frozenset(part.kind for found in self.parts.values() for part in found)

    @property
    def widest(self) -> LayerFormat:
        """That of the largest experts."""
        return max(self.kinds, key=lambda kind: kind.expert_bytes)


def plan_streaming(
    config: MoebiusConfig, geometry: MoeGeometry, layers: Sequence[int], device: torch.device
) -> StreamingPlan | None:
    """Returns the plan of this rank; None: it streams nothing.

    Raises UserError naming a setting, CheckpointError.
    """
    # Where everything is resident no server is started, and none has weights to stream.
    if not layers or make_placement(config.placement, geometry).covers_everything:
        return None
    if not streams(config, device.type):
        return None
    total = None
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    parts = read_parts(config, geometry, layers)
    layout = ring_of(parts, config.parallel.tensor_parallel_size, total)
    if layout is None:
        return None
    plan = StreamingPlan(tuple(layers), parts, layout, total)
    # Trying takes as long as registering all of it, so it is left out where nothing speaks for a limit; where
    # there is one nevertheless, registering ends at it.
    if device.type != "cuda" or not may_be_limited():
        return plan
    return with_pinned_limit(plan, registrar(device))


def with_pinned_limit(plan: StreamingPlan, registrar: Registrar) -> StreamingPlan:
    """Returns the plan with what may be page-locked, as it is tried here; logs what a limit means."""
    total = sum(plan.layer_bytes.values())
    limit = pinned_limit(registrar, total + LEFT_BYTES)
    if limit is None:
        return plan
    plan = replace(plan, pinned_bytes=limit)
    _log.warning(
        f"at most {limit / 2**30:.2f} GiB can be page-locked: {len(plan.layers_in_place)} of "
        f"{len(plan.parts)} layers are copied to the GPU from where they are; the others go through a small "
        "page-locked buffer, which takes the host's time, and decode steps fetch none of their experts",
        of_gib=round(total / 2**30, 2),
        remedy=MORE_PINNED,
    )
    return plan


def make_streamer(
    config: MoebiusConfig,
    plan: StreamingPlan,
    geometry: MoeGeometry,
    device: torch.device,
    dtype: torch.dtype,
    resident: ResidentExperts | None,
    parallel: ParallelContext,
    largest: Callable[[torch.Tensor], torch.Tensor],
    costs: ExpertCosts,
) -> ExpertStreamer | None:
    """Returns a streamer with its ring and warmed-up kernels; None, with a warning: these do not run here.

    Raises UserError naming a setting.
    """
    mode, layout, transfers = config.gpu.prefill_experts, plan.layout, transfer_device(device)
    assert mode != "cpu"
    streamer = ExpertStreamer(
        geometry,
        plan.layers,
        BufferRing(transfers, layout.num_buffers, layout.buffer_bytes),
        transfers,
        make_kernels(geometry, device),
        ShareChooser(
            mode,
            config.gpu.stream_min_rows,
            sum(layer in geometry.passed_layers for layer in plan.layers),
            costs,
        ),
        resident=resident,
        parallel=parallel,
        counts=_counts(config, geometry),
        largest=largest,
    )
    most_rows = max(config.gpu.num_batched_tokens, config.gpu.prefill_chunk_max or 0)
    if not _warm_up(streamer, plan, most_rows, dtype):
        return None
    _log.info(
        "experts may be streamed to the device",
        mode=mode,
        ring_gib=round(layout.nbytes / 2**30, 2),
        buffers=layout.num_buffers,
        buffer_mib=round(layout.buffer_bytes / 2**20, 1),
    )
    return streamer


def _warm_up(streamer: ExpertStreamer, plan: StreamingPlan, max_rows: int, dtype: torch.dtype) -> bool:
    """Compiles what steps of up to `max_rows` need, and measures it while the memory of the KV pool is free.

    False: the kernels do not run on this device.
    """
    try:
        with phase("trying kernels of streamed experts"), torch.inference_mode():
            for kind in plan.kinds:
                streamer.kernels.warm_up(streamer.sample_slots(kind), max_rows, dtype)
            streamer.products = measure_products(streamer, plan.widest, dtype, max_rows)
    except Exception as error:  # a compiler, a driver or a kernel may raise anything
        _log.warning("experts are not streamed: their kernels do not run on this device", error=brief(error))
        return False
    if streamer.device.device.type == "cuda":
        # What it took is not what steps will take, on another stream perhaps.
        torch.cuda.empty_cache()
    return True


def _counts(config: MoebiusConfig, geometry: MoeGeometry) -> dict[int, list[int]]:
    """Returns how often experts were chosen, by layer, where a file says so."""
    found = recorded_counts(config.placement, geometry) or {}
    return {layer: counts.tolist() for layer, counts in found.items()}


def open_streamer(
    config: MoebiusConfig,
    plan: StreamingPlan | None,
    streamer: ExpertStreamer | None,
    experts: ExpertClient | None,
    stream: DeviceStream,
    dtype: torch.dtype,
    undo: ExitStack,
    fingerprint: str,
    on_release: Callable[[], None],
) -> None:
    """Begins to open and register the servers' segments, in the background; `undo` closes them again.

    Expert servers are ready, all ranks call it at once, and nothing is captured in a graph any more: what
    servers and device take is measured first, where the settings leave the choice to that. `fingerprint`:
    of what holds the experts, which segments have to be of. `on_release`: as `SegmentSource` says.
    """
    if plan is None or streamer is None:
        return
    settings = config.experts
    costs = _measured(config, streamer, experts, stream, dtype)
    paths = segment_paths(settings)

    def on_ready(source: SegmentSource, segments: ExpertSegments) -> None:
        if costs is not None:
            measure_link(streamer, source, segments, costs)

    device = streamer.device
    source = SegmentSource(
        lambda: open_segments(paths, plan.layers, fingerprint),
        device,
        registrar(device.device),
        on_ready,
        on_release,
        plan.pinned_bytes,
    )
    streamer.open(source)
    undo.callback(streamer.close)


def _measured(
    config: MoebiusConfig,
    streamer: ExpertStreamer,
    experts: ExpertClient | None,
    stream: DeviceStream,
    dtype: torch.dtype,
) -> MeasuredCosts | None:
    """Returns the measured costs; None: the settings choose, or a server was lost."""
    if config.gpu.prefill_experts != "auto" or experts is None or streamer.products is None:
        return None
    rows = config.gpu.num_batched_tokens
    return measure_costs(streamer, experts, stream, streamer.products, dtype, rows)


def measure_while_serving(
    config: MoebiusConfig,
    streamer: ExpertStreamer | None,
    experts: ExpertClient | None,
    stream: DeviceStream,
    dtype: torch.dtype,
) -> None:
    """Servers and link as at the start, between two steps: it takes some tenths of a second.

    The device's products are those of the start, when its memory was free. All ranks call it at once; nothing
    is measured while a lane's step has the ring, or segments are not open.
    """
    if streamer is None or streamer.has_lane_step:
        return
    costs = _measured(config, streamer, experts, stream, dtype)
    source = streamer.source
    segments = None if source is None else source.segments()
    if costs is not None and source is not None and segments is not None:
        measure_link(streamer, source, segments, costs)


def profiled_stream(plan: StreamingPlan | None, streamer: ExpertStreamer | None) -> ProfiledStream | None:
    """Returns what the largest step is profiled with; None: it streams nothing."""
    return None if plan is None or streamer is None else ProfiledStream(streamer, plan.widest)


class ProfiledStream(StreamedExperts):
    """For measuring memory: every layer is computed whole from what lies in the ring, which means nothing."""

    def __init__(self, streamer: ExpertStreamer, kind: LayerFormat) -> None:
        """`kind`: the format that takes most."""
        self._kernels = streamer.kernels
        self._slots = streamer.sample_slots(kind)
        self._layers = frozenset(streamer.layers)

    def share(self, layer: int) -> Share:
        return Share.ALL if layer in self._layers else Share.NONE

    def cpu_ids(self, layer: int, topk_ids: torch.Tensor) -> torch.Tensor:
        return torch.full_like(topk_ids, -1)

    def forward(
        self,
        layer: int,
        hidden_states: torch.Tensor,
        parts: Sequence[torch.Tensor],
        topk_weights: torch.Tensor,
        partials: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor]:
        return [
            self._kernels.forward(self._slots, hidden_states, ids, topk_weights, partial)
            for ids, partial in zip(parts, partials, strict=True)
        ]
