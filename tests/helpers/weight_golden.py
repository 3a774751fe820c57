"""What an expert layer must give for weights in any checkpoint format: dequantised, computed in float64.

The weights are those that the encoders of `quantised_sources` say they mean: nothing here passes through C++.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moebius.kernels import ExpertEngine
from tests.helpers.moe_golden import Routed
from tests.helpers.packed_experts import Float64, Shape, activate
from tests.helpers.quantised_sources import ENCODERS, Quantised, random_weights


@dataclass(frozen=True, eq=False)
class GoldenExpert:
    """One expert as a checkpoint stores it; filled by `golden_experts`. No gate: None. Biases: [rows]."""

    gate: Quantised | None
    up: Quantised
    down: Quantised
    biases: dict[str, NDArray[np.float32]]


def golden_experts(encoder: str, shape: Shape, seed: int) -> list[GoldenExpert]:
    """Returns random experts in the checkpoint format of that name."""
    rng = np.random.default_rng(seed)
    sizes = {
        "gate": (shape.intermediate, shape.hidden),
        "up": (shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
    }

    def draw(name: str) -> Quantised:
        # Results of order 1 whatever the width; random_weights has a standard deviation of about 1 / 13.
        rows, cols = sizes[name]
        return ENCODERS[encoder](random_weights(rng, rows, cols) * np.float32(13 / np.sqrt(cols)))

    gated = shape.activation != "relu2"
    experts = []
    for _ in range(shape.experts):
        biases = {
            name: rng.uniform(-0.5, 0.5, size[0]).astype(np.float32)
            if shape.has_bias
            else np.zeros(size[0], np.float32)
            for name, size in sizes.items()
        }
        experts.append(GoldenExpert(draw("gate") if gated else None, draw("up"), draw("down"), biases))
    return experts


def load_golden(engine: ExpertEngine, experts: list[GoldenExpert], shape: Shape, first: int = 0) -> None:
    """Loads them as ids first, first + 1, ...; every one must pack without rounding."""

    def source(matrix: Quantised, bias: NDArray[np.float32]) -> Any:
        fields = {name: getattr(matrix.source, name) for name in matrix.source.__dataclass_fields__}
        return type(matrix.source)(**{**fields, "bias": bias if shape.has_bias else None})

    for index, expert in enumerate(experts):
        gate = None if expert.gate is None else source(expert.gate, expert.biases["gate"])
        up = source(expert.up, expert.biases["up"])
        error = engine.load_expert(0, first + index, gate, up, source(expert.down, expert.biases["down"]))
        assert error.squared_error == 0


@dataclass(frozen=True, eq=False)
class Golden:
    """Filled by `golden_layer`: results from exact rows, and the expected norm of what rounding costs one."""

    output: Float64  # [rows, hidden]
    int8_rounding: Float64  # [rows], of x and of the activation
    bfloat16_rounding: Float64  # [rows], of the activation


def golden_layer(experts: list[GoldenExpert], shape: Shape, routed: Routed) -> Golden:
    """Returns the layer in float64, from rows as they are."""
    output = np.zeros(routed.hidden_states.shape)
    int8, bfloat16 = np.zeros(len(output)), np.zeros(len(output))
    for index, expert in enumerate(experts):
        chosen = routed.topk_ids == index
        rows = np.flatnonzero(chosen.any(axis=1))
        weight = np.where(chosen, routed.topk_weights, 0).sum(axis=1, dtype=np.float64)[rows]
        if rows.size == 0:
            continue
        x = routed.hidden_states[rows].astype(np.float64)
        up = x @ expert.up.weights.T.astype(np.float64) + expert.biases["up"]
        gate = np.zeros_like(up)
        if expert.gate is not None:
            gate = x @ expert.gate.weights.T.astype(np.float64) + expert.biases["gate"]
        h = activate(gate, up, shape)
        down = expert.down.weights.astype(np.float64)
        output[rows] += weight[:, None] * (h @ down.T + expert.biases["down"])
        reach = (down**2).sum(axis=0)
        int8[rows] += weight**2 * ((step_variance(x, gate, up, expert, shape) + int8_variance(h)) @ reach)
        bfloat16[rows] += weight**2 * (bfloat16_variance(h) @ reach)
    return Golden(output, np.sqrt(int8), np.sqrt(bfloat16))


def int8_variance(rows: Float64) -> Float64:
    """Returns the variance of an element that is rounded to one of 127 steps of its row's largest: step^2 /
    12.
    """
    step: Float64 = np.abs(rows).max(axis=1, keepdims=True) / 127
    return step**2 / 12


def bfloat16_variance(rows: Float64) -> Float64:
    """Returns the same for bfloat16, whose step is 2^-7 of the power of two below the value."""
    step: Float64 = np.ldexp(1.0, np.frexp(rows)[1] - 8)
    return step**2 / 12


def step_variance(x: Float64, gate: Float64, up: Float64, expert: GoldenExpert, shape: Shape) -> Float64:
    """Returns the variance of the activation from rounding x, to first order: slopes of the activation by
    differences.
    """
    tiny = 1e-6
    by_up = (activate(gate, up + tiny, shape) - activate(gate, up - tiny, shape)) / (2 * tiny)
    variance = by_up**2 * (expert.up.weights.astype(np.float64) ** 2).sum(axis=1)
    if expert.gate is not None:
        by_gate = (activate(gate + tiny, up, shape) - activate(gate - tiny, up, shape)) / (2 * tiny)
        variance = variance + by_gate**2 * (expert.gate.weights.astype(np.float64) ** 2).sum(axis=1)
    result: Float64 = variance * int8_variance(x)
    return result


def row_norms(values: NDArray[Any]) -> Float64:
    norms: Float64 = np.linalg.norm(values.astype(np.float64), axis=1)
    return norms


def largest_row_error(actual: NDArray[np.float32], wanted: Float64) -> float:
    """Returns largest over rows of the norm of the difference over the norm; rows that want zero must be
    zero.
    """
    norms, errors = row_norms(wanted), row_norms(actual - wanted)
    assert not errors[norms == 0].any()
    return float((errors[norms > 0] / norms[norms > 0]).max(initial=0.0))
