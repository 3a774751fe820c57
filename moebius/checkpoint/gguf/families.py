"""GGUF architectures: which family each is, and how its metadata says what config.json says.

Keys are llama.cpp's, below the architecture's name. What a family's code decides and its config.json states,
but GGUF leaves to llama.cpp's code, is among the constants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moebius.checkpoint.gguf.linear_heads import linear_heads
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


def _indexed(keys: MetadataKeys, config: Config) -> Config:
    """Layers that choose tokens have an indexer; others take over what an earlier one chose."""
    count = config["num_hidden_layers"]
    name = "attention.indexer.types"
    keys.skip(name)
    listed = keys.model.value(name)
    if listed is not None and (not isinstance(listed, list) or len(listed) < count):
        raise keys.error(name, listed, f"true or false for each of {count} layers")
    own = keys.layers_with("indexer.attn_k.weight")
    full = [layer in own for layer in range(count)] if listed is None else listed[:count]
    return _latent(keys, config) | {"indexer_types": ["full" if one else "shared" for one in full]}


def _linear(keys: MetadataKeys, config: Config) -> Config:
    """Layers without softmax attention have a decay."""
    heads = linear_heads(keys.model)
    keys.skip("full_attention_interval", "ssm.inner_size")
    own = keys.layers_with("ssm_a")
    kinds = [
        "linear_attention" if layer in own else "full_attention"
        for layer in range(config["num_hidden_layers"])
    ]
    return _rotated(keys, config) | {"layer_types": kinds, "linear_value_head_dim": heads.value_dim}


def _linear_of_three(keys: MetadataKeys, config: Config) -> Config:
    """The same with positions in time, height and width; files have room for a fourth part."""
    found, name = _linear(keys, config), "rope.dimension_sections"
    keys.skip(name)
    listed = keys.model.value(name)
    if listed is None:
        return found
    if not isinstance(listed, list) or len(listed) not in (3, 4) or any(listed[3:]):
        raise keys.error(name, listed, "three numbers, or a zero behind them")
    sections = {"mrope_section": listed[:3]}
    if "rope_scaling" in config:
        return found | {"rope_scaling": config["rope_scaling"] | sections}
    return found | sections


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
_LINEAR_KEYS = _SPARSE | {
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_INDEXED_KEYS = _MLA_KEYS | {
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
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
    "glm-dsa": _always(GgufFamily("glm_moe_dsa", _INDEXED_KEYS, 2, derive=_indexed, yarn=_deepseek_yarn)),
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
    # These two without their vision towers, which are files of another kind.
    "qwen35moe": _always(
        GgufFamily("qwen3_5_moe_text", _LINEAR_KEYS, 1, {"norm_topk_prob": True}, _linear_of_three)
    ),
    "qwen3moe": _always(GgufFamily("qwen3_moe", _SPARSE, 1, {"norm_topk_prob": True}, _rotated)),
    "qwen3next": _always(GgufFamily("qwen3_next", _LINEAR_KEYS, 1, {"norm_topk_prob": True}, _linear)),
    "qwen3vlmoe": _always(GgufFamily("qwen3_moe", _SPARSE, 1, {"norm_topk_prob": True}, _qwen3_vl)),
}
