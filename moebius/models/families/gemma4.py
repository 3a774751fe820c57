"""Gemma 4 (26B-A4B): heads of two sizes, windows, experts next to each layer's MLP, GELU, many norms.

Sources: the published config.json and, for the function that its keys ask for, transformers 5.23
(Gemma4TextConfig).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moebius.checkpoint.gguf.family import ROPE_FACTORS_RULE, SPARSE_KEYS, GgufFamily
from moebius.checkpoint.gguf.names import gguf_layer, gguf_linear
from moebius.models.common import FULL, SLIDING, Common, every_nth_full, read_common, read_windows
from moebius.models.config import ModelConfig, VisionConfig
from moebius.models.family import Family, VisionFamily
from moebius.models.keys import HfKeys
from moebius.models.layers.ffn import Experts, NormedMoE
from moebius.models.layers.gqa import QkNorm
from moebius.models.layers.residual import Sequential
from moebius.models.layers.rope import RopeConfig
from moebius.models.layers.router import RouterConfig
from moebius.models.names import ROTARY, TensorNames, drop, rename
from moebius.models.rope import read_rope

if TYPE_CHECKING:
    # Few processes need the package that knows the format's types.
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

# Frequencies that are divided by more than this do not rotate.
_NEVER = 1e29
_GELU = "gelu_pytorch_tanh"
_ROPES: dict[str, dict[str, Any]] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
# Of audio, of tokens that are not used here, and of embeddings by layer, which models with experts have not.
_HARMLESS = (
    "audio_config",
    "audio_token_id",
    "boa_token_id",
    "eoa_token_id",
    "eoa_token_index",
    "vision_soft_tokens_per_image",
    "vocab_size_per_layer_input",
)


def _full_sizes(hf: HfKeys, common: Common) -> tuple[int, int]:
    """KV heads and elements of a head in layers that see the whole context.

    Keys of their own, or as transformers writes them: an entry for each such layer, with what differs
    from the other layers.
    """
    by_layer = hf.section("per_layer_config")
    head_dim = hf.integer("global_head_dim", default=512)
    kv_heads = hf.integer("num_global_key_value_heads", default=common.num_kv_heads)
    if by_layer is not None:
        head_dim, kv_heads = common.head_dim, common.num_kv_heads
        for name in by_layer.unread[:1]:
            entry = by_layer.section(name)
            assert entry is not None, "it is among the keys"
            head_dim = entry.integer("head_dim", default=head_dim)
            kv_heads = entry.integer("num_key_value_heads", default=kv_heads)
    elif not hf.boolean("attention_k_eq_v", default=False):
        kv_heads = common.num_kv_heads
    if common.num_heads % kv_heads:
        allowed = f"a divisor of num_attention_heads ({common.num_heads})"
        raise hf.error("num_global_key_value_heads", kv_heads, allowed)
    return kv_heads, head_dim


def _rope(hf: HfKeys, kind: str, head_dim: int) -> RopeConfig:
    by_kind = hf.section("rope_parameters")
    own = by_kind.value(kind) if by_kind is not None and by_kind.has(kind) else None
    return read_rope(hf.with_values(rope_parameters=own or _ROPES[kind]), head_dim)


def _read_moe(hf: HfKeys, common: Common) -> NormedMoE:
    """Returns the experts in every layer; its MLP counts as the experts that are always active."""
    if not hf.boolean("enable_moe_block", default=False):
        raise hf.error("enable_moe_block", False, "true: only models with experts are served")
    router = RouterConfig(
        num_experts=hf.integer("num_experts"),
        top_k=hf.integer("top_k_experts", "num_experts_per_tok"),
        score="softmax",
        post="renormalize",
        expert_scales=True,
    )
    return NormedMoE(
        router=router,
        experts=Experts(hf.integer("moe_intermediate_size"), "gelu_tanh"),
        shared=common.dense(),
        norm=common.norm,
        router_eps=common.eps,
    )


def read_gemma4_text(hf: HfKeys) -> ModelConfig:
    """Layers that see the whole context have larger heads, and keys for values with `attention_k_eq_v`."""
    hf.skip(*_HARMLESS)
    for name in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        hf.refuse(name, 0)
    hf.refuse("use_double_wide_mlp")
    # Attention between the tokens of an image is read with its tower.
    hf.refuse("use_bidirectional_attention", "vision")
    activation = hf.string("hidden_activation", default=_GELU)
    if activation != _GELU:
        raise hf.error("hidden_activation", activation, _GELU)
    common = read_common(hf.with_values(final_logit_softcapping=None, hidden_act=None), tied=True)
    common = replace(common, activation=_GELU)
    num_layers = common.num_layers
    kinds = list(hf.strings("layer_types")) or every_nth_full(num_layers, 6)
    kinds[-1] = FULL
    windows = read_windows(hf.with_values(layer_types=kinds), num_layers)
    sizes = {SLIDING: (common.num_kv_heads, common.head_dim), FULL: _full_sizes(hf, common)}
    ropes = {kind: _rope(hf, kind, sizes[kind][1]) for kind in sizes}
    shared = hf.boolean("attention_k_eq_v", default=False)
    by_kind = {
        kind: common.gqa(
            ropes[kind],
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=1.0,
            output_bias=common.attention_bias,
            qk_norm=QkNorm(common.norm),
            value_norm=True,
            keys_are_values=shared and kind == FULL,
        )
        for kind, (kv_heads, head_dim) in sizes.items()
    }
    capped = hf.has("final_logit_softcapping")
    return common.model(
        [replace(by_kind[kind], sight=window) for kind, window in zip(kinds, windows, strict=True)],
        _read_moe(hf, common),
        residuals=Sequential(normed_output="both", learned_scale=True),
        embedding_scale=math.sqrt(common.hidden_size),
        # So the models were trained, in bfloat16.
        rounds_embedding_scale=True,
        final_logit_softcap=hf.number("final_logit_softcapping") if capped else 0.0,
    )


def read_gemma4(hf: HfKeys) -> ModelConfig:
    """Returns the text model of `text_config`."""
    return read_gemma4_text(hf)


def _read_gemma4_vision(hf: HfKeys, vision: HfKeys) -> VisionConfig:
    return VisionConfig(
        image_token_id=hf.integer("image_token_id", minimum=0),
        merge_size=vision.integer("pooling_kernel_size", default=3),
        patch_size=vision.integer("patch_size", default=16),
        hidden_size=vision.integer("hidden_size", default=768),
        intermediate_size=vision.integer("intermediate_size", default=3072),
        start_token_id=hf.integer("boi_token_id", minimum=0),
        end_token_id=hf.integer("eoi_token_id", "eoi_token_index", minimum=0),
        sees_ahead=hf.value("use_bidirectional_attention") == "vision",
    )


# Published names below a layer, and those here.
_NAMES = (
    ("post_attention_layernorm.**", "post_self_attn_layernorm.**"),
    ("pre_feedforward_layernorm.**", "post_attention_layernorm.**"),
    ("post_feedforward_layernorm.**", "post_mlp_layernorm.**"),
    ("post_feedforward_layernorm_1.**", "mlp.dense_norm.**"),
    ("post_feedforward_layernorm_2.**", "mlp.output_norm.**"),
    ("pre_feedforward_layernorm_2.**", "mlp.input_norm.**"),
    ("router.scale", "mlp.router_norm.weight"),
    ("router.proj.**", "mlp.gate.**"),
    ("router.per_expert_scale", "mlp.gate.expert_scales"),
    ("mlp.**", "mlp.shared_experts.**"),
)


def _names(prefix: str) -> TensorNames:
    layers = (rename(f"{prefix}layers.*.{theirs}", f"model.layers.*.{ours}") for theirs, ours in _NAMES)
    towers = ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
    text = rename(f"{prefix}**", "model.**")
    rules = (ROTARY, *(drop(f"model.{tower}.**") for tower in towers), *layers, text)
    return TensorNames(rules, ("fused_in_layer", "per_expert_beside"))


_VISION = VisionFamily(
    _read_gemma4_vision,
    (
        rename("model.vision_tower.**", "vision_tower.**"),
        rename("model.embed_vision.**", "embed_vision.**"),
    ),
    tower="Gemma4",
    processor="gemma4",
)


def _rotated(keys: MetadataKeys) -> float:
    """Returns the part of a head that layers with the whole context rotate; the rest is divided away."""
    factors = keys.floats("rope_freqs.weight")
    if factors is None:
        return 1.0
    rotated = int((factors == 1).sum())
    if not (factors[:rotated] == 1).all() or not (factors[rotated:] > _NEVER).all():
        raise keys.error("rope_freqs.weight", factors.tolist(), f"1, then numbers above {_NEVER:g}")
    return rotated / len(factors)


def _gguf_config(keys: MetadataKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the sizes of heads by kind of layer; both kinds of rotation."""
    layers = range(config["num_hidden_layers"])
    slides = keys.listed("attention.sliding_window_pattern", len(layers))
    heads = keys.listed("attention.head_count_kv", len(layers))
    by_kind = {flag: [heads[i] for i in layers if slides[i] == flag] or heads for flag in (0, 1)}
    for counts in by_kind.values():
        if len(set(counts)) != 1:
            raise keys.error("attention.head_count_kv", heads, "the same for all layers of a kind")
    full = [i for i in layers if not slides[i]]
    own = [i for i in full if i in keys.layers_with("attn_v.weight")]
    if own and own != full:
        raise keys.error("attn_v.weight", own, "in all layers that see the whole context, or in none")
    head = keys.integer("attention.key_length_swa")
    if keys.integer("rope.dimension_count_swa", head) != head:
        raise keys.error("rope.dimension_count_swa", keys.get("rope.dimension_count_swa"), str(head))
    keys.skip("attention.value_length_swa", "rope.dimension_count")
    theta = {FULL: config.pop("rope_theta"), SLIDING: keys.get("rope.freq_base_swa") or 1e4}
    ropes = {kind: dict(_ROPES[kind]) | {"rope_theta": theta[kind]} for kind in theta}
    ropes[FULL]["partial_rotary_factor"] = _rotated(keys)
    return {
        "layer_types": [SLIDING if flag else FULL for flag in slides],
        "num_key_value_heads": by_kind[1][0],
        "num_global_key_value_heads": by_kind[0][0],
        "attention_k_eq_v": not own,
        "global_head_dim": config["head_dim"],
        "head_dim": head,
        "rope_parameters": ropes,
    }


