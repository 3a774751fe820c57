"""Streaming as the engine drives it: asked before every eager step, it gives what the step's layers use.

Two ways to begin:

- `begin(rows, is_decode)`, for steps of the engine's main lane: None where expert servers compute faster, or
  where nothing can be streamed now.
- `begin_whole(rows)`, for a prefill lane: every expert that has rows and is not resident is streamed, of
  every layer, so that no layer touches the expert client. Until its `end` the main lane's steps do not
  stream, because its copies would wait for this step's products.

An expert that has probably no rows, by what earlier steps chose, is not copied ahead: expert servers have it,
or in the lane the host waits for what the layer's router says, while the others' products are computed.

The caller of `begin` puts the result into `ForwardContext.streamed`, calls `launched` when all layers are,
and `check` when the step has ended. A step that is run again begins again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import structlog
import torch

from gpu_service.core.parallel import SOLO, ParallelContext
from gpu_service.experts.costs import CostCurve
from gpu_service.experts.resident.experts import LayerSlots, ResidentExperts, ResidentKernels
from gpu_service.experts.resident.panels import LayerFormat
from gpu_service.experts.streaming.plan import (
    SHARES,
    CopyRun,
    LayerStream,
    Piece,
    StoredExperts,
    StreamPlan,
    plan_layer,
    whole_experts,
)
from gpu_service.experts.streaming.ring import BufferRing, TransferDevice
from gpu_service.experts.streaming.routing import Counts, RecentRouting
from gpu_service.experts.streaming.segments import ExpertSegments
from gpu_service.experts.streaming.step import ShareChooser, StreamedExperts
from gpu_service.experts.streaming.streamed_step import StreamedStep, WaitUntil
from moebius.models.geometry import MoeGeometry

_log = structlog.get_logger(__name__)
# More tokens than any step has.
MAX_STREAMED_TOKENS = 2**16
# Plans and slots that are kept: few differ, unless residents or shares change all the time.
_MOST_PLANS, _MOST_SLOTS = 64, 8192


class ExpertSource(Protocol):
    """Where experts are copied from; `SegmentSource` is the real one."""

    def segments(self) -> ExpertSegments | None:
        """Returns what may be copied now; None: nothing, until it is open again, which goes on by itself.

        Any thread may ask.
        """

    def address(self, segments: ExpertSegments, stored: StoredExperts) -> int | None:
        """Returns where the device's kernels find the part's first expert; None: they cannot read it."""

    def copy(self, segments: ExpertSegments, target: torch.Tensor, piece: Piece, run: CopyRun) -> None:
        """Launches a run's copy to device memory."""

    def time_copy(self, segments: ExpertSegments, target: torch.Tensor, piece: Piece, run: CopyRun) -> float:
        """Seconds of a run's copy while there is no other. Not for the thread that launches steps."""

    def close(self) -> None:
        """Gives everything up; copies must have ended."""


def _alone(values: torch.Tensor) -> torch.Tensor:
    return values


