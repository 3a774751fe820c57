"""Root-mean-square norms: plain, of a sum, and gated (after linear attention)."""

from __future__ import annotations

import torch
from torch.nn import functional

from gpu_service.ops.registry import Op


@Op
def rms_norm(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Computes `x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang & Sennrich 2019).

    hidden_states `[..., N]`, weight `[N]` of the same dtype, or float32; statistics in float32, rounded to
    the weight's dtype before it is applied, as the checkpoints were trained. Returns a new `[..., N]` of the
    input's dtype.
    """
    if hidden_states.dtype == torch.float32:
        return torch.rms_norm(hidden_states, weight.shape, weight, eps)
    normalized = torch.rms_norm(hidden_states.float(), weight.shape, None, eps)
    return normalized.to(weight.dtype).mul_(weight).to(hidden_states.dtype)


@Op
def fused_add_rms_norm(
    update: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Computes `residual += update`, then `rms_norm(residual)`: the two halves of a pre-norm layer's seam.

    update and residual `[T, N]`, rows contiguous; weight `[N]` as above. The update may be float32 where the
    others are 16-bit: then it is rounded after the addition only. The residual is increased in place, the
    update may be overwritten. Returns the normed `[T, N]` in the residual's dtype; it may be
    the update's memory.
    """
    return rms_norm.reference(residual.add_(update), weight, eps)


@Op
def gated_rms_norm(
    values: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """`rms_norm(values) * silu(gate)`, head by head.

    values `[T, H, N]`, contiguous; gate `[T, H * N]` (columns contiguous) and weight `[N]`, all of one dtype.
    Returns `[T, H * N]` of it; the gate's half is computed in float32.
    """
    normed = rms_norm.reference(values, weight, eps).flatten(1)
    return (normed.float() * functional.silu(gate.float())).to(values.dtype)


@Op
def gated_group_rms_norm(
    values: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, num_groups: int, eps: float
) -> torch.Tensor:
    """`rms_norm(values * silu(gate))`, each of `num_groups` equal groups of columns by itself.

    values float32 `[T, N]`, contiguous; gate `[T, N]` (columns contiguous) and weight `[N]`, both of one
    dtype. Computed in float32. Returns `[T, N]` of the weight's dtype.
    """
    tokens, columns = values.shape
    gated = values.float() * functional.silu(gate.float())
    gated = gated.view(tokens, num_groups, columns // num_groups)
    normed = torch.rms_norm(gated, gated.shape[2:], None, eps).flatten(1)
    return (normed * weight).to(weight.dtype)


@Op
def sigmoid_gated_rms_norm(
    values: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """`rms_norm(values) * sigmoid(gate)`, head by head; shapes and types as `gated_rms_norm`.

    Rounded once, after the gate, as the models with this gate were trained.
    """
    normed = torch.rms_norm(values.float(), weight.shape, weight.float(), eps).flatten(1)
    return (normed * gate.float().sigmoid()).to(values.dtype)
