"""The pre-norm decoder layer."""

from __future__ import annotations

import torch
from torch import nn

from gpu_service.context import ForwardContext
from gpu_service.layers.norm import RMSNorm
from gpu_service.model_config import ModelConfig
from gpu_service.ops.rope import RopeTable


class DecoderLayer(nn.Module):
    """`x += attention(norm(x)); x += mlp(norm(x))`; `mlp` is a `GatedMLP` or a `MoE`."""

    def __init__(
        self, config: ModelConfig, attention: nn.Module, mlp: nn.Module, *, dtype: torch.dtype
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, dtype=dtype)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(size, eps, dtype=dtype)
        self.mlp = mlp

    def forward(self, hidden_states: torch.Tensor, rope: RopeTable, context: ForwardContext) -> torch.Tensor:
        """Adds to `[T, H]` in place and returns it."""
        hidden_states.add_(self.self_attn(self.input_layernorm(hidden_states), rope, context))
        hidden_states.add_(self.mlp(self.post_attention_layernorm(hidden_states), context))
        return hidden_states
