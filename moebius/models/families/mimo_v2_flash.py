"""MiMo-V2-Flash: values shorter than keys; where it slides sinks, twice the KV heads, another rotation.

Sources: the published config.json and, for the function that its keys ask for, transformers 5.23
(MiMoV2FlashConfig), which spells windows, dense layers and rotation by layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moebius.checkpoint.gguf.family import GgufFamily
from moebius.models.common import (
    FULL,
    SLIDING,
    Common,
    listed_or_after_dense,
    read_biased_router,
    read_common,
    read_flags,
    read_mtp_layers,
    read_windows,
    sliding,
)
from moebius.models.config import ModelConfig
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.rope import RopeConfig
from moebius.models.names import ROTARY, TensorNames, drop, rename
from moebius.models.rope import read_layer_ropes, read_rope

if TYPE_CHECKING:
    # Few processes need the package that knows the format's types.
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

# Part of a head that is rotated where a checkpoint does not say.
_ROTATED = 0.334
_ROPES = {FULL: (5e6, _ROTATED), SLIDING: (1e4, _ROTATED)}
# Of layers that slide: keys whose values are those of all layers, or follow from them.
_SAME = {
    "swa_num_attention_heads": "num_attention_heads",
    "swa_head_dim": "head_dim",
    "swa_v_head_dim": "v_head_dim",
}


def _kinds(hf: HfKeys, num_layers: int) -> list[str]:
    """Returns kinds as listed or by the published pattern; by default the first and every sixth see all."""
    listed = list(hf.strings("layer_types"))
    if hf.has("hybrid_layer_pattern") and not listed:
        flags = read_flags(hf, "hybrid_layer_pattern", num_layers)
        return [SLIDING if slides else FULL for slides in flags]
    return listed or [FULL if i == 0 or (i + 1) % 6 == 0 else SLIDING for i in range(num_layers)]


def _moe_layers(hf: HfKeys, num_layers: int) -> frozenset[int]:
    if hf.has("moe_layer_freq") and not hf.has("mlp_layer_types"):
        return frozenset(i for i, moe in enumerate(read_flags(hf, "moe_layer_freq", num_layers)) if moe)
    return listed_or_after_dense(hf, num_layers, 1)


def _ropes(hf: HfKeys, kinds: list[str], head_dim: int) -> tuple[RopeConfig, ...]:
    if hf.has("rope_parameters") or not hf.has("rope_theta"):
        hf.skip("swa_rope_theta")  # which transformers writes again
        return read_layer_ropes(hf, kinds, head_dim, _ROPES)
    thetas = {FULL: hf.number("rope_theta"), SLIDING: hf.number("swa_rope_theta", default=1e4)}
    by_kind = {
        kind: read_rope(hf.with_values(rope_theta=theta), head_dim, default_partial_factor=_ROTATED)
        for kind, theta in thetas.items()
    }
    return tuple(by_kind[kind] for kind in kinds)


def _kv_heads(hf: HfKeys, kinds: list[str], common: Common) -> tuple[int, ...]:
    """Layers that slide have twice as many; a checkpoint can only confirm it."""
    plain = common.num_kv_heads
    sliding = hf.integer("swa_num_key_value_heads", default=2 * plain)
    if sliding != 2 * plain or common.num_heads % sliding:
        raise hf.error("swa_num_key_value_heads", sliding, f"2 x num_key_value_heads ({2 * plain})")
    return tuple(sliding if kind == SLIDING else plain for kind in kinds)


def read_mimo_v2_flash(hf: HfKeys) -> ModelConfig:
    """Windows, sinks, KV heads and rotation by layer; the first is dense unless a list says otherwise."""
    hf.refuse("n_shared_experts", 0)
    hf.refuse("scoring_func", "sigmoid")
    hf.refuse("topk_method", "noaux_tc")
    hf.refuse("add_full_attention_sink_bias")
    if not hf.boolean("add_swa_attention_sink_bias", default=True):
        raise hf.error("add_swa_attention_sink_bias", False, "true")
    # Says the window again.
    hf.skip("attention_chunk_size")
    for name, other in _SAME.items():
        if hf.has(name) and hf.integer(name) != hf.integer(other):
            raise hf.error(name, hf.integer(name), f"{other} ({hf.integer(other)})")
    common = read_common(
        hf.with_values(
            attention_chunk_size=None,
            rms_norm_eps=hf.number("rms_norm_eps", "layernorm_epsilon", default=1e-5),
        )
    )
    unscaled = hf.is_null("attention_value_scale")
    num_layers, value_dim = common.num_layers, hf.integer("v_head_dim", default=128)
    if value_dim > common.head_dim:
        raise hf.error("v_head_dim", value_dim, f"at most head_dim ({common.head_dim})")
    kinds = _kinds(hf, num_layers)
    windows = hf.with_values(layer_types=kinds)
    if hf.has("sliding_window_size"):
        # Counts the positions before a query's own.
        windows = windows.with_values(sliding_window=hf.integer("sliding_window_size") + 1)
    heads, ropes = _kv_heads(hf, kinds, common), _ropes(hf, kinds, common.head_dim)
    attention = common.gqa(
        None,
        value_dim=value_dim,
        value_scale=1.0 if unscaled else hf.number("attention_value_scale", default=0.707),
    )
    layers = zip(sliding(attention, read_windows(windows, num_layers)), kinds, heads, ropes, strict=True)
    moe = common.moe(read_biased_router(hf), hf.integer("moe_intermediate_size"))
    return common.model(
        [
            replace(layer, rope=rope, num_kv_heads=kv_heads, has_sinks=kind == SLIDING)
            for layer, kind, kv_heads, rope in layers
        ],
        common.ffns(moe, _moe_layers(hf, num_layers)),
        num_mtp_layers=read_mtp_layers(hf),
    )


def _gguf_config(keys: MetadataKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Returns windows and KV heads by layer; layers without a router are dense."""
    layers = range(config["num_hidden_layers"])
    slides = keys.listed("attention.sliding_window_pattern", len(layers))
    heads = keys.listed("attention.head_count_kv", len(layers))
    plain = heads[slides.index(0)] if 0 in slides else heads[0] // 2
    if heads != [2 * plain if flag else plain for flag in slides]:
        raise keys.error("attention.head_count_kv", heads, "twice as many in layers that slide")
    sparse = keys.layers_with("ffn_gate_inp.weight")
    theta, scale = keys.get("rope.freq_base_swa"), keys.get("attention.value_scale")
    # Files made before converters wrote it are of MiMo-V2-Flash.
    scaled = {} if scale is None else {"attention_value_scale": scale}
    return scaled | {
        "hybrid_layer_pattern": slides,
        "num_key_value_heads": plain,
        "moe_layer_freq": [int(i in sparse) for i in layers],
        "swa_rope_theta": 1e4 if theta is None else theta,
        "partial_rotary_factor": keys.integer("rope.dimension_count") / config["head_dim"],
    }


FAMILIES = (
    Family(
        "mimo_v2_flash",
        read_mimo_v2_flash,
        TensorNames(
            (
                ROTARY,
                drop("model.mtp.**"),
                rename("model.layers.*.self_attn.attention_sink_bias", "model.layers.*.self_attn.sinks"),
            ),
            # As GGUF files have them.
            mtp_layers=True,
        ),
        gguf=(
            GgufFamily(
                "mimo2",
                {
                    "expert_count": "n_routed_experts",
                    "expert_feed_forward_length": "moe_intermediate_size",
                    "attention.value_length": "v_head_dim",
                    "expert_weights_norm": "norm_topk_prob",
                },
                2,
                {"n_group": 1, "topk_group": 1, "norm_topk_prob": True},
                _gguf_config,
                by_layer=("attention.head_count_kv",),
            ),
        ),
    ),
)
