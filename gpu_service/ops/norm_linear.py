"""The seam of a pre-norm layer with what follows it: a projection, or the choice of experts."""

from __future__ import annotations

import torch

from gpu_service.ops.linear import linear
from gpu_service.ops.norm import fused_add_rms_norm, rms_norm
from gpu_service.ops.registry import Op
from gpu_service.ops.router import route
from moebius.models.config import RouterConfig


@Op
def add_norm_linear(
    residual: torch.Tensor,
    update: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes `residual + update`, its RMS norm, and the norm's projection `x W^T + b`.

    residual and update `[T, N]` as in `fused_add_rms_norm` (None: nothing is added), norm_weight `[N]`;
    weight `[out, N]` and bias `[out]` as in `linear`, perhaps wider than the activations. Returns the sum
    and the norm `[T, N]` in the residual's dtype, and the projection `[T, out]` in the weight's. The sum may
    be the residual's memory, the norm the update's.
    """
    if update is None:
        normed = rms_norm(residual, norm_weight, eps)
    else:
        normed = fused_add_rms_norm(update, residual, norm_weight, eps)
    return residual, normed, linear(normed if weight.is_mkldnn else normed.to(weight.dtype), weight, bias)


@Op
def add_norm_route(
    residual: torch.Tensor,
    update: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    correction_bias: torch.Tensor | None,
    config: RouterConfig,
    valid_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes `add_norm_linear` with a router's weight, whose logits `route` chooses by.

    Arguments as there. Returns the sum and the norm `[T, N]`, weights float32 and ids int32 `[T, top_k]`.
    """
    total, normed, logits = add_norm_linear(residual, update, norm_weight, eps, weight, bias)
    return total, normed, *route(logits, correction_bias, config, valid_rows)
