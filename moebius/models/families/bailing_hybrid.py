"""Ling-3.0-Flash: Kimi Delta Attention, and latent attention with gates of heads in a sixth of the layers.

Sources: the configuration class and the checkpoint conversion of transformers 5.23; keys as public checks of
the published config.json have them. Limits of SwiGLU are the published configuration's, as vLLM and SGLang
apply them; transformers does not read them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moebius.checkpoint.gguf.family import (
    MLA_KEYS,
    Config,
    GgufFamily,
    latent,
    linear_heads_of,
    linear_layers,
)
from moebius.checkpoint.gguf.names import KDA_RULES, GgufRule, gguf_layer, gguf_linear
from moebius.models.common import FULL, Common, listed_or_after_dense, read_biased_router, read_mtp_layers
from moebius.models.config import ModelConfig
from moebius.models.families.step3p5 import clamp_limits, clamped_ffns
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.latent import MLA
from moebius.models.layers.mixer import Mixer
from moebius.models.layers.recurrent import KDA
from moebius.models.mla import read_mla_common, read_moe
from moebius.models.names import ROTARY, TensorNames, rename

if TYPE_CHECKING:
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

LINEAR = "linear_attention"
# Of training; sizes that follow from other keys; the router's type, which is float32 here; of prediction.
_HARMLESS = (
    "embedding_dropout",
    "linear_conv_kernel_dim",
    "linear_head_dim",
    "linear_num_heads",
    "mtp_loss_scaling_factor",
    "mtp_use_kda",
    "output_dropout",
    "rotary_dim",
    "router_dtype",
)
# Of the published configuration, with the only values that models here have.
_FIXED: dict[str, object] = {
    "gated_attention_proj_granularity_type": "head_wise",
    "group_norm_size": 1,
    "linear_silu": True,
    "moe_router_enable_expert_bias": True,
    "no_kda_lora": True,
    "num_kv_heads_for_linear_attn": 0,
    "scale_router_input": False,
    "score_function": "sigmoid",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "up_proj_norm": False,
    "use_bias": False,
    "use_kda_lora": False,
    "use_mla_nope": False,
    "use_nGPT": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "value_norm": False,
}


def _read_mixers(hf: HfKeys, common: Common, attention: MLA) -> list[Mixer]:
    """The mixer of each layer. Raises ModelConfigError unless each is of one type, and both types occur."""
    num_layers, heads = common.num_layers, common.num_heads
    period = hf.integer("layer_group_size", default=6)
    default = tuple(LINEAR if (layer + 1) % period else FULL for layer in range(num_layers))
    kinds = hf.strings("layer_types") or default
    if len(kinds) != num_layers or set(kinds) != {FULL, LINEAR}:
        raise hf.error("layer_types", list(kinds), f"{num_layers} of {FULL} and {LINEAR}, some of both")
    bounded, bound = hf.boolean("kda_safe_gate", default=True), hf.value("kda_lower_bound")
    bound = -5.0 if bound is None else bound
    if isinstance(bound, bool) or not isinstance(bound, int | float) or bound >= 0:
        raise hf.error("kda_lower_bound", bound, "a number < 0")
    # transformers stores the rotated part's size as `head_dim`, and the size itself as `linear_head_dim`.
    head_dim = hf.integer("linear_head_dim", "head_dim", default=128)
    linear = KDA(
        num_key_heads=heads,
        num_value_heads=heads,
        key_head_dim=head_dim,
        value_head_dim=head_dim,
        conv_width=hf.integer("short_conv_kernel_size", default=4, minimum=2),
        eps=common.eps,
        direct_gates=True,
        decay_bound=float(bound) if bounded else None,
    )
    return [linear if kind == LINEAR else attention for kind in kinds]


def _rotated_whole(hf: HfKeys) -> HfKeys:
    """What rotates is a part of its own: 0.5, which published files say, is its share of a head's size."""
    changes: dict[str, Any] = {"partial_rotary_factor": None}
    for name in ("rope_parameters", "rope_scaling"):
        value = hf.value(name)
        if isinstance(value, dict):
            changes[name] = {key: number for key, number in value.items() if key != "partial_rotary_factor"}
    return hf.with_values(**changes)


