"""gpt-oss: attention sinks, every other layer with a sliding window, biases on all projections."""

from __future__ import annotations

import torch

from gpu_service.layers.attention import GQAttention
from gpu_service.model_config import ModelConfig
from gpu_service.models.common import CausalLM, build_causal_lm
from gpu_service.parallel.context import SOLO, ParallelContext
from gpu_service.parallel.partition import shard_config


def build(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, parallel: ParallelContext = SOLO
) -> CausalLM:
    """Compose the family; an attention bias covers the output projection too."""
    # As the attention backend of this stage counts layers.
    windows = shard_config(config, parallel).attention_windows

    def attention(layer_id: int) -> GQAttention:
        return GQAttention(
            layer_id,
            config,
            qk_norm=False,
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            sinks=config.attention_sinks,
            window=windows[layer_id],
            dtype=dtype,
            parallel=parallel,
        )

    return build_causal_lm(config, attention, dtype=dtype, device=device, parallel=parallel)
