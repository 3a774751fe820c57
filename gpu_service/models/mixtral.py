"""Mixtral: no biases, no dense layers, weights of the chosen experts sum to one."""

from __future__ import annotations

import torch

from gpu_service.layers.attention import GQAttention
from gpu_service.model_config import ModelConfig
from gpu_service.models.common import CausalLM, build_causal_lm
from gpu_service.parallel.context import SOLO, ParallelContext


def build(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, parallel: ParallelContext = SOLO
) -> CausalLM:
    """Compose the family."""

    def attention(layer_id: int) -> GQAttention:
        return GQAttention(
            layer_id,
            config,
            qk_norm=False,
            bias=False,
            output_bias=False,
            dtype=dtype,
            parallel=parallel,
        )

    return build_causal_lm(config, attention, dtype=dtype, device=device, parallel=parallel)
