"""The reference: experts computed in this process by torch in float32, straight from the checkpoint.

Slow and memory-hungry on purpose: it is what the expert servers are compared with, and it lets the engine
run without any.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from gpu_service.experts.client import (
    ExpertClient,
    ExpertClientStats,
    ExpertComputeFailed,
    Ticket,
    add_to,
    checked_inputs,
)
from moebius import _kernels
from moebius.checkpoint.reader import SliceReader
from moebius.checkpoint.stored_matrix import StoredMatrix
from moebius.models.expert_checkpoint import ExpertCheckpoint
from moebius.models.geometry import MoeGeometry


def _silu(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    return functional.silu(gate) * up


def _silu_clamped(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    return functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def _gpt_oss(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def _gelu_tanh(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    return functional.gelu(gate, approximate="tanh") * up


def _clamped_silu(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    return functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def _relu2(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    return functional.relu(up).square()


# Of gate and up (up twice where experts have no gate), float32 of one shape, `MoeGeometry.alpha`, and the
# layer's `MoeGeometry.limit_of`.
EXPERT_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor, torch.Tensor, float, float], torch.Tensor]] = {
    "silu": _silu,
    "silu_clamped": _silu_clamped,
    "gpt_oss": _gpt_oss,
    "gelu_tanh": _gelu_tanh,
    "clamped_silu": _clamped_silu,
    "relu2": _relu2,
}


WeightDtype = Literal["keep", "float32", "bfloat16", "int8", "int4"]
# Packed formats whose rounding the reference repeats; "keep" and "float32" lose nothing.
_ROUNDED: Mapping[WeightDtype, str] = {"bfloat16": "bfloat16", "int8": "int8", "int4": "int4_g32"}


@dataclass(frozen=True, slots=True)
class _Linear:
    """`x @ weight.T + bias`; filled by `LocalExpertClient._linear`."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.linear(rows, self.weight, self.bias)

    def rows(self, picked: torch.Tensor) -> _Linear:
        """Returns the layer that computes some of the outputs only."""
        return _Linear(self.weight[picked], None if self.bias is None else self.bias[picked])

    def columns(self, picked: torch.Tensor, with_bias: bool) -> _Linear:
        """Returns what some of the inputs add."""
        return _Linear(self.weight[:, picked], self.bias if with_bias else None)


# Gate (None: experts have none), up and down.
Expert = tuple[_Linear | None, _Linear, _Linear]


class LocalExpertClient(ExpertClient):
    """Reads an expert at its first use and keeps it. `dtype` is what hidden states are rounded to first."""

    def __init__(
        self,
        model_path: str,
        geometry: MoeGeometry,
        dtype: torch.dtype,
        weight_dtype: WeightDtype = "keep",
        keeps: bool = True,
        intermediate_range: tuple[int, int] | None = None,
        expert_checkpoint: str = "",
    ) -> None:
        """Unless it `keeps` them, an expert is read at every use and freed after it, so that one is held at a
        time.

        `intermediate_range` `[begin, end)`: compute only these channels of every expert, as a server that
        holds just these, in the order in which it packs them. `expert_checkpoint`: see
        `ExpertCheckpoint.open`.
        """
        self.geometry = geometry
        self._keeps = keeps
        self._intermediate_range = intermediate_range
        self._dtype = dtype
        self._weight_dtype = weight_dtype
        self.checkpoint = ExpertCheckpoint.open(model_path, geometry, expert_checkpoint)
        self._experts: dict[tuple[int, int], Expert] = {}
        self._stats = ExpertClientStats(compute_seconds=(0.0,))

    def submit(
        self, layer: int, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> Ticket:
        """The work is done by `collect`."""
        parts = checked_inputs(self.geometry, layer, hidden_states, topk_ids, topk_weights, self._dtype)
        return Ticket(layer, *parts)

    def collect(self, ticket: Ticket, partial: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the sum over chosen experts e of weight[e] · expert e's output."""
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
            activation, limit = self.geometry.activation, self.geometry.limit_of(ticket.layer)
            ups = up(chosen)
            gates = ups if gate is None else gate(chosen)
            intermediate = EXPERT_ACTIVATIONS[activation](gates, ups, self.geometry.alpha, limit)
            output.index_add_(0, rows, down(intermediate) * ticket.topk_weights[rows, choices, None])
        seconds = time.perf_counter() - begin
        counters = self._stats
        self._stats = ExpertClientStats(
            counters.calls + 1,
            counters.rows + ticket.rows,
            counters.wait_seconds + seconds,
            compute_seconds=(counters.compute_seconds[0] + seconds,),
        )
        return add_to(partial, output)

    def _expert(self, layer: int, expert: int) -> Expert:
        """Returns gate and up `[I, H]`, down `[H, I]`, float32, after rounding to the weights' type."""
        kept = self._experts.get((layer, expert))
        if kept is not None:
            return kept
        found = self.checkpoint.expert(layer, expert)
        with SliceReader() as reader:
            gate = None if found.gate is None else self._linear(reader, found.gate)
            up, down = self._linear(reader, found.up), self._linear(reader, found.down)
            order = found.channel_order(reader) if self._weight_dtype == "keep" else None
        if self._intermediate_range is not None:
            begin, end = self._intermediate_range
            picked = torch.arange(begin, end) if order is None else torch.from_numpy(order[begin:end]).long()
            gate = None if gate is None else gate.rows(picked)
            up, down = up.rows(picked), down.columns(picked, with_bias=begin == 0)
        if self._keeps:
            self._experts[layer, expert] = gate, up, down
        return gate, up, down

    def _linear(self, reader: SliceReader, matrix: StoredMatrix) -> _Linear:
        source = matrix.read(reader)
        rounded = _ROUNDED.get(self._weight_dtype)
        if rounded is None:
            weight = _kernels.dequantise_matrix(source)
        else:
            has_bias = source.bias is not None
            packed, _, _ = _kernels.requantise_matrix(rounded, source)
            weight = _kernels.unpack_matrix(rounded, packed, *matrix.shape, has_bias)
        bias = None if source.bias is None else torch.from_numpy(source.bias)
        return _Linear(torch.from_numpy(weight), bias)

    def wait_ready(self, timeout_s: float) -> None:
        """Returns at once: the weights are read when they are first used."""

    def recover(self, timeout_s: float) -> None:
        """Returns at once: no server can be lost."""

    def stats(self) -> ExpertClientStats:
        return self._stats

    def close(self) -> None:
        """Free the weights."""
        self._experts.clear()