class ExpertStreamer:
    """The streamer of one rank. Driven by the thread that launches steps."""

    def __init__(
        self,
        geometry: MoeGeometry,
        layers: Sequence[int],
        ring: BufferRing,
        device: TransferDevice,
        kernels: ResidentKernels,
        chooser: ShareChooser,
        *,
        resident: ResidentExperts | None = None,
        parallel: ParallelContext = SOLO,
        counts: Mapping[int, Sequence[int]] | None = None,
        largest: Callable[[torch.Tensor], torch.Tensor] = _alone,
    ) -> None:
        """`layers`: this rank's, in the order of computing, multi-token prediction's last.

        `counts`: how often each expert was chosen, by layer.

        `largest` gives all ranks the largest of their numbers, by element of int64 tensors of one shape on
        the host; they call it at the same places.
        """
        self.ring = ring
        # Seconds of a layer on the device; filled by `measure.measure_products`. None: it was not measured.
        self.products: CostCurve | None = None
        # Of all steps that were begun; counted by `begin` and `begin_whole`.
        self.streamed_steps = self.streamed_bytes = 0
        # The same by layer: experts and bytes.
        self.streamed_of: dict[int, tuple[int, int]] = dict.fromkeys(layers, (0, 0))
        self.geometry = geometry
        self.layers = tuple(layers)
        self.device = device
        self.kernels = kernels
        self.chooser = chooser
        self._resident = resident
        # Of those that share every layer.
        self.rank, self.num_ranks = parallel.tp_rank, parallel.tp_size
        # Those of every step, which are measured and counted; the others come once its tokens are sampled.
        self.passed_layers = tuple(layer for layer in self.layers if layer in geometry.passed_layers)
        self._routing = RecentRouting(self.passed_layers, geometry.num_experts, counts or {})
        self._largest = largest
        self._source: ExpertSource | None = None
        # By share, for the residents of `_plans_of`; of single layers also for those of earlier steps.
        self._plans: dict[tuple[int, bytes], StreamPlan] = {}
        self._layer_plans: dict[tuple[int, int, tuple[int, ...], frozenset[int]], LayerStream] = {}
        self._slots: dict[tuple[int, Piece], LayerSlots] = {}
        self._maps: dict[tuple[int, ...], torch.Tensor] = {}
        self._plans_of: tuple[ExpertSegments, int] | None = None
        # By layer the experts that these segments do not have; layers of which they have all are left out.
        self._lacking: dict[int, set[int]] = {}
        self._lacking_of: ExpertSegments | None = None
        self._experts = set(range(geometry.num_experts))
        # The step that may still use the ring, and whether it keeps others from it.
        self._current: StreamedStep | None = None
        self._whole: StreamedStep | None = None

    def open(self, source: ExpertSource) -> None:
        """Sets where experts come from; until then nothing is streamed."""
        self._source = source

    def begin(self, rows: int, is_decode: bool = False) -> StreamedExperts | None:
        """Begins a step of `rows` token rows; `is_decode`: every request computes one token.

        All ranks call it for the same steps, and get alike. Not while a graph is captured.
        """
        if self._source is None or self._whole is not None:
            return None
        if not self.chooser.may_stream(rows, is_decode):
            return None
        segments = self._usable()
        # One rank that cannot stream keeps all from it: no other process would compute its part.
        refused = SHARES + 1
        chosen = self.agree(refused if segments is None else self.chooser.share(rows))
        if chosen in (0, refused) or segments is None:
            return None
        unrouted = self._unrouted(rows) if self.chooser.asks_servers else None
        return self._begin(segments, self._plan(segments, chosen, unrouted), rows)

    def begin_whole(self, rows: int, wait_until: WaitUntil) -> StreamedStep | None:
        """Begins a step of a separate lane; None: not everything can be streamed now, or another has not
        ended yet.

        All ranks call it for the same steps, and get alike. `wait_until`: while layers are launched.
        """
        segments = self._usable() if self._whole is None else None
        can_stream = segments is not None and self._has_all(segments)
        if self.agree(int(not can_stream)) or segments is None:
            return None
        self._whole = self._begin(segments, self._plan(segments, SHARES, self._unrouted(rows)), 0, wait_until)
        return self._whole

    def _unrouted(self, rows: int) -> npt.NDArray[np.bool_]:
        """Returns `[passed layers, num_experts]`: experts that are not copied before they are known to have
        rows.
        """
        return self._routing.unrouted(rows * self.geometry.top_k)

    def _usable(self) -> ExpertSegments | None:
        """What a step that begins now may copy."""
        return None if self._source is None else self._source.segments()

    def _drop_current(self) -> None:
        if self._current is not None:
            self._current = None
            self.ring.stop()

    def _begin(
        self, segments: ExpertSegments, plan: StreamPlan, rows: int, wait_until: WaitUntil | None = None
    ) -> StreamedStep:
        self._current = step = StreamedStep(self, plan, segments, rows, wait_until)
        fetches = wait_until is not None and any(layer.deferred for layer in plan.layers)
        try:
            self.ring.start(plan.pieces, step.copy, keeps_one_free=fetches)
        except BaseException:
            self.end(step)
            raise
        step.copies = self.ring.copies
        self.streamed_steps += 1
        for layer in plan.layers:
            self.count_streamed(layer.layer, len(layer.experts), layer.nbytes)
        return step

    def count_streamed(self, layer: int, num_experts: int, nbytes: int) -> None:
        """Experts of a layer are copied for a step."""
        experts, known = self.streamed_of[layer]
        self.streamed_of[layer] = experts + num_experts, known + nbytes
        self.streamed_bytes += nbytes

    @property
    def has_lane_step(self) -> bool:
        """Whether a step of a lane streams, whose copies are under way. Only by the thread that launches."""
        return self._whole is not None

    @property
    def source(self) -> ExpertSource | None:
        """Returns what is copied from; None: nothing is there yet."""
        return self._source

    @property
    def break_even_rows(self) -> int:
        """Token rows from which streaming everything takes less time than leaving everything to servers."""
        return self.chooser.break_even_rows

    @property
    def useful_tokens(self) -> int:
        """The tokens of a step that streams everything beyond which each takes as long, by what was
        measured.
        """
        return self.chooser.step_tokens(MAX_STREAMED_TOKENS, 0.0)

    @property
    def is_open(self) -> bool:
        """Returns whether there is something to copy now. Any thread may ask."""
        return self._usable() is not None

    @property
    def can_stream(self) -> bool:
        """Whether `begin_whole` would have something to give, were the ring free. Cheap: for schedulers.

        Only by the thread that launches steps, or while it does not.
        """
        segments = self._usable()
        return segments is not None and self._has_all(segments)

    def _has_all(self, segments: ExpertSegments) -> bool:
        """Returns whether every expert is in the segments or on the device, without a plan: schedulers ask
        often, and where residents follow traffic each plan of all layers would take milliseconds.
        """
        if self._lacking_of is not segments:
            found = {
                layer: self._experts - set(whole_experts(segments.stored[layer])) for layer in self.layers
            }
            self._lacking = {layer: experts for layer, experts in found.items() if experts}
            self._lacking_of = segments
        return all(experts <= set(self.resident_of(layer)) for layer, experts in self._lacking.items())

    def _plan(
        self, segments: ExpertSegments, share: int, unrouted: npt.NDArray[np.bool_] | None = None
    ) -> StreamPlan:
        """Kept by what it depends on: where residents change while serving, few layers do at a time.

        `unrouted`: as `_unrouted`; None: no expert.
        """
        depends_on = segments, 0 if self._resident is None else self._resident.version
        if self._plans_of is None or self._plans_of[0] is not segments:
            self._layer_plans, self._slots = {}, {}
        if self._plans_of != depends_on:
            self._plans, self._plans_of = {}, depends_on
        key = share, b"" if unrouted is None or not unrouted.any() else unrouted.tobytes()
        if key not in self._plans:
            if len(self._plans) > _MOST_PLANS:
                self._plans = {}
            ids = [frozenset[int]()] * len(self.passed_layers)
            if key[1] and unrouted is not None:
                ids = [frozenset(np.flatnonzero(one).tolist()) for one in unrouted]
            by_layer = dict(zip(self.passed_layers, ids, strict=True))
            self._plans[key] = StreamPlan(
                share,
                tuple(
                    self._plan_of_layer(segments, share, layer, by_layer.get(layer, frozenset()))
                    for layer in self.layers
                ),
            )
        return self._plans[key]

    def _plan_of_layer(
        self, segments: ExpertSegments, share: int, layer: int, unrouted: frozenset[int]
    ) -> LayerStream:
        key = layer, share, self.resident_of(layer), unrouted
        if key not in self._layer_plans:
            if len(self._layer_plans) > _MOST_PLANS * len(self.layers):
                self._layer_plans, self._slots = {}, {}
            self._layer_plans[key] = plan_layer(
                segments.stored[layer],
                key[2],
                self.geometry.num_experts,
                share,
                self.ring.buffer_bytes,
                self.rank,
                self.num_ranks,
                self._routing.counts(layer) if layer in self.passed_layers else (),
                unrouted,
            )
        return self._layer_plans[key]

    def resident_of(self, layer: int) -> tuple[int, ...]:
        """Returns the experts that are on the device anyhow."""
        return () if self._resident is None else self._resident.experts(layer)

    def slots(self, buffer: int, piece: Piece) -> LayerSlots:
        """Returns a piece in a buffer as kernels see it."""
        key = buffer, piece
        if key not in self._slots:
            if len(self._slots) > _MOST_SLOTS:
                self._slots = {}
            kind = piece.stored.kind
            weights = self.ring.buffers[buffer][: piece.nbytes].view(-1, kind.expert_bytes)
            self._slots[key] = LayerSlots(
                kind,
                weights,
                self.slot_map(piece.experts),
                list(piece.experts),
                self.geometry.limit_of(piece.stored.layer),
            )
        return self._slots[key]

    def slot_map(self, experts: tuple[int, ...]) -> torch.Tensor:
        """Returns int32 `[num_experts]` on the device: an expert's place among `experts`; -1: it is not
        there.
        """
        if experts not in self._maps:
            if len(self._maps) > _MOST_SLOTS:
                self._maps = {}
            slots = torch.full((self.geometry.num_experts,), -1, dtype=torch.int32)
            slots[list(experts)] = torch.arange(len(experts), dtype=torch.int32)
            self._maps[experts] = self.device.upload(slots)
        return self._maps[experts]

    def sample_slots(self, kind: LayerFormat) -> LayerSlots:
        """Returns the first buffer as experts of a format, whatever is in it: to warm up and to measure with.

        Not while a step streams.
        """
        count = min(self.ring.buffer_bytes // kind.expert_bytes, self.geometry.num_experts)
        weights = self.ring.buffers[0][: count * kind.expert_bytes].view(count, kind.expert_bytes)
        experts = tuple(range(count))
        return LayerSlots(kind, weights, self.slot_map(experts), list(experts), self.geometry.limit)

    def copy(self, segments: ExpertSegments, target: torch.Tensor, piece: Piece, run: CopyRun) -> None:
        """One run, from what the step began with."""
        assert self._source is not None
        self._source.copy(segments, target, piece, run)

    def is_current(self, step: StreamedStep) -> bool:
        """Returns whether the ring's pieces are this step's."""
        return self._current is step

    def agree(self, number: int) -> int:
        """Returns the largest of all ranks'."""
        return int(self._largest(torch.tensor([number])))

    def is_any(self, answer: bool) -> bool:
        """Returns whether any rank's answer is yes; all ask at once."""
        return bool(self._largest(torch.tensor([int(answer)])))

    def agree_on_step(self, problem: bool, counts: Mapping[int, torch.Tensor]) -> tuple[bool, Counts]:
        """Returns whether any rank has a problem, and what all have counted, int64 `[passed layers,
        num_experts]`.

        `counts`: by layer, `[num_experts]` on the host. Ranks of all stages call it.
        """
        layers = self.geometry.passed_layers
        values = torch.zeros(len(layers) + 1, self.geometry.num_experts, dtype=torch.int64)
        values[-1] = int(problem)
        for place, layer in enumerate(layers):
            if layer in counts:
                values[place] = counts[layer]
        agreed = self._largest(values)
        own = [place for place, layer in enumerate(layers) if layer in self.passed_layers]
        return bool(agreed[-1].any()), agreed[own].numpy()

    def routed(self, counts: Counts) -> None:
        """Notes what a step chose, of all layers: later ones stream those with the most rows."""
        available = np.ones(counts.shape, np.bool_)
        for place, layer in enumerate(self.passed_layers):
            available[place, list(self.resident_of(layer))] = False
        if self._routing.add(counts, available):
            self._plans, self._layer_plans = {}, {}
            _log.debug("experts with the most rows of late are streamed first")
        self.chooser.routed(self._routing.left())

    def end(self, step: StreamedStep) -> None:
        """The step launches nothing more."""
        if self._whole is step:
            self._whole = None
        if self._current is step:
            self._drop_current()

    @property
    def is_synchronous(self) -> bool:
        """Returns whether the host is the device."""
        return self.device.is_synchronous

    def close(self) -> None:
        """Steps must have ended."""
        self.ring.stop()
        if self._source is not None:
            self._source.close()
            self._source = None
