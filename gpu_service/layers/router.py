"""The gate: from hidden states to chosen experts."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from gpu_service.layers.linear import empty_parameter
from gpu_service.model_config import RouterConfig
from gpu_service.ops.router import route


class Router(nn.Module):
    """Gate matmul followed by `ops.router.route`.

    The weight is kept in the dtype the product runs in: with a float32 gate a bfloat16 checkpoint is
    widened once at load instead of at every step. The correction bias is always float32.
    """

    def __init__(self, hidden_size: int, config: RouterConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        gate_dtype = torch.float32 if config.float32_gate else dtype
        self.weight = empty_parameter(config.num_experts, hidden_size, dtype=gate_dtype)
        shape = (1, config.num_experts) if config.correction_bias_is_row else (config.num_experts,)
        self.e_score_correction_bias = (
            empty_parameter(*shape, dtype=torch.float32) if config.correction_bias else None
        )
        self.bias = empty_parameter(config.num_experts, dtype=gate_dtype) if config.gate_bias else None
        self._config = config

    def forward(
        self, hidden_states: torch.Tensor, valid_rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`[T, H]` to weights float32 `[T, top_k]` and ids int32 `[T, top_k]`; -1 where not valid."""
        logits = functional.linear(hidden_states.to(self.weight.dtype), self.weight, self.bias)
        bias = self.e_score_correction_bias
        return route(logits, None if bias is None else bias.flatten(), self._config, valid_rows)
