"""Counts which experts are chosen, on the device, without waiting for it; answers the gRPC calls about it.

A step's choices gather in scratch tensors, layer by layer, and are added to the totals by the last layer: a
step that was run again after a lost expert server counts once, and totals never hold half a step. All
tensors are made by `start` and stay where they are, so that recording may be captured in a graph; a flag on
the device then says whether replays count.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import grpc
import numpy as np
import torch

from gpu_service.device.stream import DeviceStream
from moebius.errors import UserError
from moebius.experts.placement import ExpertStatistics, FileFormat
from moebius.models.geometry import MoeGeometry
from protos import engine_pb2 as pb

RecorderMode = Literal["stat", "per_pass", "per_token"]
# Memory for details (modes per_pass and per_token); what comes once it is full is counted only.
DETAIL_BYTES = 64 << 20


@dataclass(eq=False)
class _Buffers:
    """Device tensors of one mode; filled by `_make_buffers`. L layers, E experts, column E: no expert."""

    enabled: torch.Tensor  # int64 [], 1 while recording
    scratch: torch.Tensor  # int64 [L, E + 1], this step's counts
    counts: torch.Tensor  # int64 [L, E]
    distinct: torch.Tensor  # int64 [L]
    steps: torch.Tensor  # int64 []
    tokens: torch.Tensor  # int64 []
    # The last entry of either takes what finds no room.
    passes: torch.Tensor | None = None  # int32 [capacity + 1, L, E]
    token_ids: torch.Tensor | None = None  # int16 [capacity + 1, L, K]
    row_ids: torch.Tensor | None = None  # int16 [max_rows, L, K], this step's choices

    def tensors(self) -> list[torch.Tensor]:
        """Returns every counter, for a start that clears them."""
        found = (self.scratch, self.counts, self.distinct, self.steps, self.tokens)
        return [*found, *(t for t in (self.passes, self.token_ids, self.row_ids) if t is not None)]


class ExpertRecorder:
    """`record` is called by the layers; `start`, `stop` and `dump` from any thread, at any time."""

    def __init__(
        self,
        geometry: MoeGeometry,
        stream: DeviceStream,
        max_rows: int,
        layers: Sequence[int] | None = None,
        detail_bytes: int = DETAIL_BYTES,
    ) -> None:
        """`max_rows`: token rows of the largest step; `layers`: decoder layers of this rank (None: all)."""
        moe_layers = [n for n in geometry.moe_layers if layers is None or n in layers]
        self._geometry = geometry
        self._stream = stream
        self._max_rows = max_rows
        self._layers = {layer: row for row, layer in enumerate(moe_layers)}
        self._detail_bytes = detail_bytes
        # Buffers of a mode stay once made: a captured graph may hold them.
        self._buffers: dict[RecorderMode, _Buffers] = {}
        # The one that was started last; None: none ever was, and layers need not say what they choose.
        self.mode: RecorderMode | None = None
        self._captured: RecorderMode | None = None
        self._active = False
        # What the step that is running records; changes take effect with a step's first layer.
        self._live: _Buffers | None = None
        self._lock = threading.Lock()

    @property
    def is_recording(self) -> bool:
        """Returns whether steps count. Any thread may ask."""
        return self._active

    @property
    def needs_eager_steps(self) -> bool:
        """Whether replayed graphs would miss what is to be recorded: they were captured without this mode."""
        return self._active and self.mode != self._captured

    def start(self, mode: str) -> None:
        """Clears what was recorded, and records from the next step on. Raises UserError for other modes."""
        if mode not in get_args(RecorderMode):
            allowed = ", ".join(get_args(RecorderMode))
            raise UserError(f"expert recorder mode {mode!r} is not allowed; allowed: {allowed}")
        chosen: RecorderMode = mode  # type: ignore[assignment]
        with self._lock, self._stream.active(), torch.inference_mode():
            self._disable()
            if chosen not in self._buffers:
                self._buffers[chosen] = self._make_buffers(chosen)
            buffers = self._buffers[chosen]
            for tensor in buffers.tensors():
                tensor.zero_()
            buffers.enabled.fill_(1)
            self.mode, self._active = chosen, True

    def stop(self) -> None:
        """Keeps what was recorded; further steps do not count."""
        with self._lock, self._stream.active(), torch.inference_mode():
            self._disable()

    def _disable(self) -> None:
        if self.mode is not None:
            self._buffers[self.mode].enabled.zero_()
        self._active = False

    def dump(self) -> ExpertStatistics:
        """Returns what was recorded since the last start.

        Waits for the device. Raises UserError before any start.
        """
        with self._lock, self._stream.active(), torch.inference_mode():
            if self.mode is None:
                raise UserError("nothing was recorded: start the expert recorder first")
            buffers, mode = self._buffers[self.mode], self.mode
            geometry = self._geometry
            steps, tokens = int(buffers.steps), int(buffers.tokens)
            found = ExpertStatistics(
                geometry.model_type,
                geometry.num_experts,
                geometry.top_k,
                tuple(self._layers),
                mode,
                steps,
                tokens,
                buffers.counts.cpu().numpy(),
                buffers.distinct.cpu().numpy(),
            )
            if buffers.passes is not None:
                kept = buffers.passes[: min(steps, buffers.passes.shape[0] - 1)]
                return replace(found, pass_counts=kept.cpu().numpy().astype(np.int32))
            if buffers.token_ids is not None:
                kept = buffers.token_ids[: min(tokens, buffers.token_ids.shape[0] - 1)]
                return replace(found, token_ids=kept.cpu().numpy())
            return found

    def record(self, layer: int, topk_ids: torch.Tensor) -> None:
        """int32 `[T, K]`, -1: none, as all ids of a row of padding. Layers in ascending order.

        Ids from `num_experts` on are choices without weights: they count as none, but their rows are tokens.
        Only launches work.
        """
        row = self._layers[layer]
        if row == 0:
            self._live = self._for_this_step()
        buffers = self._live
        if buffers is None:
            return
        num_experts = self._geometry.num_experts
        has_weights = (topk_ids >= 0) & (topk_ids < num_experts)
        chosen = torch.where(has_weights, topk_ids, num_experts).flatten().long()
        buffers.scratch[row].zero_().scatter_add_(0, chosen, torch.ones_like(chosen))
        if buffers.row_ids is not None:
            buffers.row_ids[: topk_ids.shape[0], row].copy_(torch.where(has_weights, topk_ids, -1))
        if row == len(self._layers) - 1:
            with self._lock:
                self._commit(buffers, topk_ids)

    def _for_this_step(self) -> _Buffers | None:
        capturing = self._stream.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        with self._lock:
            if self.mode is None or not (self._active or capturing):
                return None
            if capturing:
                self._captured = self.mode
            return self._buffers[self.mode]

    def _commit(self, buffers: _Buffers, topk_ids: torch.Tensor) -> None:
        """Adds the step; every number stays on the device."""
        enabled, step = buffers.enabled, buffers.scratch[:, :-1]
        real = (topk_ids >= 0).any(dim=1)
        if buffers.passes is not None:
            room = buffers.passes.shape[0] - 1
            place = torch.where(enabled > 0, buffers.steps.clamp(max=room), room)
            buffers.passes.index_copy_(0, place.view(1), step.int().unsqueeze(0))
        if buffers.token_ids is not None and buffers.row_ids is not None:
            room = buffers.token_ids.shape[0] - 1
            places = (buffers.tokens + real.cumsum(0) - 1).clamp(max=room)
            places = torch.where(real & (enabled > 0), places, room)
            buffers.token_ids.index_copy_(0, places, buffers.row_ids[: topk_ids.shape[0]])
        buffers.counts.add_(step * enabled)
        buffers.distinct.add_((step > 0).sum(dim=1) * enabled)
        buffers.steps.add_(enabled)
        buffers.tokens.add_(real.sum() * enabled)

    def _make_buffers(self, mode: RecorderMode) -> _Buffers:
        layers, experts, top_k = len(self._layers), self._geometry.num_experts, self._geometry.top_k

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._stream.device)

        buffers = _Buffers(
            zeros(), zeros(layers, experts + 1), zeros(layers, experts), zeros(layers), zeros(), zeros()
        )
        if mode == "per_pass":
            capacity = max(1, self._detail_bytes // (layers * experts * 4))
            buffers.passes = zeros(capacity + 1, layers, experts, dtype=torch.int32)
        if mode == "per_token":
            capacity = max(1, self._detail_bytes // (layers * top_k * 2))
            buffers.token_ids = zeros(capacity + 1, layers, top_k, dtype=torch.int16)
            buffers.row_ids = zeros(self._max_rows, layers, top_k, dtype=torch.int16)
        return buffers


START, STOP = "start recorder", "stop recorder"


def recorder_operations(recorder: ExpertRecorder) -> dict[str, Callable[[str], None]]:
    """Returns the operations for `Engine.call`: recording may make steps run eagerly, which all ranks must do
    alike.
    """
    return {START: recorder.start, STOP: lambda argument: recorder.stop()}


def dumped(recorder: ExpertRecorder, file_format: str) -> pb.DumpExpertRecorderResponse:
    """Returns what was recorded, as a file of that format. Raises UserError."""
    chosen: FileFormat = "safetensors"
    if file_format and file_format not in get_args(FileFormat):
        allowed = ", ".join(get_args(FileFormat))
        raise UserError(f"file_format {file_format!r} is not allowed; allowed: {allowed}")
    if file_format == "json":
        chosen = "json"
    statistics = recorder.dump()
    layers = [
        pb.LayerExperts(layer=layer, distinct_per_step=distinct)
        for layer, distinct in statistics.distinct_per_step().items()
    ]
    return pb.DumpExpertRecorderResponse(
        content=statistics.encode(chosen),
        mode=statistics.mode,
        steps=statistics.steps,
        tokens=statistics.tokens,
        layers=layers,
    )


@asynccontextmanager
async def recorder_errors(
    context: grpc.aio.ServicerContext[Any, Any], status: grpc.StatusCode
) -> AsyncIterator[None]:
    """What the caller did wrong ends the call with `status` and the message."""
    try:
        yield
    except UserError as error:
        await context.abort(status, str(error))
