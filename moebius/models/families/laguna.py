"""Laguna (poolside): heads and rotary embedding by layer, windows, a softplus gate on attention's result.

Sources: the published config.json and, for the function that its keys ask for, transformers 5.23
(LagunaConfig).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moebius.checkpoint.gguf.family import SPARSE_KEYS, Config, GgufFamily, sliding_layers
from moebius.checkpoint.gguf.names import gguf_linear
from moebius.models.common import (
    FULL,
    SLIDING,
    Common,
    listed_or_after_dense,
    read_common,
    read_windows,
    sliding,
)
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.gqa import Gate, QkNorm
from moebius.models.layers.router import RouterConfig
from moebius.models.names import ROTARY, SHARED, TensorNames, rename
from moebius.models.rope import read_layer_ropes

if TYPE_CHECKING:
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

# Theta and partial factor where a checkpoint has none.
_ROPES = {FULL: (500000.0, 0.5), SLIDING: (10000.0, 1.0)}


def _num_heads(hf: HfKeys, common: Common) -> tuple[int, ...]:
    """Returns query heads of each layer, each a multiple of the KV heads."""
    num_layers, kv_heads = common.num_layers, common.num_kv_heads
    heads = hf.integers("num_attention_heads_per_layer") or (common.num_heads,) * num_layers
    if len(heads) != num_layers or any(count < 1 or count % kv_heads for count in heads):
        raise hf.error(
            "num_attention_heads_per_layer", list(heads), f"{num_layers} multiples of num_key_value_heads"
        )
    return heads


def _gates_heads(hf: HfKeys) -> bool:
    """Returns whether a gate weighs a head, or each of its elements. Raises ModelConfigError."""
    gating = hf.value("gating")
    allowed = (None, True, "per-head", "per-element")
    kinds = set(hf.strings("gating_types"))
    if gating not in allowed or not kinds <= {"per_head", "per_element"} or len(kinds) > 1:
        raise hf.error("gating", gating, "true, per-head or per-element, the same in all layers")
    per_head: bool = gating != "per-element"
    if kinds and kinds != {"per_head" if per_head else "per_element"}:
        raise hf.error("gating_types", sorted(kinds), "what gating says")
    return per_head


def read_laguna(hf: HfKeys) -> ModelConfig:
    """The first layer is dense unless `mlp_layer_types` says otherwise."""
    common = read_common(hf)
    # Which layers are dense is said by `mlp_layer_types`.
    hf.skip("decoder_sparse_step", "mlp_only_layers")
    hf.refuse("moe_apply_router_weight_on_input")
    hf.refuse("qkv_bias")
    if not hf.boolean("norm_topk_prob", default=True):
        raise hf.error("norm_topk_prob", False, "true")
    num_layers = common.num_layers
    kinds = list(hf.strings("layer_types")) or [FULL] * num_layers
    windows = read_windows(hf.with_values(layer_types=kinds), num_layers)
    ropes = read_layer_ropes(hf, kinds, common.head_dim, _ROPES)
    heads, per_head = _num_heads(hf, common), _gates_heads(hf)
    if common.attention_bias and not per_head:
        raise hf.error("attention_bias", True, "false with gating per-element")
    softcap = hf.value("moe_router_logit_softcapping") or 0
    router = RouterConfig(
        num_experts=hf.integer("num_experts"),
        top_k=hf.integer("num_experts_per_tok"),
        score="sigmoid",
        correction_bias=True,
        post="renormalize",
        scale=hf.number("moe_routed_scaling_factor", default=1.0),
        logit_softcap=hf.number("moe_router_logit_softcapping") if softcap else 0.0,
    )
    size, shared = hf.integer("moe_intermediate_size"), hf.integer("shared_expert_intermediate_size")
    attention = common.gqa(
        None,
        qk_norm=QkNorm(common.norm),
        output_bias=common.attention_bias,
        gate=Gate("head" if per_head else "element", "softplus"),
    )
    layers = zip(sliding(attention, windows), heads, ropes, strict=True)
    return common.model(
        [replace(layer, num_heads=count, rope=rope) for layer, count, rope in layers],
        common.ffns(common.moe(router, size, shared), listed_or_after_dense(hf, num_layers, 1)),
    )


_GGUF_KEYS = SPARSE_KEYS | {
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_weights_scale": "moe_routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}


def _gguf_config(keys: MetadataKeys, config: Config) -> Config:
    """Returns sizes by layer and both kinds of rotation, one perhaps scaled; gates as wide as stored."""
    if not keys.get("expert_weights_norm"):
        raise keys.error("expert_weights_norm", False, "true")
    count, head_dim = config["num_hidden_layers"], config["head_dim"]
    heads = keys.listed("attention.head_count", count)
    rows = {
        keys.model.tensors[f"blk.{layer}.attn_gate.weight"].shape[0] // heads[layer]
        for layer in keys.layers_with("attn_gate.weight")
    }
    if rows not in ({1}, {head_dim}):
        raise keys.error("attention.head_count", heads, f"as many rows of attn_gate, or {head_dim} times so")
    theta = config["rope_theta"]
    full = {"rope_type": "default"} | config.get("rope_scaling", {}) | {"rope_theta": theta}
    sliding = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa") or theta}
    for rope, suffix in ((full, ""), (sliding, "_swa")):
        rotated = keys.integer(f"rope.dimension_count{suffix}", head_dim)
        rope["partial_rotary_factor"] = rotated / head_dim
    kinds = [SLIDING if slides else FULL for slides in sliding_layers(keys, config, last_is_full=False)]
    return {
        "num_attention_heads": max(heads),
        "num_attention_heads_per_layer": heads,
        "layer_types": kinds,
        "gating": "per-head" if rows == {1} else "per-element",
        "rope_scaling": None,
        "rope_parameters": {FULL: full, SLIDING: sliding},
    }


def _gguf_yarn(keys: MetadataKeys) -> Config:
    """The temperature is YaRN's own, whatever is written, as llama.cpp has it."""
    keys.skip("rope.scaling.yarn_attn_factor")
    return {}


FAMILIES = (
    Family(
        "laguna",
        read_laguna,
        TensorNames(
            (
                ROTARY,
                SHARED,
                rename(
                    "model.layers.*.mlp.experts.e_score_correction_bias",
                    "model.layers.*.mlp.gate.e_score_correction_bias",
                ),
            )
        ),
        gguf=(
            GgufFamily(
                "laguna",
                _GGUF_KEYS,
                2,
                derive=_gguf_config,
                yarn=_gguf_yarn,
                by_layer=("attention.head_count",),
                rules=tuple(gguf_linear("attn_gate", "self_attn.g_proj")),
            ),
        ),
    ),
)
