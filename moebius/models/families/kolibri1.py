"""Kolibri 1 (Aleph Alpha): windows with rotation, whole contexts without, four norms a layer, and a router
that chooses by biased logits and weighs by their sigmoids.

Sources: configuration class, model and checkpoint conversion of transformers 5.23.
"""

from __future__ import annotations

from moebius.models.common import (
    every_nth_full,
    read_common,
    read_windows,
    refuse_bias,
    sliding,
    sliding_rotated,
)
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.gqa import QkNorm
from moebius.models.layers.residual import Sequential
from moebius.models.layers.router import RouterConfig
from moebius.models.names import ROTARY, TensorNames, rename
from moebius.models.rope import read_rope


def read_kolibri1(hf: HfKeys) -> ModelConfig:
    """Every layer is MoE; layers that see the whole context are not rotated, unless no layer has a window."""
    # Of the dense layers that there are none of.
    hf.skip("intermediate_size")
    common = read_common(hf, dense_size=hf.integer("moe_intermediate_size"))
    refuse_bias(hf, common)
    if not hf.boolean("use_sliding_window", default=True):
        raise hf.error("use_sliding_window", False, "true; layer_types say which layers slide")
    hf.skip("head_dtype")  # of other engines; the reference computes the head in the model's type
    num_layers = common.num_layers
    kinds = list(hf.strings("layer_types")) or every_nth_full(num_layers, 5)
    windows = read_windows(hf.with_values(layer_types=kinds), num_layers)
    rope = read_rope(hf, common.head_dim)
    always_rotates = not hf.has("sliding_window")
    router = RouterConfig(
        num_experts=hf.integer("num_experts", "num_local_experts"),
        top_k=hf.integer("num_experts_per_tok"),
        score="none",
        correction_bias=True,
        post="sigmoid_renormalize" if hf.boolean("norm_topk_prob", default=False) else "sigmoid",
        float32_gate=True,
    )
    size, shared = hf.integer("moe_intermediate_size"), hf.integer("shared_expert_intermediate_size")
    attention = common.gqa(rope, qk_norm=QkNorm(common.norm))
    mixers = sliding(attention, windows) if always_rotates else sliding_rotated(attention, windows, kinds)
    moe = common.moe(router, size, shared)
    return common.model(mixers, moe, residuals=Sequential(normed_output="both"))


_LAYER = "model.layers.*."
FAMILIES = (
    Family(
        "kolibri1",
        read_kolibri1,
        TensorNames(
            (
                ROTARY,
                rename(_LAYER + "moe.router.expert_bias", _LAYER + "mlp.gate.e_score_correction_bias"),
                rename(_LAYER + "post_attn_norm.**", _LAYER + "post_self_attn_layernorm.**"),
                rename(_LAYER + "post_ffn_norm.**", _LAYER + "post_mlp_layernorm.**"),
            )
        ),
    ),
)