def read_bailing_hybrid(hf: HfKeys) -> ModelConfig:
    """Groups of experts, shared experts and latents are DeepSeek-V3's; queries have no latent."""
    hf.skip(*_HARMLESS)
    for name, value in _FIXED.items():
        if hf.has(name) and hf.value(name) != value:
            raise hf.error(name, hf.value(name), repr(value))
    length = hf.integer("model_max_length", "max_position_embeddings")
    common, attention = read_mla_common(_rotated_whole(hf.with_values(max_position_embeddings=length)))
    hf.refuse("q_lora_rank")
    name, size = "moe_shared_expert_intermediate_size", hf.integer("moe_intermediate_size")
    if hf.integer(name, default=size) != size:
        raise hf.error(name, hf.integer(name), f"moe_intermediate_size ({size})")
    num_layers = common.num_layers
    router = read_biased_router(hf, groups=(8, 4), scale=2.5)
    layers = listed_or_after_dense(hf, num_layers, default=2)
    moe = read_moe(hf, common, router, default_shared=1)
    limits = clamp_limits(hf, "expert_swiglu_limit_list", num_layers)
    if limits:
        moe = replace(moe, experts=replace(moe.experts, activation="silu_clamped"))
    else:
        limits = (moe.experts.limit,) * num_layers
    dense_limits = clamp_limits(hf, "share_expert_swiglu_limit_list", num_layers)
    return common.model(
        _read_mixers(hf, common, replace(attention, gate="head")),
        clamped_ffns(common, moe, layers, limits, dense_limits or (math.inf,) * num_layers),
        num_mtp_layers=read_mtp_layers(hf),
    )


def _gguf_config(keys: MetadataKeys, config: Config) -> Config:
    """Layers with a decay have linear attention; shared experts are as wide as routed ones."""
    if keys.get("kda.safe_gate") is False:
        raise keys.error("kda.safe_gate", False, "true")
    shared = config["n_shared_experts"] * config["moe_intermediate_size"]
    if keys.integer("expert_shared_feed_forward_length", shared) != shared:
        found = keys.integer("expert_shared_feed_forward_length")
        raise keys.error("expert_shared_feed_forward_length", found, f"{shared}")
    # Zeros where attention is linear, which decays say as well.
    keys.skip("attention.head_count_kv")
    linear, count = linear_layers(keys), config["num_hidden_layers"]
    sizes = linear_heads_of(keys, linear)
    limits = {
        name: keys.numbers(key, count)
        for key, name in (
            ("swiglu_clamp_exp", "expert_swiglu_limit_list"),
            ("swiglu_clamp_shexp", "share_expert_swiglu_limit_list"),
        )
    }
    return (
        latent(keys, config)
        | {name: values for name, values in limits.items() if values}
        | {
            "layer_types": [LINEAR if layer in linear else FULL for layer in range(count)],
            "linear_head_dim": sizes["head_dim"],
            "short_conv_kernel_size": sizes["short_conv_kernel_size"],
            "kda_lower_bound": keys.get("kda.gate_lower_bound"),
        }
    )


_GGUF_RULES = (
    # Decays and gates without a bottleneck, under the names of its first half.
    *gguf_linear("ssm_f_a", "self_attn.f_proj"),
    *gguf_linear("ssm_g_a", "self_attn.g_proj"),
    *gguf_linear("attn_gate", "self_attn.g_proj"),
    gguf_layer("ssm_a", "self_attn.A_log", "flat_log"),
    *KDA_RULES,
    # Norms of multi-token prediction.
    GgufRule(r"blk\.\d+\.layer_output_norm\.weight", None, ("blk.42.layer_output_norm.weight", None)),
)
_LAYER = "model.layers.*."
FAMILIES = (
    Family(
        "bailing_hybrid",
        read_bailing_hybrid,
        TensorNames(
            (
                ROTARY,
                rename("model.word_embeddings.**", "model.embed_tokens.**"),
                rename(_LAYER + "attention.dense.**", _LAYER + "self_attn.o_proj.**"),
                rename(_LAYER + "attention.**", _LAYER + "self_attn.**"),
                rename(_LAYER + "mlp.gate.expert_bias", _LAYER + "mlp.gate.e_score_correction_bias"),
            ),
            mtp_layers=True,
        ),
        gguf=(
            GgufFamily(
                "bailingmoe3",
                MLA_KEYS,
                2,
                derive=_gguf_config,
                rules=_GGUF_RULES,
                by_layer=("attention.head_count_kv",),
            ),
        ),
    ),
)
