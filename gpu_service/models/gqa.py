"""Families whose layers all have the same grouped-query attention."""

from __future__ import annotations

import torch

from gpu_service.layers.attention import GQAttention
from gpu_service.model_config import ModelConfig
from gpu_service.models.common import CausalLM, build_causal_lm
from gpu_service.parallel.context import ParallelContext


def build_gqa_lm(
    config: ModelConfig,
    *,
    qk_norm: bool,
    bias: bool,
    output_bias: bool,
    full_width_norm: bool = False,
    dtype: torch.dtype,
    device: torch.device,
    parallel: ParallelContext,
) -> CausalLM:
    """Compose a model; the switches are those of `GQAttention`."""

    def attention(layer_id: int) -> GQAttention:
        return GQAttention(
            layer_id,
            config,
            qk_norm=qk_norm,
            bias=bias,
            output_bias=output_bias,
            full_width_norm=full_width_norm,
            dtype=dtype,
            parallel=parallel,
        )

    return build_causal_lm(config, attention, dtype=dtype, device=device, parallel=parallel)
