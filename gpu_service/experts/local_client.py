"""The reference: experts computed in this process by torch in float32, weights straight from the checkpoint.

Slow and memory-hungry on purpose: it is what the expert servers are compared with, and it lets the engine
run without any.
"""

from __future__ import annotations

import time
from typing import Literal

import numpy as np
import torch
from torch.nn import functional

from gpu_service.experts.client import (
    ExpertClient,
    ExpertClientStats,
    ExpertComputeFailed,
    Ticket,
    make_ticket,
)
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.expert_layouts import LocatedLayout, MatrixSource
from moebius.checkpoint.index import CheckpointIndex
from moebius.checkpoint.moe_config import MoeGeometry
from moebius.checkpoint.reader import SliceReader
from moebius.checkpoint.rules import find_layout

WeightDtype = Literal["keep", "float32", "bfloat16"]
Expert = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class LocalExpertClient(ExpertClient):
    """Reads an expert at its first use and keeps it. `dtype` is what hidden states are rounded to first."""

    def __init__(
        self, model_path: str, geometry: MoeGeometry, dtype: torch.dtype, weight_dtype: WeightDtype = "keep"
    ) -> None:
        self.geometry = geometry
        self._dtype = dtype
        self._weight_dtype = weight_dtype
        self._layout: LocatedLayout = find_layout(CheckpointIndex.open(model_path), geometry.model_type)
        self._experts: dict[tuple[int, int], Expert] = {}
        self._stats = ExpertClientStats(compute_seconds=(0.0,))

    def submit(
        self, layer: int, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> Ticket:
        """See `ExpertClient.submit`; the work is done by `collect`."""
        return make_ticket(self.geometry, layer, hidden_states, topk_ids, topk_weights, self._dtype)

    def collect(self, ticket: Ticket) -> torch.Tensor:
        """See `ExpertClient.collect`: the sum over chosen experts of weight · down(silu(gate(x)) · up(x))."""
        begin = time.perf_counter()
        hidden_states = ticket.hidden_states.float()
        output = torch.zeros_like(hidden_states)
        for expert in sorted(set(ticket.topk_ids.flatten().tolist())):
            if expert < 0:
                continue
            if expert >= self.geometry.num_experts:
                raise ExpertComputeFailed(
                    f"expert {expert} does not exist; there are {self.geometry.num_experts}"
                )
            gate, up, down = self._expert(ticket.layer, expert)
            rows, choices = (ticket.topk_ids == expert).nonzero(as_tuple=True)
            chosen = hidden_states[rows]
            neurons = functional.silu(chosen @ gate.T) * (chosen @ up.T)
            output.index_add_(0, rows, (neurons @ down.T) * ticket.topk_weights[rows, choices, None])
        seconds = time.perf_counter() - begin
        counters = self._stats
        self._stats = ExpertClientStats(
            counters.calls + 1,
            counters.rows + ticket.rows,
            counters.wait_seconds + seconds,
            (counters.compute_seconds[0] + seconds,),
        )
        return output

    def _expert(self, layer: int, expert: int) -> Expert:
        """gate and up `[I, H]`, down `[H, I]`, float32, after rounding to the weights' dtype."""
        key = (layer, expert)
        if key not in self._experts:
            sources = self._layout.tensors(layer, expert)
            with SliceReader() as reader:
                self._experts[key] = (
                    self._matrix(reader, sources.gate),
                    self._matrix(reader, sources.up),
                    self._matrix(reader, sources.down),
                )
        return self._experts[key]

    def _matrix(self, reader: SliceReader, source: MatrixSource) -> torch.Tensor:
        tensor = source.tensor
        stored = _STORED.get(tensor.dtype)
        if stored is None:
            allowed = ", ".join(_STORED)
            raise CheckpointError(f"tensor {tensor.name!r} has dtype {tensor.dtype}; allowed: {allowed}")
        array = source.read(reader)
        bits = array.view(np.int16) if stored is torch.bfloat16 else array
        values = torch.from_numpy(bits).view(stored)
        return (values.to(torch.bfloat16) if self._weight_dtype == "bfloat16" else values).float()

    def wait_ready(self, timeout_s: float) -> None:
        """Always ready."""

    def recover(self, timeout_s: float) -> None:
        """Nothing can be lost."""

    def stats(self) -> ExpertClientStats:
        """See `ExpertClient.stats`."""
        return self._stats

    def close(self) -> None:
        """Free the weights."""
        self._experts.clear()
