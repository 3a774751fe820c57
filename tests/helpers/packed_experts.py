"""What a layer of packed experts must give for a request: unpacked by the reference, computed in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moebius import _kernels
from moebius import _kernels_testing as testing
from moebius.kernels import ExpertEngine
from moebius.kernels.weight_formats import split_gate_up
from tests.helpers.moe_golden import Routed

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Shape:
    """An engine's sizes and formats; filled by a test, used for the engine and for its golden."""

    hidden: int
    intermediate: int
    experts: int
    gate_up: str
    down: str
    activation: str = "silu"
    has_bias: bool = False
    alpha: float = 1.702
    limit: float = 7.0

    def engine(self, **options: object) -> ExpertEngine:
        """Returns an engine of one layer with random weights."""
        engine = self.empty_engine(**options)
        testing.fill_random(engine.backend, 0, 1)
        return engine

    def empty_engine(self, **options: object) -> ExpertEngine:
        """Returns an engine of one layer with nothing loaded."""
        return ExpertEngine(
            self.hidden,
            self.intermediate,
            self.experts,
            1,
            weight_format=self.gate_up,
            down_format=self.down,
            activation=self.activation,
            has_bias=self.has_bias,
            alpha=self.alpha,
            limit=self.limit,
            **options,  # type: ignore[arg-type]
        )


@dataclass(frozen=True)
class UnpackedExpert:
    """Weights and biases of one expert in float64; filled by `unpack_expert`. No gate: None."""

    gate: Float64 | None
    up: Float64
    down: Float64
    gate_bias: Float64
    up_bias: Float64
    down_bias: Float64


def unpack_expert(packed: NDArray[np.uint8], shape: Shape) -> UnpackedExpert:
    """Take an expert apart as kernels/format/panel_layout.h says: gate and up panels in turn, or all of gate
    and then all of up where their formats differ, then down.
    """
    gated = shape.activation != "relu2"
    blocks, names = -(-shape.intermediate // 16), split_gate_up(shape.gate_up)[-1 - gated :]
    sizes = [_kernels.panel_layout(name, shape.hidden, shape.has_bias)["panel_bytes"] for name in names]
    end = blocks * sum(sizes)
    if len(set(names)) == 1:
        whole = packed[:end].reshape(blocks, -1, sizes[0])
        panels = [whole[:, i] for i in range(len(names))]
    else:
        panels = [packed[: blocks * sizes[0]], packed[blocks * sizes[0] : end]]

    def matrix(data: NDArray[np.uint8], name: str, rows: int, k: int) -> tuple[Float64, Float64]:
        flat = np.ascontiguousarray(data).reshape(-1)
        weights = _kernels.unpack_matrix(name, flat, rows, k, shape.has_bias)
        bias = _kernels.unpack_bias(name, flat, rows, k) if shape.has_bias else np.zeros(rows)
        return weights.astype(np.float64), bias.astype(np.float64)

    parts = [
        matrix(data, name, shape.intermediate, shape.hidden) for data, name in zip(panels, names, strict=True)
    ]
    down, down_bias = matrix(packed[end:], shape.down, shape.hidden, shape.intermediate)
    gate, gate_bias = parts[0] if gated else (None, np.zeros(shape.intermediate))
    return UnpackedExpert(gate, parts[-1][0], down, gate_bias, parts[-1][1], down_bias)


def activate(gate: Float64, up: Float64, shape: Shape) -> Float64:
    """Returns the activations of kernels/gemm/gemm.h, in float64."""
    clipped = np.minimum(gate, shape.limit)
    clamped = np.clip(up, -shape.limit, shape.limit)
    if shape.activation == "relu2":
        return np.maximum(up, 0) ** 2
    if shape.activation == "gelu_tanh":
        return gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    if shape.activation == "gpt_oss":
        return (clamped + 1) * clipped / (1 + np.exp(-shape.alpha * clipped))
    if shape.activation == "clamped_silu":
        return clipped / (1 + np.exp(-clipped)) * clamped
    if shape.activation == "silu_clamped":
        return np.minimum(gate / (1 + np.exp(-gate)), shape.limit) * clamped
    return gate / (1 + np.exp(-gate)) * up


def same(rows: Float64) -> Float64:
    return rows


def quantised(rows: Float64) -> Float64:
    """Returns rows as W8A8 sees them: rounded to 127 steps of each row's largest magnitude."""
    step = np.abs(rows).max(axis=1, keepdims=True) / 127
    return np.round(rows / np.where(step == 0, 1, step)) * step


def packed_golden(
    engine: ExpertEngine, shape: Shape, routed: Routed, seen_as: Callable[[Float64], Float64] = same
) -> Float64:
    """What forward must return; `seen_as` is what a product makes of its rows."""
    output = np.zeros(routed.hidden_states.shape)
    x = seen_as(routed.hidden_states.astype(np.float64))
    for expert in range(shape.experts):
        weight = np.where(routed.topk_ids == expert, routed.topk_weights, 0).sum(axis=1, dtype=np.float64)
        rows = np.flatnonzero((routed.topk_ids == expert).any(axis=1))
        if rows.size == 0:
            continue
        parts = unpack_expert(engine.packed_expert(0, expert), shape)
        gate = np.zeros((rows.size, shape.intermediate))
        if parts.gate is not None:
            gate = x[rows] @ parts.gate.T + parts.gate_bias
        h = seen_as(activate(gate, x[rows] @ parts.up.T + parts.up_bias, shape))
        output[rows] += weight[rows, None] * (h @ parts.down.T + parts.down_bias)
    return output


def root_mean_square_error(actual: NDArray[np.float32], wanted: Float64) -> float:
    """Returns the root of the mean squared error over that of the wanted values."""
    return float(np.sqrt(np.mean((actual - wanted) ** 2) / np.mean(wanted**2)))
