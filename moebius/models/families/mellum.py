"""Mellum 2 (JetBrains, 12B-A2.5B): Qwen3-MoE with windows, and a rotation for either kind of layer.

Sources: configuration class and model of transformers 5.23.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moebius.checkpoint.gguf.family import SPARSE_KEYS, Config, GgufFamily, sliding_layers
from moebius.models.common import (
    FULL,
    SLIDING,
    listed_or_after_dense,
    read_common,
    read_softmax_router,
    read_windows,
    sliding,
)
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.gqa import QkNorm
from moebius.models.names import MTP, ROTARY, TensorNames
from moebius.models.rope import read_layer_ropes

if TYPE_CHECKING:
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

# Theta and partial factor where a checkpoint has none.
_ROPES = {FULL: (500000.0, 1.0), SLIDING: (10000.0, 1.0)}


def read_mellum(hf: HfKeys) -> ModelConfig:
    """All layers see everything and are MoE, unless lists say otherwise."""
    common = read_common(hf)
    if not hf.boolean("use_sliding_window", default=True):
        raise hf.error("use_sliding_window", False, "true; layer_types say which layers slide")
    # Of multi-token prediction, which has tensors of its own.
    hf.skip("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types")
    num_layers = common.num_layers
    kinds = list(hf.strings("layer_types")) or [FULL] * num_layers
    windows = read_windows(hf.with_values(layer_types=kinds), num_layers)
    ropes = read_layer_ropes(hf, kinds, common.head_dim, _ROPES)
    for kind, rope in zip(kinds, ropes, strict=True):
        if rope.rotary_dim != common.head_dim:
            raise hf.error(f"rope_parameters.{kind}", "a partial_rotary_factor", "whole heads")
    router = read_softmax_router(hf, renormalizes=True)
    size = hf.integer("moe_intermediate_size")
    attention = common.gqa(None, qk_norm=QkNorm(common.norm), output_bias=common.attention_bias)
    layers = zip(sliding(attention, windows), ropes, strict=True)
    return common.model(
        [replace(layer, rope=rope) for layer, rope in layers],
        common.ffns(common.moe(router, size), listed_or_after_dense(hf, num_layers, 0)),
    )


def _gguf_config(keys: MetadataKeys, config: Config) -> Config:
    """Only layers that see the whole context have a rotation that is scaled."""
    theta = config["rope_theta"]
    sliding = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa") or theta}
    if keys.integer("rope.dimension_count", config["head_dim"]) != config["head_dim"]:
        raise keys.error("rope.dimension_count", keys.get("rope.dimension_count"), str(config["head_dim"]))
    return {
        "layer_types": [SLIDING if one else FULL for one in sliding_layers(keys, config, last_is_full=True)],
        "rope_scaling": None,
        "rope_parameters": {
            FULL: {"rope_type": "default"} | config.get("rope_scaling", {}) | {"rope_theta": theta},
            SLIDING: sliding,
        },
    }


def _gguf_yarn(keys: MetadataKeys) -> Config:
    """The temperature is YaRN's own, which the published model has too."""
    keys.skip("rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor")
    return {}


FAMILIES = (
    Family(
        "mellum",
        read_mellum,
        TensorNames((ROTARY, MTP)),
        # llama.cpp weighs the chosen experts by shares that sum to one, always.
        gguf=(
            GgufFamily(
                "mellum",
                SPARSE_KEYS,
                1,
                {"norm_topk_prob": True},
                _gguf_config,
                yarn=_gguf_yarn,
            ),
        ),
    ),
)
