"""MiniMax-M2: queries and keys normed over all heads together, half of each head rotated."""

from __future__ import annotations

import torch

from gpu_service.layers.attention import GQAttention
from gpu_service.model_config import ModelConfig
from gpu_service.models.common import CausalLM, build_causal_lm
from gpu_service.parallel.context import SOLO, ParallelContext


def build(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, parallel: ParallelContext = SOLO
) -> CausalLM:
    """Compose the family, which has no biases."""

    def attention(layer_id: int) -> GQAttention:
        return GQAttention(
            layer_id,
            config,
            qk_norm=True,
            bias=False,
            output_bias=False,
            full_width_norm=True,
            dtype=dtype,
            parallel=parallel,
        )

    return build_causal_lm(config, attention, dtype=dtype, device=device, parallel=parallel)
