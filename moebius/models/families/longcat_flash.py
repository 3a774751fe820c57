"""LongCat-Flash (Meituan, arXiv:2509.01322): layers of two latent attentions and two dense MLPs, and experts
next to the second ones; some choices of the router have no weights."""

from __future__ import annotations

from dataclasses import replace

from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.residual import Shortcut
from moebius.models.layers.router import RouterConfig
from moebius.models.mla import read_mla_common
from moebius.models.names import ROTARY, TensorNames, drop, rename

# Of training and of multi-token prediction.
_HARMLESS = ("moe_router_dtype", "nextn_use_scmoe", "params_dtype", "router_dtype")


def _read_router(hf: HfKeys) -> RouterConfig:
    """Softmax over all choices; the bias corrects the choice only."""
    # The published code ignores it, transformers' too.
    hf.refuse("router_bias")
    hf.refuse("norm_topk_prob")
    hf.refuse("topk_method")
    zero_experts = hf.integer("zero_expert_num", default=0, minimum=0)
    kind = hf.string("zero_expert_type", default="identity")
    if zero_experts and kind != "identity":
        raise hf.error("zero_expert_type", kind, "identity")
    return RouterConfig(
        num_experts=hf.integer("n_routed_experts"),
        top_k=hf.integer("moe_topk", "num_experts_per_tok"),
        score="softmax",
        correction_bias=True,
        scale=hf.number("routed_scaling_factor"),
        float32_gate=True,
        num_zero_experts=zero_experts,
    )


def read_longcat_flash(hf: HfKeys) -> ModelConfig:
    """Every layer has experts. The smaller the ranks of queries and latents, the more both are scaled up."""
    # Of attentions in transformers 5, of layers in older files: both follow from `num_layers`.
    hf.skip("num_hidden_layers", *_HARMLESS)
    method = hf.string("attention_method", default="MLA")
    if method != "MLA":
        raise hf.error("attention_method", method, "MLA")
    common, mla = read_mla_common(
        hf,
        dense_size=hf.integer("ffn_hidden_size", "intermediate_size"),
        num_layers=hf.integer("num_layers"),
    )
    hidden_size = common.hidden_size
    if mla.q_lora_rank is None:
        raise hf.error("q_lora_rank", None, "an integer >= 1")
    scale = mla.softmax_scale
    if hf.boolean("mla_scale_q_lora", default=True):
        # Scores are linear in queries.
        scale *= (hidden_size / mla.q_lora_rank) ** 0.5
    latent_scale = 1.0
    if hf.boolean("mla_scale_kv_lora", default=True):
        latent_scale = (hidden_size / mla.kv_lora_rank) ** 0.5
    attention = replace(mla, softmax_scale=scale, latent_scale=latent_scale)
    size = hf.integer("expert_ffn_hidden_size", "moe_intermediate_size")
    return common.model(attention, common.moe(_read_router(hf), size), residuals=Shortcut(common.dense()))


_LAYER = "model.layers.*.mlp."
FAMILIES = (
    Family(
        "longcat_flash",
        read_longcat_flash,
        TensorNames(
            (
                ROTARY,
                drop("model.mtp.**"),
                rename(_LAYER + "router.classifier.**", _LAYER + "gate.**"),
                rename(_LAYER + "router.e_score_correction_bias", _LAYER + "gate.e_score_correction_bias"),
            )
        ),
    ),
)
