"""Qwen1.5-MoE and Qwen2-57B-A14B: biases before attention, shared experts with a gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moebius.checkpoint.gguf.family import SPARSE_KEYS, Config, GgufFamily, rotated
from moebius.models.common import (
    FULL,
    SLIDING,
    read_common,
    read_softmax_router,
    read_sparse_layers,
    read_windows,
    refuse_bias,
    sliding,
)
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.gqa import Window
from moebius.models.names import ROTARY, SHARED, TensorNames
from moebius.models.rope import read_rope

if TYPE_CHECKING:
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys


def _qwen2(keys: MetadataKeys, config: Config) -> Config:
    # The family spells its bias otherwise; the general key would be one on the output projection.
    return rotated(keys, config) | {"qkv_bias": config["attention_bias"], "attention_bias": False}


def _windows(hf: HfKeys, num_layers: int) -> tuple[Window | None, ...]:
    """By `layer_types`; without it every other one of the first `max_window_layers`, where they are used."""
    slides = hf.boolean("use_sliding_window", default=False)
    last = hf.integer("max_window_layers", default=28, minimum=0)
    default = [SLIDING if slides and i % 2 == 0 and i < last else FULL for i in range(num_layers)]
    kinds = list(hf.strings("layer_types")) or default
    if not slides and SLIDING in kinds:
        raise hf.error("layer_types", SLIDING, f"{FULL}, or {SLIDING} with use_sliding_window")
    return read_windows(hf.with_values(layer_types=kinds), num_layers)


def read_qwen2_moe(hf: HfKeys) -> ModelConfig:
    """Qwen1.5-MoE and Qwen2-57B-A14B: shared experts are weighed by a gate of their own."""
    common = read_common(hf)
    refuse_bias(hf, common)
    bias = hf.boolean("qkv_bias", default=True)
    windows = _windows(hf, common.num_layers)
    layers = read_sparse_layers(hf, common.num_layers)
    router = read_softmax_router(hf)
    shared = hf.integer("shared_expert_intermediate_size")
    moe = common.moe(router, hf.integer("moe_intermediate_size"), shared, shared_gate=True)
    attention = common.gqa(read_rope(hf, common.head_dim), bias=bias)
    return common.model(sliding(attention, windows), common.ffns(moe, layers))


FAMILIES = (
    Family(
        "qwen2_moe",
        read_qwen2_moe,
        TensorNames((ROTARY, SHARED)),
        gguf=(
            GgufFamily(
                "qwen2moe",
                SPARSE_KEYS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
                1,
                {"norm_topk_prob": False},
                _qwen2,
            ),
        ),
        overflows_float16=True,
    ),
)
