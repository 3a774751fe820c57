"""Families most of whose layers are linear attention, and the others gated attention with normed queries."""

from __future__ import annotations

import torch
from torch import nn

from gpu_service.layers.attention import GQAttention
from gpu_service.layers.gated_delta_net import GatedDeltaNet, StepSequences
from gpu_service.model_config import ModelConfig
from gpu_service.models.common import CausalLM, build_causal_lm
from gpu_service.parallel.context import ParallelContext
from gpu_service.parallel.partition import shard_config


def build_hybrid_lm(
    config: ModelConfig,
    *,
    interleaved: bool,
    dtype: torch.dtype,
    device: torch.device,
    parallel: ParallelContext,
) -> CausalLM:
    """Compose a model; `interleaved` as in `GatedDeltaNet`. States and caches count their own layers."""
    own, sequences = shard_config(config, parallel), StepSequences()
    assert own.linear is not None, "the family's reader fills `linear`"
    caches = {layer: index for index, layer in enumerate(own.attention_layers)}
    states = {layer: index for index, layer in enumerate(sorted(own.linear.layers))}

    def attention(layer_id: int) -> nn.Module:
        if layer_id in states:
            return GatedDeltaNet(
                states[layer_id],
                config,
                sequences,
                interleaved=interleaved,
                dtype=dtype,
                parallel=parallel,
            )
        return GQAttention(
            caches[layer_id],
            config,
            qk_norm=True,
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            output_gate=True,
            dtype=dtype,
            parallel=parallel,
        )

    return build_causal_lm(config, attention, dtype=dtype, device=device, parallel=parallel)
