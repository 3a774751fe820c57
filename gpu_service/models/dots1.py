"""dots.llm1: GLM's router, but queries and keys always normed per head and rotated whole."""

from __future__ import annotations

import torch

from gpu_service.layers.attention import GQAttention
from gpu_service.model_config import ModelConfig
from gpu_service.models.common import CausalLM, build_causal_lm
from gpu_service.parallel.context import SOLO, ParallelContext


def build(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, parallel: ParallelContext = SOLO
) -> CausalLM:
    """Compose the family; an attention bias covers the output projection too."""

    def attention(layer_id: int) -> GQAttention:
        return GQAttention(
            layer_id,
            config,
            qk_norm=True,
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            dtype=dtype,
            parallel=parallel,
        )

    return build_causal_lm(config, attention, dtype=dtype, device=device, parallel=parallel)
