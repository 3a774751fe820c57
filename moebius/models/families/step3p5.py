"""Step-3.5-Flash and the text model of Step-3.7-Flash: windows, heads, rotary embedding, clamps by layer.

A gate weighs each head's output. Lists have an entry for each layer, MTP layers after the last one included.
Sources: the published config.json and, for the function that its keys ask for, transformers 5.23
(Step3p7TextConfig).
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moebius.checkpoint.gguf.family import ROPE_FACTORS_RULE, GgufFamily, llama3_scaling
from moebius.checkpoint.gguf.names import ONE_PLUS_WEIGHT_NORM_RULES, gguf_layer, gguf_linear
from moebius.models.common import (
    FULL,
    SLIDING,
    Common,
    listed_or_after_dense,
    read_common,
    read_mtp_layers,
    read_windows,
    sliding,
)
from moebius.models.config import ModelConfig, VisionConfig
from moebius.models.family import Family, VisionFamily
from moebius.models.keys import HfKeys
from moebius.models.layers.ffn import Experts, FeedForward, MoE
from moebius.models.layers.gqa import Gate, QkNorm
from moebius.models.layers.norms import RMSNorm
from moebius.models.layers.rope import RopeConfig
from moebius.models.layers.router import RouterConfig
from moebius.models.names import ROTARY, TensorNames, drop, rename
from moebius.models.rope import read_layer_ropes, read_rope

if TYPE_CHECKING:
    # Few processes need the package that knows the format's types.
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

_GATE = rename("model.layers.*.moe.gate.weight", "model.layers.*.mlp.gate.weight")
_BIAS = rename("model.layers.*.moe.router_bias", "model.layers.*.mlp.gate.e_score_correction_bias")
_SHARED = rename("model.layers.*.share_expert.**", "model.layers.*.mlp.shared_experts.**")
# NVIDIA's copies of Step-3.7.
_INSIDE = "model.language_model."
_NVIDIA = (
    drop("model.vision_model.**"),
    drop("model.vit_large_projector.**"),
    rename(_INSIDE + "layers.*.moe.gate.weight", "model.layers.*.mlp.gate.weight"),
    rename(_INSIDE + "layers.*.moe.router_bias", "model.layers.*.mlp.gate.e_score_correction_bias"),
    rename(_INSIDE + "layers.*.share_expert.**", "model.layers.*.mlp.shared_experts.**"),
    rename(_INSIDE + "**", "model.**"),
)


# Of training and of other engines, and what other keys say as well.
_HARMLESS = (
    "max_seq_len",
    "moe_dynamic_exp_p",
    "moe_every_n_layer",
    "moe_layer_offset",
    "mtp_layer_types",
    "mtp_mlp_layer_types",
    "per_layer_config",
    # The family's code makes the norms whatever it says.
    "use_qk_norm",
)
# Of the tower, of what joins it to the text, and of its tokens.
_VISION = (
    "image_token_id",
    "image_token_len",
    "im_end_token",
    "im_patch_token",
    "im_start_token",
    "patch_token_len",
    "projector_bias",
    "understand_projector_stride",
    "vision_config",
    "vision_select_layer",
)
# Layers before the first mixture of experts where no list says which they are.
_DENSE_LAYERS = 3
# Keys with the only value that is supported, which is also what it is where it is missing.
_FIXED: dict[str, object] = {
    "att_impl_type": "GQA",
    "moe_router_activation": "sigmoid",
    "norm_expert_weight": True,
    "sink": False,
    "use_head_wise_attn_gate": True,
    "use_mfa": False,
    "use_moe": True,
    "use_moe_router_bias": True,
    "zero_centered": True,
}


def _check_fixed(hf: HfKeys) -> None:
    for name, value in _FIXED.items():
        if hf.has(name) and hf.value(name) != value:
            raise hf.error(name, hf.value(name), repr(value))


def _per_layer(hf: HfKeys, name: str, num_layers: int) -> tuple[Any, ...]:
    """Returns a list without its entries of MTP layers; empty where there is none."""
    value = hf.value(name) if hf.has(name) else None
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) < num_layers:
        raise hf.error(name, value, f"a list of {num_layers} entries or more")
    return tuple(value[:num_layers])


def _numbers(hf: HfKeys, name: str, num_layers: int, default: float) -> tuple[float, ...]:
    """Returns a number above zero for each layer; one number is that of all."""
    if hf.has(name) and not isinstance(hf.value(name), list):
        return (hf.number(name),) * num_layers
    values = _per_layer(hf, name, num_layers) or (default,) * num_layers
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise hf.error(name, value, "numbers > 0")
    return tuple(float(value) for value in values)


def _ropes(hf: HfKeys, kinds: tuple[str, ...], head_dim: int) -> tuple[RopeConfig, ...]:
    """Returns rotary embedding of each layer; those that slide have no scaling."""
    by_kind = hf.section("rope_parameters")
    if by_kind is not None and all(by_kind.has(kind) for kind in kinds):
        # As transformers writes it, with what other keys have said before.
        hf.skip("yarn_only_types")
        return read_layer_ropes(hf, kinds, head_dim, dict.fromkeys(kinds, (10000.0, 1.0)))
    thetas = _numbers(hf, "rope_theta", len(kinds), 10000.0)
    factors = _numbers(hf, "partial_rotary_factors", len(kinds), 1.0)
    if hf.integers("use_rope_layers"):
        raise hf.error("use_rope_layers", list(hf.integers("use_rope_layers")), "absent or empty")
    for name in hf.strings("yarn_only_types"):
        if name != FULL:
            raise hf.error("yarn_only_types", name, FULL)

    def rope(kind: str, theta: float, factor: float) -> RopeConfig:
        changes: dict[str, Any] = {"rope_theta": theta, "partial_rotary_factor": factor}
        return read_rope(
            hf.with_values(**changes, **({} if kind == FULL else {"rope_scaling": None})), head_dim
        )

    return tuple(rope(*layer) for layer in zip(kinds, thetas, factors, strict=True))


def _num_heads(hf: HfKeys, kinds: tuple[str, ...], common: Common) -> tuple[int, ...]:
    """Returns query heads of each layer; keys and values are alike in all."""
    plain = common.num_heads
    other = hf.section("attention_other_setting")
    if other is None:
        sliding = hf.integer("num_sliding_attention_heads", default=plain)
        return tuple(sliding if kind == SLIDING else plain for kind in kinds)
    other.skip("true_head_dim")
    kv_heads = common.num_kv_heads
    for name, value in (("num_attention_groups", kv_heads), ("head_dim", common.head_dim)):
        if other.has(name) and other.integer(name) != value:
            raise other.error(name, other.integer(name), f"{value}, as in other layers")
    if other.string("attention_type", default=SLIDING) != SLIDING:
        raise other.error("attention_type", other.string("attention_type"), SLIDING)
    sliding = other.integer("num_attention_heads", default=plain)
    if sliding % kv_heads:
        raise other.error("num_attention_heads", sliding, f"a multiple of num_attention_groups ({kv_heads})")
    if other.unread:
        raise other.error(other.unread[0], "...", "keys of the heads of layers that slide")
    return tuple(sliding if kind == SLIDING else plain for kind in kinds)


def _moe_layers(hf: HfKeys, num_layers: int) -> frozenset[int]:
    """Returns `moe_layers_enum`, a list or a string with commas; by default all from the third."""
    listed = hf.value("moe_layers_enum")
    if hf.has("mlp_layer_types"):
        return listed_or_after_dense(hf, num_layers)
    if listed is None:
        return frozenset(range(min(_DENSE_LAYERS, num_layers), num_layers))
    items = listed.split(",") if isinstance(listed, str) else listed
    try:
        numbers = {int(item) for item in items if str(item).strip()}
    except (TypeError, ValueError):
        raise hf.error("moe_layers_enum", listed, "layers' numbers, separated by commas") from None
    return frozenset(number for number in numbers if 0 <= number < num_layers)


def _read_moe(hf: HfKeys, common: Common) -> MoE:
    router = RouterConfig(
        num_experts=hf.integer("moe_num_experts", "n_routed_experts"),
        top_k=hf.integer("moe_top_k", "num_experts_per_tok"),
        score="sigmoid",
        correction_bias=True,
        post="renormalize",
        scale=hf.number("moe_router_scaling_factor", default=1.0),
        float32_gate=hf.boolean("need_fp32_gate", default=True),
    )
    experts = Experts(hf.integer("moe_intermediate_size"), "silu_clamped")
    return common.moe(router, experts, hf.integer("share_expert_dim", "share_expert_dims"))


def clamp_limits(hf: HfKeys, name: str, num_layers: int) -> tuple[float, ...]:
    """Returns where each layer clamps gate and up, infinite where it does not (null or 0); no list: empty."""
    limits = []
    for value in _per_layer(hf, name, num_layers):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
            raise hf.error(name, value, f"{num_layers} numbers >= 0 or null")
        limits.append(float(value) if value else math.inf)
    return tuple(limits)


def clamped_ffns(
    common: Common,
    moe: MoE,
    moe_layers: Container[int],
    limits: Sequence[float],
    dense_limits: Sequence[float],
) -> list[FeedForward]:
    """Returns the feed-forward block of each layer where experts, and MLPs besides, clamp layer by layer."""

    def clamped(layer: int, limit: float, dense_limit: float) -> FeedForward:
        if layer not in moe_layers:
            return replace(common.dense(), limit=dense_limit)
        shared = None if moe.shared is None else replace(moe.shared, limit=dense_limit)
        return replace(moe, experts=replace(moe.experts, limit=limit), shared=shared)

    return [clamped(layer, *both) for layer, both in enumerate(zip(limits, dense_limits, strict=True))]


def read_step3p5(hf: HfKeys) -> ModelConfig:
    """Reads Step-3.5-Flash: each layer may have its own heads, window, rotary embedding and clamp."""
    hf.skip(*_HARMLESS)
    _check_fixed(hf)
    common = read_common(
        hf.with_values(
            num_key_value_heads=hf.integer("num_attention_groups", "num_key_value_heads"),
            rms_norm_eps=hf.number("rms_norm_eps", default=1e-5),
            max_position_embeddings=hf.integer("max_position_embeddings", "max_seq_len"),
        )
    )
    hf.refuse("mlp_bias")
    head_dim = common.head_dim
    if hf.number("query_pre_attn_scalar", default=head_dim) != head_dim:
        raise hf.error("query_pre_attn_scalar", hf.number("query_pre_attn_scalar"), f"head_dim ({head_dim})")
    num_layers = common.num_layers
    kinds = _per_layer(hf, "layer_types", num_layers) or (FULL,) * num_layers
    heads = _num_heads(hf, kinds, common)
    ropes = _ropes(hf, kinds, head_dim)
    norm, clamps_nowhere = RMSNorm(common.eps, one_plus_weight=True), (math.inf,) * num_layers
    attention = common.gqa(None, qk_norm=QkNorm(norm), gate=Gate("head"), output_bias=common.attention_bias)
    windows = read_windows(hf.with_values(layer_types=list(kinds)), num_layers)
    layers = zip(sliding(attention, windows), heads, ropes, strict=True)
    ffns = clamped_ffns(
        common,
        _read_moe(hf, common),
        _moe_layers(hf, num_layers),
        clamp_limits(hf, "swiglu_limits", num_layers) or clamps_nowhere,
        clamp_limits(hf, "swiglu_limits_shared", num_layers) or clamps_nowhere,
    )
    return common.model(
        [replace(layer, num_heads=count, rope=rope) for layer, count, rope in layers],
        ffns,
        norm=norm,
        num_mtp_layers=read_mtp_layers(hf, "num_nextn_predict_layers"),
    )


def read_step3p7(hf: HfKeys) -> ModelConfig:
    """Reads Step-3.7-Flash: the text model of Step-3.5 in `text_config`."""
    hf.skip(*_VISION)
    return read_step3p5(hf)


def _read_step_vision(hf: HfKeys, vision: HfKeys) -> VisionConfig:
    hidden_size = vision.integer("width", "hidden_size", default=1536)
    return VisionConfig(
        image_token_id=hf.integer("image_token_id", default=151679, minimum=0),
        merge_size=4,
        patch_size=vision.integer("patch_size", default=14),
        hidden_size=hidden_size,
        intermediate_size=int(hidden_size * vision.number("mlp_ratio", default=8960 / 1536)),
        tile_size=vision.integer("image_size", default=728),
    )


_TOWER, _BLOCK = "vision_model.", "vision_model.transformer.resblocks.*."
_LAYER = "vision_model.layers.*."
_TOWER_NAMES = (
    (_TOWER + "conv1.**", _TOWER + "embeddings.patch_embedding.**"),
    (_TOWER + "positional_embedding", _TOWER + "embeddings.position_embedding.weight"),
    (_TOWER + "ln_pre.**", _TOWER + "pre_layernorm.**"),
    (_TOWER + "vit_downsampler1.**", _TOWER + "downsampler1.**"),
    (_TOWER + "vit_downsampler2.**", _TOWER + "downsampler2.**"),
    (_BLOCK + "attn.in_proj_weight", _LAYER + "self_attn.in_proj_weight"),
    (_BLOCK + "attn.in_proj_bias", _LAYER + "self_attn.in_proj_bias"),
    (_BLOCK + "attn.out_proj.**", _LAYER + "self_attn.out_proj.**"),
    (_BLOCK + "ln_1.**", _LAYER + "layernorm_before.**"),
    (_BLOCK + "ln_2.**", _LAYER + "layernorm_after.**"),
    (_BLOCK + "ls_1.gamma", _LAYER + "lambda_1"),
    (_BLOCK + "ls_2.gamma", _LAYER + "lambda_2"),
    (_BLOCK + "mlp.c_fc.**", _LAYER + "mlp.fc1.**"),
    (_BLOCK + "mlp.c_proj.**", _LAYER + "mlp.fc2.**"),
    ("vit_large_projector.**", "multi_modal_projector.**"),
)
_STEP_VISION = VisionFamily(
    _read_step_vision,
    # NVIDIA's copies have all of it inside of `model`.
    tuple(rename(inside + stored, name) for inside in ("", "model.") for stored, name in _TOWER_NAMES),
    tower="Step3p7",
    processor="step",
    # All of an image is as many `<im_patch>` between the first two; crops of it come before that.
    tokens={
        "whole": "<im_start>",
        "end": "<im_end>",
        "tile_start": "<patch_start>",
        "tile_end": "<patch_end>",
        "between_rows": "<patch_newline>",
    },
)

# Of the published rotary scaling, in layers that see the whole context: half of a head rotates, and pairs of
# 1 to 32 turns within the original context are between those that keep their frequency and those that do not.
_ROTATED, _LOW, _HIGH, _ORIGINAL = 0.5, 1.0, 32.0, 131072


def _gguf_config(keys: MetadataKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Returns heads, windows and clamps by layer; llama.cpp rotates half a head unless layers slide."""
    count = config["num_hidden_layers"]
    slides = keys.listed("attention.sliding_window_pattern", count)
    heads, kv_heads = (keys.listed(f"attention.{name}", count) for name in ("head_count", "head_count_kv"))
    by_kind = {flag: {heads[i] for i in range(count) if slides[i] == flag} for flag in (0, 1)}
    if not by_kind[0] or max(map(len, by_kind.values())) > 1 or len(set(kv_heads)) > 1:
        allowed = "one number in layers that slide, one in the others, and the same KV heads in all"
        raise keys.error("attention.head_count", heads, allowed)
    keys.skip("rope.dimension_count", "leading_dense_block_count", "moe_every_n_layers")
    theta, sliding = config["rope_theta"], keys.get("rope.freq_base_swa")
    size = int(config["head_dim"] * _ROTATED)
    scaling = llama3_scaling(keys, size, theta, low=_LOW, high=_HIGH, original=_ORIGINAL)
    limits = {
        name: keys.numbers(key, count)
        for key, name in (
            ("swiglu_clamp_exp", "swiglu_limits"),
            ("swiglu_clamp_shexp", "swiglu_limits_shared"),
        )
    }
    plain = by_kind[0].pop()
    return {name: values for name, values in limits.items() if values} | {
        "num_attention_heads": plain,
        "num_key_value_heads": kv_heads[0],
        "attention_other_setting": {"num_attention_heads": by_kind[1].pop() if by_kind[1] else plain},
        "layer_types": [SLIDING if flag else FULL for flag in slides],
        "partial_rotary_factors": [1.0 if flag else _ROTATED for flag in slides],
        "rope_theta": [sliding if flag and sliding is not None else theta for flag in slides],
        "rope_scaling": scaling,
        "moe_layers_enum": keys.layers_with("ffn_gate_inp.weight"),
    }


