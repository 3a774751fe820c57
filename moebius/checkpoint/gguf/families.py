"""GGUF architectures: which family each is, and how its metadata says what config.json says.

Keys are llama.cpp's, below the architecture's name. What a family's code decides and its config.json states,
but GGUF leaves to llama.cpp's code, is among the constants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

Config = dict[str, Any]


def _nothing(keys: MetadataKeys, config: Config) -> Config:
    return {}


def _plain_yarn(keys: MetadataKeys) -> Config:
    return {}


@dataclass(frozen=True)
class GgufFamily:
    """One row of the table."""

    model_type: str
    # Key below the architecture's name -> key of config.json, besides `COMMON_KEYS`.
    keys: Mapping[str, str]
    # expert_gating_func of the family: 1 softmax, 2 sigmoid, 3 softmax over the chosen.
    gating: int
    # What the family's code decides.
    constants: Config = field(default_factory=dict)
    # What follows from several keys, or from which tensors there are; given the config so far.
    derive: Callable[[MetadataKeys, Config], Config] = _nothing
    # Numbers of YaRN that the family has besides the common ones.
    yarn: Callable[[MetadataKeys], Config] = _plain_yarn


COMMON_KEYS: Mapping[str, str] = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "expert_used_count": "num_experts_per_tok",
    "rope.freq_base": "rope_theta",
}
# Sizes that follow from others or from tensors, and hints for other engines.
HARMLESS_KEYS = (
    "attention.value_length",
    "expert_count",
    "rope.scaling.finetuned",
    "vocab_size",
)
_SPARSE = {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"}
# Experts are as wide as `intermediate_size` says.
_ALL_SPARSE = {"expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size"}
_DEEPSEEK = {
    "expert_count": "n_routed_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
_ROUTER = "ffn_gate_inp.weight"


def _rotated(keys: MetadataKeys, config: Config) -> Config:
    """The part of a head that is rotated; without a key all of it."""
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {"partial_rotary_factor": keys.integer("rope.dimension_count", head) / head}


def _qwen3_vl(keys: MetadataKeys, config: Config) -> Config:
    # Of images alone: a token of text has the same position on all axes.
    keys.skip("rope.dimension_sections", "n_deepstack_layers")
    return _rotated(keys, config)


def _qwen2(keys: MetadataKeys, config: Config) -> Config:
    # The family spells its bias otherwise; the general key would be one on the output projection.
    return _rotated(keys, config) | {"qkv_bias": config["attention_bias"], "attention_bias": False}


def _grouped(keys: MetadataKeys) -> Config:
    """DeepSeek's groups of experts; a file without them has one."""
    return {
        "n_group": keys.integer("expert_group_count", 0) or 1,
        "topk_group": keys.integer("expert_group_used_count", 0) or 1,
        "norm_topk_prob": bool(keys.get("expert_weights_norm")),
    }


def _glm(keys: MetadataKeys, config: Config) -> Config:
    has_norm = bool(keys.layers_with("attn_q_norm.weight"))
    return _rotated(keys, config) | _grouped(keys) | {"use_qk_norm": has_norm}


def _dots(keys: MetadataKeys, config: Config) -> Config:
    return _rotated(keys, config) | _grouped(keys)


def _ernie(keys: MetadataKeys, config: Config) -> Config:
    keys.skip("expert_shared_feed_forward_length")
    moe = keys.layers_with(_ROUTER)
    return _rotated(keys, config) | {"moe_layer_end_index": moe[-1] if moe else -1}


def _latent(keys: MetadataKeys, config: Config) -> Config:
    """Newer files give the sizes of a head before its latent form under names of their own."""
    rope = keys.integer("rope.dimension_count")
    query = keys.integer("attention.key_length_mla", keys.integer("attention.key_length"))
    value = keys.integer("attention.value_length_mla", keys.integer("attention.value_length"))
    return _grouped(keys) | {
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rope,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": query - rope,
        "v_head_dim": value,
    }


def _latent_v2(keys: MetadataKeys, config: Config) -> Config:
    found = _latent(keys, config)
    return found | {"topk_method": "group_limited_greedy" if found["n_group"] > 1 else "greedy"}


def _deepseek_yarn(keys: MetadataKeys) -> Config:
    """The files have a tenth of the temperature's exponent; both of its uses are the same in all models."""
    tenth = keys.get("rope.scaling.yarn_log_multiplier")
    if not tenth:
        return {}
    mscale = round(tenth * 10, 6)
    return {"mscale": mscale, "mscale_all_dim": mscale}


def _gpt_oss_yarn(keys: MetadataKeys) -> Config:
    # The published model has fractional bounds between its kinds of frequencies.
    return {"truncate": False}


_MLA_KEYS = _DEEPSEEK | {
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
}
_DEEPSEEK_V2 = GgufFamily("deepseek_v2", _MLA_KEYS, 1, derive=_latent_v2, yarn=_deepseek_yarn)
_DEEPSEEK_V3 = GgufFamily("deepseek_v3", _MLA_KEYS, 2, derive=_latent, yarn=_deepseek_yarn)


def _always(family: GgufFamily) -> Callable[[MetadataKeys], GgufFamily]:
    return lambda keys: family


def _deepseek2(keys: MetadataKeys) -> GgufFamily:
    """DeepSeek-V2 by its softmax; V3, Kimi-K2 and GLM-4.7-Flash by their sigmoid."""
    return _DEEPSEEK_V3 if keys.get("expert_gating_func") == _DEEPSEEK_V3.gating else _DEEPSEEK_V2


FAMILIES: Mapping[str, Callable[[MetadataKeys], GgufFamily]] = {
    "deepseek2": _deepseek2,
    "dots1": _always(GgufFamily("dots1", _DEEPSEEK, 2, derive=_dots)),
    "ernie4_5-moe": _always(
        GgufFamily(
            "ernie4_5_moe",
            {
                "expert_count": "moe_num_experts",
                "expert_feed_forward_length": "moe_intermediate_size",
                "expert_shared_count": "moe_num_shared_experts",
                "interleave_moe_layer_step": "moe_layer_interval",
                "leading_dense_block_count": "moe_layer_start_index",
            },
            1,
            derive=_ernie,
        )
    ),
    "glm4moe": _always(GgufFamily("glm4_moe", _DEEPSEEK, 2, derive=_glm)),
    "gpt-oss": _always(GgufFamily("gpt_oss", _ALL_SPARSE, 3, derive=_rotated, yarn=_gpt_oss_yarn)),
    "llama": _always(GgufFamily("mixtral", _ALL_SPARSE, 1, derive=_rotated)),
    "minimax-m2": _always(GgufFamily("minimax_m2", _ALL_SPARSE, 2, derive=_rotated)),
    "olmoe": _always(GgufFamily("olmoe", _ALL_SPARSE, 1, {"norm_topk_prob": False}, _rotated)),
    "qwen2moe": _always(
        GgufFamily(
            "qwen2_moe",
            _SPARSE | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
            1,
            {"norm_topk_prob": False},
            _qwen2,
        )
    ),
    "qwen3moe": _always(GgufFamily("qwen3_moe", _SPARSE, 1, {"norm_topk_prob": True}, _rotated)),
    # Without its vision tower, which is a file of another kind.
    "qwen3vlmoe": _always(GgufFamily("qwen3_moe", _SPARSE, 1, {"norm_topk_prob": True}, _qwen3_vl)),
}
