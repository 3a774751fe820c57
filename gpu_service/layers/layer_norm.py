"""Normalisation by mean and variance."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from gpu_service.layers.linear import empty_parameter


class LayerNorm(nn.Module):
    """With a learned weight and bias `[size]`; computed in float32, whatever the type of the rows."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype)
        self.bias = empty_parameter(size, dtype=dtype)
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension; returns a new tensor."""
        return functional.layer_norm(hidden_states, self.weight.shape, self.weight, self.bias, self.eps)
