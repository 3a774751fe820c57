"""GLM-4.7-Flash: latent attention with wide values, sigmoid router with correction bias, shared experts."""

from __future__ import annotations

import torch

from gpu_service.layers.mla import MLAttention
from gpu_service.model_config import ModelConfig
from gpu_service.models.common import CausalLM, build_causal_lm
from gpu_service.parallel.context import SOLO, ParallelContext


def build(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, parallel: ParallelContext = SOLO
) -> CausalLM:
    """Compose the family; an attention bias never covers the heads' own projections."""

    def attention(layer_id: int) -> MLAttention:
        return MLAttention(layer_id, config, bias=config.attention_bias, dtype=dtype, parallel=parallel)

    return build_causal_lm(config, attention, dtype=dtype, device=device, parallel=parallel)