_GGUF = GgufFamily(
    "step35",
    {
        "expert_count": "moe_num_experts",
        "expert_used_count": "moe_top_k",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "share_expert_dim",
        "expert_weights_scale": "moe_router_scaling_factor",
        "expert_weights_norm": "norm_expert_weight",
    },
    2,
    derive=_gguf_config,
    by_layer=("attention.head_count", "attention.head_count_kv"),
    rules=(
        *ONE_PLUS_WEIGHT_NORM_RULES,
        gguf_layer("ffn_norm.weight", "post_attention_layernorm.weight", "one_plus_weight"),
        *gguf_linear("attn_gate", "self_attn.g_proj"),
        # It is read as configuration.
        ROPE_FACTORS_RULE,
    ),
)

_LAYOUTS = ("stacked", "per_expert_step", "per_expert_step_old")
FAMILIES = (
    Family(
        "step3p7",
        read_step3p7,
        TensorNames(
            (
                drop("vision_model.**"),
                drop("vit_large_projector.**"),
                ROTARY,
                _GATE,
                _BIAS,
                _SHARED,
                *_NVIDIA,
            ),
            _LAYOUTS,
            mtp_layers=True,
        ),
        _STEP_VISION,
    ),
    Family(
        "step3p5",
        read_step3p5,
        TensorNames(
            (ROTARY, _GATE, _BIAS, _SHARED),
            _LAYOUTS,
            mtp_layers=True,
        ),
        gguf=(_GGUF,),
    ),
)
