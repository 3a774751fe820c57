"""Step-3.5-Flash: windows, heads, rotary embedding and clamps by layer, a gate for each head's output."""

from __future__ import annotations

import torch

from gpu_service.layers.attention import GQAttention
from gpu_service.model_config import ModelConfig
from gpu_service.models.common import CausalLM, build_causal_lm
from gpu_service.parallel.context import SOLO, ParallelContext
from gpu_service.parallel.partition import shard_config, stage_layers


def build(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, parallel: ParallelContext = SOLO
) -> CausalLM:
    """Compose the family; norms are centred, those of queries and keys too."""
    windows = shard_config(config, parallel).attention_windows
    layers = stage_layers(config, parallel)

    def attention(layer_id: int) -> GQAttention:
        return GQAttention(
            layer_id,
            config,
            qk_norm=True,
            bias=False,
            output_bias=False,
            window=windows[layer_id] if windows else None,
            num_heads=config.layer_num_heads[layers[layer_id]],
            head_gate=True,
            dtype=dtype,
            parallel=parallel,
        )

    return build_causal_lm(config, attention, dtype=dtype, device=device, parallel=parallel)
