"""Granite's mixtures of experts that attend in every layer: Granite 3 (1B-A400M, 3B-A800M), the same with
shared experts, and the one with windows and sinks, whose layers may each rotate otherwise.

Sums of the residual stream, embeddings, scores and logits have factors of their own, as in all of Granite.
Sources: configurations, models and checkpoint conversion of transformers 5.23.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moebius.checkpoint.gguf.family import Config, GgufFamily, rotated
from moebius.checkpoint.gguf.names import gguf_layer
from moebius.models.common import FULL, SLIDING, Common, read_common, read_windows, sliding
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.ffn import MoE
from moebius.models.layers.gqa import GQA
from moebius.models.layers.mixer import Mixer
from moebius.models.layers.residual import Sequential
from moebius.models.layers.rope import RopeConfig
from moebius.models.layers.router import RouterConfig
from moebius.models.names import ROTARY, TensorNames, rename
from moebius.models.rope import read_rope

if TYPE_CHECKING:
    # Few processes need the package that knows the format's types.
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys


def read_attention(hf: HfKeys, common: Common, rope: RopeConfig | None) -> GQA:
    """Attention whose scores have a factor of their own."""
    scale = hf.number("attention_multiplier", default=1.0)
    return common.gqa(rope, scale=scale, output_bias=common.attention_bias)


def read_experts(hf: HfKeys, common: Common, shared_size: int) -> MoE:
    """Returns experts as wide as `intermediate_size` says; a softmax over the chosen weighs them."""
    router = RouterConfig(
        num_experts=hf.integer("num_local_experts"),
        top_k=hf.integer("num_experts_per_tok"),
        score="none",
        post="softmax",
    )
    return common.moe(router, common.intermediate_size, shared_size, shared_fused=shared_size > 0)


def scaled_model(hf: HfKeys, common: Common, mixers: Mixer | Sequence[Mixer], moe: MoE) -> ModelConfig:
    """Every layer has experts; embeddings, what layers add, and logits have factors."""
    return common.model(
        mixers,
        moe,
        residuals=Sequential(scale=hf.number("residual_multiplier", default=1.0)),
        embedding_scale=hf.number("embedding_multiplier", default=1.0),
        logit_scale=1.0 / hf.number("logits_scaling", default=1.0),
    )


def read_granitemoe(hf: HfKeys) -> ModelConfig:
    """Returns Granite 3, with shared experts where `shared_intermediate_size` is above 0."""
    common = read_common(hf)
    attention = read_attention(hf, common, read_rope(hf, common.head_dim))
    return scaled_model(hf, common, attention, _read_experts(hf, common))


def _read_experts(hf: HfKeys, common: Common) -> MoE:
    return read_experts(hf, common, hf.integer("shared_intermediate_size", default=0, minimum=0))


def _layer_ropes(hf: HfKeys, rope: RopeConfig, num_layers: int) -> tuple[RopeConfig | None, ...]:
    """The rotation of each layer by a base of its own, 0 where nothing is rotated; without a list by one."""
    bases: Any = hf.value("layer_rope_theta")
    if bases is None:
        return (rope,) * num_layers
    are_numbers = isinstance(bases, list) and all(
        isinstance(base, int | float) and not isinstance(base, bool) and math.isfinite(base) and base >= 0
        for base in bases
    )
    if not are_numbers or len(bases) != num_layers:
        raise hf.error("layer_rope_theta", bases, f"{num_layers} numbers >= 0")
    return tuple(replace(rope, theta=float(base)) if base else None for base in bases)


def read_granitemoe_swa(hf: HfKeys) -> ModelConfig:
    """The first of each four layers sees the whole context unless `layer_types` says otherwise."""
    common = read_common(hf)
    num_layers, rope = common.num_layers, read_rope(hf, common.head_dim)
    kinds = hf.strings("layer_types")
    kinds = kinds or tuple(SLIDING if layer % 4 else FULL for layer in range(num_layers))
    window = hf.integer("sliding_window", default=128)
    windows = read_windows(hf.with_values(layer_types=list(kinds), sliding_window=window), num_layers)
    attention = replace(read_attention(hf, common, rope), has_sinks=True)
    rotated = zip(sliding(attention, windows), _layer_ropes(hf, rope, num_layers), strict=True)
    mixers = [replace(layer, rope=own) for layer, own in rotated]
    return scaled_model(hf, common, mixers, _read_experts(hf, common))


_LAYER = "model.layers.*."
_ROUTER = tuple(
    rename(_LAYER + f"block_sparse_moe.router{stored}.**", _LAYER + "mlp.gate.**")
    for stored in (".layer", "")
)
# Published names of what all of Granite's mixtures have.
GRANITE_NAMES = (
    ROTARY,
    *_ROUTER,
    rename(_LAYER + "shared_mlp.input_linear.**", _LAYER + "mlp.shared_experts.gate_up_proj.**"),
    rename(_LAYER + "shared_mlp.output_linear.**", _LAYER + "mlp.shared_experts.down_proj.**"),
)
GRANITE_GGUF_KEYS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "expert_count": "num_local_experts",
    "expert_shared_feed_forward_length": "shared_intermediate_size",
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
}
GRANITE_PAIRS = (
    gguf_layer("attn_q.weight", "self_attn.q_proj.weight", "query_pairs"),
    gguf_layer("attn_k.weight", "self_attn.k_proj.weight", "key_pairs"),
)
GRANITE_HALVES = (
    gguf_layer("ffn_gate_shexp.weight", "mlp.shared_experts.gate_up_proj.weight", "gate_half"),
    gguf_layer("ffn_up_shexp.weight", "mlp.shared_experts.gate_up_proj.weight", "up_half"),
)


def _gguf_swa(keys: MetadataKeys, config: Config) -> Config:
    """Files say of each layer whether it slides and whether it rotates, all by one base."""
    count = config["num_hidden_layers"]
    slides = keys.flags("attention.sliding_window_pattern", count)
    rotates = keys.flags("attention.rope_pattern", count) or [True] * count
    return rotated(keys, config) | {
        "layer_types": [SLIDING if one else FULL for one in slides],
        "layer_rope_theta": [config["rope_theta"] if one else 0.0 for one in rotates],
    }


FAMILIES = (
    Family("granitemoe", read_granitemoe, TensorNames(GRANITE_NAMES, ("stacked_linears",))),
    Family(
        "granitemoeshared",
        read_granitemoe,
        TensorNames(GRANITE_NAMES, ("stacked_linears",)),
        # Without shared experts as well.
        gguf=(
            GgufFamily(
                "granitemoe", GRANITE_GGUF_KEYS, 3, derive=rotated, rules=(*GRANITE_PAIRS, *GRANITE_HALVES)
            ),
        ),
    ),
    Family(
        "granitemoe_swa",
        read_granitemoe_swa,
        TensorNames(GRANITE_NAMES, ("fused_block_sparse", "stacked_linears")),
        gguf=(
            GgufFamily(
                "granite_swa",
                GRANITE_GGUF_KEYS,
                3,
                derive=_gguf_swa,
                rules=(
                    *GRANITE_PAIRS,
                    # Gate and up in one.
                    gguf_layer("ffn_up_shexp.weight", "mlp.shared_experts.gate_up_proj.weight"),
                ),
            ),
        ),
    ),
)
