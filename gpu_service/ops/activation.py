"""Gated activations of MLPs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from gpu_service.ops.registry import Op
from moebius.models.layers.gqa import GateActivation


@Op
def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Computes SwiGLU: gate_up `[..., 2 * I]`, gate first; returns `silu(gate) * up`, `[..., I]`.

    May overwrite its input.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


@Op
def silu(values: torch.Tensor) -> torch.Tensor:
    """Returns `values / (1 + exp(-values))` of rows `[T, N]` (columns contiguous), in their dtype."""
    return functional.silu(values)


@Op
def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Computes GeGLU (Shazeer 2020) with the exact GELU; shapes as `silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate).mul_(up)


@Op
def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns the same with GELU's tanh approximation (Hendrycks & Gimpel 2016)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


@Op
def clamped_swiglu_and_mul(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """gpt-oss' SwiGLU: `g sigmoid(alpha g) (u + 1)` with g = min(gate, limit), u = clamp(up, -limit, limit).

    Shapes as `silu_and_mul`.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (gate * torch.sigmoid(gate * alpha)).mul_(up.clamp(-limit, limit).add_(1.0))


def clamped_silu_and_mul(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """Computes `min(silu(gate), limit) * clamp(up, -limit, limit)`; shapes as `silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).clamp_(max=limit).mul_(up.clamp(-limit, limit))


def softplus(gate: torch.Tensor) -> torch.Tensor:
    """Computes `ln(1 + exp(gate))` in float32, in the gate's dtype."""
    return functional.softplus(gate.float()).to(gate.dtype)


# By the names of `Gate.activation`.
_GATE_ACTIVATIONS: dict[GateActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softplus": softplus,
}


@Op
def apply_gate(
    values: torch.Tensor, gates: torch.Tensor, activation: GateActivation = "sigmoid"
) -> torch.Tensor:
    """Computes `values * activation(gates)`; the activated gates are rounded to their dtype.

    values `[T, N]`, contiguous; gates `[T, G]` (columns contiguous) of the same dtype, each of which weighs
    N / G neighbours. Returns `[T, N]`, which may be the values' memory.
    """
    weights = _GATE_ACTIVATIONS[activation](gates)
    if weights.shape == values.shape:
        return values * weights
    return values.view(*weights.shape, -1).mul_(weights.unsqueeze(-1)).flatten(1)


def silu_of_clamped_and_mul(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """Computes `silu(min(gate, limit)) * clamp(up, -limit, limit)`; shapes as `silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit))


def relu2(up: torch.Tensor) -> torch.Tensor:
    """Computes `max(up, 0)^2`; may overwrite `up`."""
    return functional.relu_(up).square_()


# Of MLPs without a gate, by the name that checkpoints use.
PLAIN_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"relu2": relu2}
# By the name that checkpoints use. Only what the experts' kernels know too: a model has one activation.
GATED_ACTIVATIONS: dict[str, Op[..., torch.Tensor]] = {
    "silu": silu_and_mul,
    "gelu_pytorch_tanh": gelu_tanh_and_mul,
    # Where a layer has no limit.
    "clamped_silu": silu_and_mul,
    "gpt_oss": clamped_swiglu_and_mul,
}
# Few layers clamp, so these are no ops of their own.
CLAMPED_ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "silu": clamped_silu_and_mul,
    "clamped_silu": silu_of_clamped_and_mul,
}
