"""Normalisation modules."""

from __future__ import annotations

import torch
from torch import nn

from gpu_service.layers.linear import empty_parameter
from gpu_service.model_config import ModelConfig
from gpu_service.ops.norm import fused_add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """`ops.norm.rms_norm` with a learned weight `[size]`."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype)
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension; returns a new tensor."""
        return rms_norm(hidden_states, self.weight, self.eps)

    def after_adding(self, update: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`residual += update` in place, then the sum's norm; both `[T, N]`. May overwrite the update."""
        return fused_add_rms_norm(update, residual, self.weight, self.eps)


class CenteredRMSNorm(RMSNorm):
    """The norm of families whose checkpoints hold `weight - 1`: it multiplies by 1 + what was stored.

    The one is added once, by `pack`, so that every implementation of the op serves both norms. The sum is
    kept in float32: a stored 0.003 would be lost beside a 1 in bfloat16.
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype) -> None:
        """`dtype` is that of the activations; the weight is float32 whatever it is."""
        super().__init__(size, eps, dtype=torch.float32)

    def pack(self) -> None:
        """From the checkpoint's weight to the factor; the loader calls it once."""
        self.weight = nn.Parameter(self.weight + 1.0, requires_grad=False)


def make_norm(config: ModelConfig, size: int, *, dtype: torch.dtype) -> RMSNorm:
    """The norm that the model's layers and heads have, over `size` elements."""
    kind = CenteredRMSNorm if config.centered_norms else RMSNorm
    return kind(size, config.rms_norm_eps, dtype=dtype)
