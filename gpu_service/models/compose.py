"""From a model's description to its layers: attention, latent, compressed or linear attention in each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from gpu_service.core.parallel import SOLO, ParallelContext
from gpu_service.core.partition import check_divisible, shard_config, stage_layers
from gpu_service.device import TORCH_DTYPES
from gpu_service.layers.attention import GQAttention
from gpu_service.layers.compressed import CompressedAttention, StepTables
from gpu_service.layers.decoder import RotaryEmbedding
from gpu_service.layers.gated_delta_net import GatedDeltaNet
from gpu_service.layers.gated_streams import NGramLayer
from gpu_service.layers.kimi_delta import KimiDeltaAttention
from gpu_service.layers.lightning import LightningAttention
from gpu_service.layers.mamba import Mamba
from gpu_service.layers.mamba2 import Mamba2
from gpu_service.layers.mla import Indexer, MLAttention, StepSelection
from gpu_service.layers.short_conv import ShortConv
from gpu_service.layers.states import StateLayer, StepSequences
from gpu_service.models.common import CausalLM, build_causal_lm
from moebius.models.config import LinearAttentionConfig, ModelConfig
from moebius.models.switches import check_switches


def build_model(
    config: ModelConfig,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    parallel: ParallelContext = SOLO,
) -> CausalLM:
    """Compose the model, or a rank's part of it, on the meta device; `load_weights` puts it on `device`.

    `dtype` is that of weights and activations, by default the config's. Raises ConfigError for a model that
    can not be divided over the ranks, and as `check_switches`.
    """
    check_switches(config)
    check_divisible(config, parallel)
    dtype = dtype or TORCH_DTYPES[config.dtype]
    if config.compressed is not None:
        attention = _compressed_attention(config, dtype, torch.device(device), parallel)
    else:
        attention = _attention_of(config, dtype, parallel)
    model = build_causal_lm(
        config,
        attention,
        dtype=dtype,
        device=torch.device(device),
        parallel=parallel,
        make_ngrams=_ngrams_of(config, dtype, torch.device(device), parallel),
    )
    return model.eval()


# By a layer's index in the stage, or by an attention's, where layers have two.
_MakeAttention = Callable[[int], nn.Module]


def _attention_of(config: ModelConfig, dtype: torch.dtype, parallel: ParallelContext) -> _MakeAttention:
    """Linear attention in the layers that have it, in all others what the model caches tokens for.

    States and caches count their own layers.
    """
    own = shard_config(config, parallel)
    make = _latent_attention if config.mla is not None else _grouped_query_attention
    cached = make(config, own, dtype, parallel)
    if config.linear is None or own.linear is None:
        return cached
    linear_class = _linear_class(config.linear)
    states = {layer: index for index, layer in enumerate(sorted(own.linear.layers))}
    sequences = StepSequences()

    def attention(layer_id: int) -> nn.Module:
        if layer_id not in states:
            return cached(layer_id)
        return linear_class(states[layer_id], config, sequences, dtype=dtype, parallel=parallel)

    return attention


def _ngrams_of(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, parallel: ParallelContext
) -> Callable[[int], NGramLayer | None]:
    """By a layer's index in the checkpoint; states count those of the stage."""
    ngram, stage, sequences = config.ngram, stage_layers(config, parallel), StepSequences()
    own = () if ngram is None else tuple(layer for layer in ngram.layers if layer in stage)

    def ngrams(layer_id: int) -> NGramLayer | None:
        if layer_id not in own:
            return None
        state = own.index(layer_id)
        return NGramLayer(config, layer_id, state, sequences, dtype=dtype, device=device, parallel=parallel)

    return ngrams


def _compressed_attention(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, parallel: ParallelContext
) -> _MakeAttention:
    """All layers keep the latest tokens, and those that compress have entries."""
    assert config.rope is not None, "the family's reader fills `rope`"
    rotary = RotaryEmbedding(config.rope, config.max_model_len, dtype=dtype, device=device)
    tables, first_layer = StepTables(rotary), stage_layers(config, parallel).start

    def attention(layer_id: int) -> nn.Module:
        layer = first_layer + layer_id
        return CompressedAttention(layer_id, layer, config, tables, dtype=dtype, parallel=parallel)

    return attention


def _linear_class(linear: LinearAttentionConfig) -> Callable[..., StateLayer]:
    if linear.short_conv:
        return ShortConv
    if linear.fixed_decay:
        return LightningAttention
    if linear.step_rank:
        return Mamba
    if linear.state_space:
        return Mamba2
    return KimiDeltaAttention if linear.channel_decay else GatedDeltaNet


def _grouped_query_attention(
    config: ModelConfig, own: ModelConfig, dtype: torch.dtype, parallel: ParallelContext
) -> _MakeAttention:
    """`own`: the rank's configuration."""
    first_layer = stage_layers(config, parallel).start
    caches = {layer: index for index, layer in enumerate(own.attention_layers)}
    choosing = () if own.block_indexer is None else sorted(own.block_indexer.layers)
    index_layers = {layer: index for index, layer in enumerate(choosing)}

    def attention(layer_id: int) -> nn.Module:
        shape, index_layer = config.attention_shape(first_layer + layer_id), index_layers.get(layer_id)
        cache = caches[layer_id]
        return GQAttention(cache, config, shape, dtype=dtype, parallel=parallel, index_layer=index_layer)

    return attention


def _latent_attention(
    config: ModelConfig, own: ModelConfig, dtype: torch.dtype, parallel: ParallelContext
) -> _MakeAttention:
    """An attention bias never covers the heads' own projections; `own`: the rank's configuration.

    With an indexer, layers attend to what they or the nearest layer before them chose.
    """
    mla = own.mla
    assert mla is not None, "the family's reader fills `mla`"
    caches = {layer: index for index, layer in enumerate(own.latent_layers)}
    sources = mla.latent_sources or tuple(range(own.num_layers))
    first_layer = stage_layers(config, parallel).start
    if own.shortcut_experts:
        # What is composed counts attentions, each of which has a cache.
        caches = {index: index for index in range(len(own.attention_layers))}
        sources = tuple(caches)
    selection = None if mla.indexer is None else StepSelection()
    choosing = () if mla.indexer is None else sorted(mla.indexer.layers)
    index_layers = {layer: index for index, layer in enumerate(choosing)}

    def rotates(layer: int) -> bool:
        return config.rope is not None and (not config.layer_ropes or config.layer_ropes[layer] is not None)

    def attention(layer_id: int) -> nn.Module:
        indexer = None
        if selection is not None and layer_id in index_layers:
            indexer = Indexer(index_layers[layer_id], config, selection, dtype=dtype)
        source = sources[layer_id]
        return MLAttention(
            caches[source],
            config,
            bias=config.attention_bias,
            dtype=dtype,
            parallel=parallel,
            indexer=indexer,
            selection=selection,
            has_latents=source == layer_id,
            shares_latents=layer_id in sources[layer_id + 1 :],
            rotates=config.shortcut_experts or rotates(first_layer + layer_id),
        )

    return attention