_GGUF = GgufFamily(
    "gemma4",
    SPARSE_KEYS
    | {
        "attention.shared_kv_layers": "num_kv_shared_layers",
        "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    1,
    {"enable_moe_block": True},
    _gguf_config,
    by_layer=("attention.head_count_kv",),
    rules=(
        # What is read as configuration.
        ROPE_FACTORS_RULE,
        *gguf_linear("ffn_norm", "pre_feedforward_layernorm"),
        *gguf_linear("post_ffw_norm", "post_feedforward_layernorm"),
        *gguf_linear("post_ffw_norm_1", "post_feedforward_layernorm_1"),
        *gguf_linear("post_ffw_norm_2", "post_feedforward_layernorm_2"),
        *gguf_linear("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
        *gguf_linear("ffn_gate_inp", "router.proj"),
        gguf_layer("ffn_gate_inp.scale", "router.scale"),
        gguf_layer("ffn_down_exps.scale", "router.per_expert_scale"),
        gguf_layer("layer_output_scale.weight", "layer_scalar"),
    ),
)

FAMILIES = (
    Family("gemma4_text", read_gemma4_text, _names("model."), gguf=(_GGUF,), overflows_float16=True),
    Family("gemma4", read_gemma4, _names("model.language_model."), _VISION, overflows_float16=True),
)
