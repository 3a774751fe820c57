"""The norm behind linear attention, whose result a gate weighs."""

from __future__ import annotations

import torch
from torch.nn import functional

from gpu_service.ops.norm import rms_norm
from gpu_service.ops.registry import Op


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
