"""Laguna (poolside): heads and rotary embedding by layer, windows, a softplus gate on attention's result.

Sources: the published config.json and, for the function that its keys ask for, transformers 5.23
(LagunaConfig).
"""

from __future__ import annotations

from typing import Any

from moebius.models.common import FULL, SLIDING, listed_or_after_dense, read_common, read_windows
from moebius.models.config import ModelConfig, MoeConfig, RouterConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.names import ROTARY, SHARED, TensorNames, rename
from moebius.models.rope import read_layer_ropes

# Theta and partial factor where a checkpoint has none.
_ROPES = {FULL: (500000.0, 0.5), SLIDING: (10000.0, 1.0)}


def _num_heads(hf: HfKeys, common: dict[str, Any]) -> tuple[int, ...]:
    """Query heads of each layer, each a multiple of the KV heads."""
    num_layers, kv_heads = common["num_layers"], common["num_kv_heads"]
    heads = hf.integers("num_attention_heads_per_layer") or (common["num_heads"],) * num_layers
    if len(heads) != num_layers or any(count < 1 or count % kv_heads for count in heads):
        raise hf.error(
            "num_attention_heads_per_layer", list(heads), f"{num_layers} multiples of num_key_value_heads"
        )
    return heads


def _gates_heads(hf: HfKeys) -> bool:
    """Whether a gate weighs a head, or each of its elements. Raises ModelConfigError for anything else."""
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
    num_layers = common["num_layers"]
    kinds = list(hf.strings("layer_types")) or [FULL] * num_layers
    windows = read_windows(hf.with_values(layer_types=kinds), num_layers)
    ropes = read_layer_ropes(hf, kinds, common["head_dim"], _ROPES)
    heads, per_head = _num_heads(hf, common), _gates_heads(hf)
    if common["attention_bias"] and not per_head:
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
    return ModelConfig(
        # Of layers that differ, what plans memory takes the largest.
        **(common | {"num_heads": max(heads)}),
        model_type="laguna",
        rope=ropes[0],
        layer_ropes=ropes,
        layer_num_heads=heads,
        moe=MoeConfig(router, size, shared, listed_or_after_dense(hf, num_layers, 1)),
        qk_norm=True,
        output_bias=common["attention_bias"],
        head_gate=per_head,
        element_gate=not per_head,
        gate_activation="softplus",
        attention_windows=windows,
    )


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
    ),
)
