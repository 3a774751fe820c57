"""From a model's description to its layers: attention, latent attention or linear attention in each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from gpu_service.device import TORCH_DTYPES
from gpu_service.layers.attention import GQAttention
from gpu_service.layers.gated_delta_net import GatedDeltaNet, StepSequences
from gpu_service.layers.mamba2 import Mamba2
from gpu_service.layers.mla import Indexer, MLAttention, StepSelection
from gpu_service.models.common import CausalLM, build_causal_lm
from gpu_service.parallel.context import SOLO, ParallelContext
from gpu_service.parallel.partition import check_divisible, shard_config, stage_layers
from moebius.models.config import ModelConfig


def build_model(
    config: ModelConfig,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    parallel: ParallelContext = SOLO,
) -> CausalLM:
    """Compose the model, or a rank's part of it, on the meta device; `load_weights` puts it on `device`.

    `dtype` is that of weights and activations, by default the config's. Raises ConfigError for a model that
    can not be divided over so many ranks.
    """
    check_divisible(config, parallel)
    dtype = dtype or TORCH_DTYPES[config.dtype]
    make = _latent_attention if config.mla is not None else _grouped_query_attention
    attention = make(config, dtype, parallel)
    model = build_causal_lm(config, attention, dtype=dtype, device=torch.device(device), parallel=parallel)
    return model.eval()


def _grouped_query_attention(
    config: ModelConfig, dtype: torch.dtype, parallel: ParallelContext
) -> Callable[[int], nn.Module]:
    """By a layer's index in the stage; linear attention in the layers that have it.

    States and caches count their own layers.
    """
    own, sequences = shard_config(config, parallel), StepSequences()
    first_layer = stage_layers(config, parallel).start
    caches = {layer: index for index, layer in enumerate(own.attention_layers)}
    linear_layers = () if own.linear is None else sorted(own.linear.layers)
    states = {layer: index for index, layer in enumerate(linear_layers)}
    is_state_space = config.linear is not None and config.linear.state_space

    def attention(layer_id: int) -> nn.Module:
        if layer_id in states:
            linear_class = Mamba2 if is_state_space else GatedDeltaNet
            return linear_class(states[layer_id], config, sequences, dtype=dtype, parallel=parallel)
        heads = config.layer_num_heads[first_layer + layer_id] if config.layer_num_heads else None
        return GQAttention(
            caches[layer_id],
            config,
            window=own.attention_windows[layer_id] if own.attention_windows else None,
            num_heads=heads,
            dtype=dtype,
            parallel=parallel,
        )

    return attention


def _latent_attention(
    config: ModelConfig, dtype: torch.dtype, parallel: ParallelContext
) -> Callable[[int], nn.Module]:
    """By a layer's index in the stage; an attention bias never covers the heads' own projections.

    With an indexer, layers attend to what they or the nearest layer before them chose.
    """
    mla = shard_config(config, parallel).mla
    assert mla is not None, "the family's reader fills `mla`"
    selection = None if mla.indexer is None else StepSelection()
    choosing = () if mla.indexer is None else sorted(mla.indexer.layers)
    index_layers = {layer: index for index, layer in enumerate(choosing)}

    def attention(layer_id: int) -> nn.Module:
        indexer = None
        if selection is not None and layer_id in index_layers:
            indexer = Indexer(index_layers[layer_id], config, selection, dtype=dtype)
        return MLAttention(
            layer_id,
            config,
            bias=config.attention_bias,
            dtype=dtype,
            parallel=parallel,
            indexer=indexer,
            selection=selection,
        )

    return attention
