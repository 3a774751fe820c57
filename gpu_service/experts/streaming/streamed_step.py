"""One step that streams: what its layers take from the ring, compute, and count."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from gpu_service.experts.client import ExpertUnavailable
from gpu_service.experts.resident.experts import LayerSlots, ResidentKernels, Share
from gpu_service.experts.streaming.plan import CopyRun, LayerStream, Piece, StreamPlan, cut
from gpu_service.experts.streaming.ring import BufferRing, TransferDevice
from gpu_service.experts.streaming.routing import Counts, count_chosen
from gpu_service.experts.streaming.segments import ExpertSegments
from gpu_service.experts.streaming.step import ShareChooser, StreamedExperts
from moebius.models.geometry import MoeGeometry
from moebius.models.layers.ranks import even_shard

WaitUntil = Callable[[Callable[[], bool]], None]
"""Returns when its argument says so, or soon after; meanwhile the host has something else to do."""


class StepOwner(Protocol):
    """What a step uses of the `ExpertStreamer` that made it, whose methods these are."""

    device: TransferDevice
    geometry: MoeGeometry
    kernels: ResidentKernels
    ring: BufferRing
    chooser: ShareChooser
    passed_layers: tuple[int, ...]
    rank: int
    num_ranks: int

    @property
    def is_synchronous(self) -> bool: ...
    def is_current(self, step: StreamedStep) -> bool: ...
    def slots(self, buffer: int, piece: Piece) -> LayerSlots: ...
    def slot_map(self, experts: tuple[int, ...]) -> torch.Tensor: ...
    def copy(self, segments: ExpertSegments, target: torch.Tensor, piece: Piece, run: CopyRun) -> None: ...
    def count_streamed(self, layer: int, num_experts: int, nbytes: int) -> None: ...
    def agree_on_step(self, problem: bool, counts: Mapping[int, torch.Tensor]) -> tuple[bool, Counts]: ...
    def routed(self, counts: Counts) -> None: ...
    def end(self, step: StreamedStep) -> None: ...


class StreamedStep(StreamedExperts):
    """Made by `ExpertStreamer`, whose ring has its pieces in the order of layers."""

    def __init__(
        self,
        streamer: StepOwner,
        plan: StreamPlan,
        segments: ExpertSegments,
        rows: int,
        wait_until: WaitUntil | None,
    ) -> None:
        """`wait_until`: of a step that asks no expert server; `rows`: 0 for one whose time says nothing."""
        self.plan = plan
        self._streamer = streamer
        self._segments = segments
        self._rows = rows
        self._wait_until = wait_until
        self.predicted_seconds = streamer.chooser.predict(rows, plan.share) if rows else None
        # Events around each copy; filled by the ring, which `ExpertStreamer` takes them from.
        self.copies: list[tuple[Any, Any]] = []
        # When the device comes to this step, and when it has launched all.
        self._begin, self._end = streamer.device.record_read(), None
        # By layer how many rows each expert has, int32 `[num_experts]` on the device; then all of them on the
        # host, filled when the step has ended.
        self._chosen: dict[int, torch.Tensor] = {}
        self._counts: torch.Tensor | None = None

    def share(self, layer: int) -> Share:
        found = self.plan.by_layer.get(layer)
        asks_servers = self._wait_until is None
        if found is None or not (found.experts or (found.deferred and not asks_servers)):
            return Share.NONE
        leaves_some = not found.is_whole or (asks_servers and found.deferred)
        return Share.SOME if leaves_some else Share.ALL

    def cpu_ids(self, layer: int, topk_ids: torch.Tensor) -> torch.Tensor:
        slots = self._streamer.slot_map(self.plan.by_layer[layer].experts)
        return torch.where(slots[topk_ids.clamp(min=0).long()] >= 0, -1, topk_ids)

    def forward(
        self,
        layer: int,
        hidden_states: torch.Tensor,
        parts: Sequence[torch.Tensor],
        topk_weights: torch.Tensor,
        partials: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor]:
        sums = list(partials)
        streamer, ring, plan = self._streamer, self._streamer.ring, self.plan.by_layer[layer]
        if not streamer.is_current(self):
            raise RuntimeError(f"layer {layer} streams in a step that another one has followed already")
        if layer in streamer.passed_layers:
            chosen = functools.reduce(torch.maximum, parts)
            self._chosen[layer] = count_chosen([chosen], streamer.geometry.num_experts)[0]
        counts = None
        if plan.deferred and self._wait_until is not None:
            counts = streamer.device.download(self._chosen[layer]), streamer.device.record_read()
        for expected in plan.pieces:
            buffer, piece = ring.take()
            if piece is not expected:
                raise RuntimeError(f"layer {layer} streams out of order: layer {piece.stored.layer} is next")
            slots = streamer.slots(buffer, piece)
            try:
                sums = self._added(slots, hidden_states, parts, topk_weights, sums)
            finally:
                ring.give_back()
        for piece in () if counts is None else self._routed_pieces(plan, *counts):
            buffer = ring.fetch(piece)
            slots = streamer.slots(buffer, piece)
            try:
                sums = self._added(slots, hidden_states, parts, topk_weights, sums)
            finally:
                ring.release(buffer)
        zeros = (torch.zeros_like(hidden_states, dtype=torch.float32) if own is None else own for own in sums)
        return list(zeros)

    def _added(
        self,
        slots: LayerSlots,
        hidden_states: torch.Tensor,
        parts: Sequence[torch.Tensor],
        topk_weights: torch.Tensor,
        sums: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """Each part's sum with the outputs of the experts in `slots`."""
        given = zip(parts, sums, strict=True)
        forward = self._streamer.kernels.forward
        return [forward(slots, hidden_states, ids, topk_weights, own) for ids, own in given]

    def _routed_pieces(self, plan: LayerStream, counts: torch.Tensor, counted: Any) -> Sequence[Piece]:
        """Returns those of this rank's experts that were not copied ahead but have rows after all.

        Waits for `counts` of the layer, which products that were launched since cover.
        """
        streamer = self._streamer
        assert self._wait_until is not None
        self._wait_until(lambda: streamer.device.has_ended(counted))
        streamer.device.wait(counted)
        own = plan.deferred[even_shard(len(plan.deferred), streamer.rank, streamer.num_ranks).slice]
        rows = counts.tolist()
        routed = [expert for expert in own if rows[expert]]
        stored = self._segments.stored[plan.layer]
        pieces = [piece for one in stored for piece in cut(one, routed, streamer.ring.buffer_bytes)]
        streamer.count_streamed(plan.layer, len(routed), sum(piece.nbytes for piece in pieces))
        return pieces

    def copy(self, target: torch.Tensor, piece: Piece, run: CopyRun) -> None:
        """One run of the ring."""
        self._streamer.copy(self._segments, target, piece, run)

    def launched(self) -> None:
        streamer = self._streamer
        self._end = streamer.device.record_read()
        if self._chosen:
            self._counts = streamer.device.download(torch.stack(list(self._chosen.values())))
        if self._streamer.is_synchronous:
            self.check()

    def check(self) -> None:
        streamer, problem = self._streamer, self._segments.problem()
        # Ranks' steps all count, or none: a step is checked once.
        counted = () if self._counts is None else self._counts.long().unbind(0)
        counts = dict(zip(self._chosen, counted, strict=True)) if counted else {}
        self._chosen, self._counts = {}, None
        is_problem, agreed = streamer.agree_on_step(bool(problem), counts)
        if is_problem:
            text = problem or "another rank's expert server has replaced experts"
            raise ExpertUnavailable(-1, f"{text} while a step streamed them")
        if agreed.any():
            streamer.routed(agreed)
        if self._rows and self._end is not None:
            between = streamer.device.seconds_between
            measured = self.plan.pieces_of(streamer.passed_layers)
            copying = sum(between(begin, end) for begin, end in self.copies[:measured])
            nbytes = sum(piece.nbytes for piece in self.plan.pieces[:measured])
            seconds = between(self._begin, self._end)
            streamer.chooser.observe(self._rows, self.plan.share, seconds, copying, nbytes)

    def end(self) -> None:
        self._streamer.end(self)
