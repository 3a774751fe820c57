"""The gated MLP: dense layers and shared experts."""

from __future__ import annotations

import torch
from torch import nn

from gpu_service.context import ForwardContext
from gpu_service.layers.linear import FusedLinear, Linear
from gpu_service.ops.activation import GATED_ACTIVATIONS


class GatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))`."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, *, dtype: torch.dtype
    ) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = FusedLinear(hidden_size, parts, bias=False, dtype=dtype)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False, dtype=dtype)
        self._activation = GATED_ACTIVATIONS[activation]

    def forward(self, hidden_states: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """`[T, H]` to a new `[T, H]`; the context is part of the signature that MLP and MoE share."""
        output: torch.Tensor = self.down_proj(self._activation(self.gate_up_proj(hidden_states)))
        return output
