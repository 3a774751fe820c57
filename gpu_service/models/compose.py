"""From a model's layers to its modules: each kind of value has one class, which these tables name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gpu_service.core.parallel import SOLO, ParallelContext
from gpu_service.core.partition import rank_layers, stage_layers
from gpu_service.device import TORCH_DTYPES
from gpu_service.layers import compressed as compressed_modules
from gpu_service.layers import gated_delta_net, mamba2, moe, shared_entries, short_conv
from gpu_service.layers.attention import GQAttention
from gpu_service.layers.composition import Composition, LayerParts
from gpu_service.layers.decoder import (
    DecoderLayer,
    NormedResidualLayer,
    ParallelLayer,
    ShortcutLayer,
    SingleLayer,
)
from gpu_service.layers.eagle3 import Eagle3Layer
from gpu_service.layers.gated_streams import GatedStreamLayer
from gpu_service.layers.hyper_connections import HyperDecoderLayer
from gpu_service.layers.kimi_delta import KimiDeltaAttention
from gpu_service.layers.lightning import LightningAttention
from gpu_service.layers.mamba import Mamba
from gpu_service.layers.mla import MLAttention
from gpu_service.layers.mtp import MtpLayer
from gpu_service.models.common import CausalLM
from moebius.models.config import ModelConfig
from moebius.models.layers.compressed import CompressedAttention, SharedEntryAttention
from moebius.models.layers.ffn import Dense, FeedForward, LatentMoE, MoE, NormedMoE
from moebius.models.layers.gqa import GQA
from moebius.models.layers.latent import MLA
from moebius.models.layers.layer import Layer, Places, places
from moebius.models.layers.mixer import Mixer
from moebius.models.layers.recurrent import KDA, GatedDeltaNet, Lightning, Mamba2, SelectiveScan, ShortConv
from moebius.models.layers.residual import (
    Eagle3,
    GatedStreams,
    HyperConnections,
    NextToken,
    NormedStream,
    Parallel,
    Sequential,
    Shortcut,
    Single,
)

# Called with the whole model's value, the places of what it keeps, and what modules are made with.
MIXERS: dict[type[Mixer], Callable[[Any, Places, Composition], nn.Module]] = {
    GQA: GQAttention,
    MLA: MLAttention,
    CompressedAttention: compressed_modules.CompressedAttention,
    SharedEntryAttention: shared_entries.SharedEntryAttention,
    GatedDeltaNet: gated_delta_net.GatedDeltaNet,
    KDA: KimiDeltaAttention,
    Mamba2: mamba2.Mamba2,
    SelectiveScan: Mamba,
    ShortConv: short_conv.ShortConv,
    Lightning: LightningAttention,
}
# Of feed-forward blocks, with the layer's number in the checkpoint where there are experts.
ROUTED: dict[type[FeedForward], Callable[[Any, int, Composition], nn.Module]] = {
    MoE: moe.MoE,
    LatentMoE: moe.MoE,
    NormedMoE: moe.MoEWithOwnNorms,
}
RESIDUALS: dict[type, Callable[[Layer, LayerParts, Composition], nn.Module]] = {
    Sequential: DecoderLayer,
    Single: SingleLayer,
    Parallel: ParallelLayer,
    NormedStream: NormedResidualLayer,
    Shortcut: ShortcutLayer,
    HyperConnections: HyperDecoderLayer,
    GatedStreams: GatedStreamLayer,
    NextToken: MtpLayer,
    Eagle3: Eagle3Layer,
}


def build_model(
    config: ModelConfig,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    parallel: ParallelContext = SOLO,
) -> CausalLM:
    """Compose the model, or a rank's part of it, on the meta device; `load_weights` puts it on `device`.

    `dtype` is that of weights and activations, by default the config's. Raises ConfigError for a model that
    can not be divided over the ranks.
    """
    dtype, device = dtype or TORCH_DTYPES[config.dtype], torch.device(device)
    made = Composition(config.hidden_size, dtype, parallel, device, config.vocab_size, config.max_model_len)
    own_places = places(rank_layers(config, parallel))
    layers = [
        _module(config.layers[layer_id], layer_id, where, made)
        for layer_id, where in zip(stage_layers(config, parallel), own_places, strict=True)
    ]
    return CausalLM(config, layers, dtype=dtype, device=device, parallel=parallel).eval()


def _module(layer: Layer, layer_id: int, where: list[Places], made: Composition) -> nn.Module:
    """Returns a layer of the whole model, as this rank computes it."""
    mixers = [MIXERS[type(mixer)](mixer, where[i], made) for i, mixer in enumerate(layer.mixers)]
    ffn: nn.Module | None = None
    if isinstance(layer.ffn, Dense):
        declared = made.weights(layer.ffn.weights(made.hidden_size))
        ffn = moe.MLP(layer.ffn, declared, made.parallel)
    elif layer.ffn is not None:
        ffn = ROUTED[type(layer.ffn)](layer.ffn, layer_id, made)
    return RESIDUALS[type(layer.residual)](layer, LayerParts(mixers, ffn, where), made)
