"""Normalisation modules."""

from __future__ import annotations

import torch
from torch import nn

from gpu_service.layers.linear import empty_parameter
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
