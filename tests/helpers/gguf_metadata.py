"""Metadata of GGUF files as llama.cpp's converters write it, from configurations of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from gguf import ExpertGatingFuncType, GGUFValueType, GGUFWriter, RopeScalingType

from moebius.models.layers.ngrams import NGramConfig, hash_factors, hash_primes
from tests.helpers.gguf_newer import (
    ARCHITECTURES_OF_TODAY,
    write_heads,
    write_indexer,
    write_latent,
    write_newer,
    write_windows,
)

# Names in gguf.MODEL_ARCH.
ARCHITECTURES = {
    "afmoe": "AFMOE",
    "deepseek_v2": "DEEPSEEK2",
    "deepseek_v3": "DEEPSEEK2",
    "dots1": "DOTS1",
    "ernie4_5_moe": "ERNIE4_5_MOE",
    "exaone_moe": "EXAONE_MOE",
    "gemma4_text": "GEMMA4",
    "glm4_moe": "GLM4_MOE",
    "glm_moe_dsa": "GLM_DSA",
    "gpt_oss": "GPT_OSS",
    "granitemoehybrid": "GRANITE_HYBRID",
    "jamba": "JAMBA",
    "kimi_linear": "KIMI_LINEAR",
    "lfm2_moe": "LFM2MOE",
    "hunyuan_v1_moe": "HUNYUAN_MOE",
    "llama4_text": "LLAMA4",
    "mimo_v2_flash": "MIMO2",
    "mistral4": "MISTRAL4",
    "minimax_m2": "MINIMAXM2",
    "mixtral": "LLAMA",
    "nemotron_h": "NEMOTRON_H_MOE",
    "olmoe": "OLMOE",
    "qwen2_moe": "QWEN2MOE",
    "qwen3_5_moe_text": "QWEN35MOE",
    "qwen3_moe": "QWEN3MOE",
    "qwen3_next": "QWEN3NEXT",
    "step3p5": "STEP35",
    "llama": "LLAMA",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
}
DENSE = ("llama", "qwen2", "qwen3")
# Architectures that the package does not know, here with the one whose names it has for most tensors.
NEWER = {"qwen4_exp_text": "qwen4exp"}
ARCHITECTURES["qwen4_exp_text"] = "QWEN35MOE"
NEWER |= ARCHITECTURES_OF_TODAY
_SIGMOID = ("afmoe", "deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "glm_moe_dsa", "minimax_m2")
_LATENT = ("deepseek_v2", "deepseek_v3", "glm_moe_dsa", "mistral4")
LINEAR = ("qwen3_5_moe_text", "qwen3_next", "qwen4_exp_text")
MAMBA2 = ("granitemoehybrid", "nemotron_h")


def write_metadata(
    writer: GGUFWriter, config: Any, *, latent_split: bool, prediction_layers: int = 0
) -> None:
    """All keys that the family's converter would write."""
    kind = config.model_type
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers + prediction_layers)
    if prediction_layers:
        writer.add_nextn_predict_layers(prediction_layers)
    if getattr(config, "intermediate_size", None) is not None:
        writer.add_feed_forward_length(config.intermediate_size)
    if kind != "step3p5":
        writer.add_head_count(config.num_attention_heads)
    eps = {"nemotron_h": "layer_norm_epsilon", "lfm2_moe": "norm_eps"}.get(kind, "rms_norm_eps")
    if getattr(config, eps) is not None:
        writer.add_layer_norm_rms_eps(getattr(config, eps))
    chosen = "top_k_experts" if kind == "gemma4_text" else "num_experts_per_tok"
    if kind not in DENSE:
        writer.add_expert_used_count(getattr(config, chosen))
    writer.add_file_type(0)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)
    if kind in ARCHITECTURES_OF_TODAY:
        write_newer(writer, config)
        return
    if kind in _SIGMOID:
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if kind in MAMBA2:
        write_mamba2(writer, config)
        return
    if kind == "kimi_linear":
        write_latent(writer, config, latent_split)
        writer.add_head_count_kv(_by_layer(config, "full_attention", 1))
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_kda_head_dim(config.linear_head_dim)
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(1)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        return
    if kind == "jamba":
        writer.add_head_count_kv(_by_layer(config, "full_attention", config.num_key_value_heads))
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_time_step_rank(config.mamba_dt_rank)
        writer.add_expert_count(config.num_experts)
        return
    if kind == "lfm2_moe":
        writer.add_head_count_kv(_by_layer(config, "full_attention", config.num_key_value_heads))
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_vocab_size(config.vocab_size)
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_expert_count(config.num_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        return
    if kind == "gemma4_text":
        _write_gemma4(writer, config)
        return
    if kind == "llama4_text":
        _write_llama4(writer, config)
        return
    if kind == "mimo_v2_flash":
        _write_mimo2(writer, config)
        return
    if kind == "step3p5":
        _write_step35(writer, config)
        return
    _write_rope(writer, config)
    if kind not in DENSE:
        _write_experts(writer, config)
    if kind in _LATENT:
        write_latent(writer, config, latent_split)
        if kind == "glm_moe_dsa":
            _write_indexer(writer, config, latent_split)
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if config.rope_parameters["rope_type"] == "llama3":
        _write_rope_factors(writer, config.rope_parameters, head_dim, head_dim)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if kind in LINEAR:
        _write_linear(writer, config)
    if kind == "qwen4_exp_text":
        _write_streams_and_ngrams(writer, config)
    if kind in ("glm4_moe", "minimax_m2", *LINEAR):
        partial = config.rope_parameters.get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(head_dim * partial))


def _slides(config: Any) -> list[bool]:
    return [kind == "sliding_attention" for kind in config.layer_types]


def _write_gemma4(writer: GGUFWriter, config: Any) -> None:
    """Heads and rotation of layers that slide have keys of their own; "proportional" rotation is a tensor."""
    config = SimpleNamespace(**config.to_dict())
    full, sliding = (config.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
    # Transformers has what differs by layer; what layers that see everything have is the same in all of them.
    own = next(iter(config.per_layer_config.values()))
    kv_heads, head_dim = own.get("num_key_value_heads", config.num_key_value_heads), own["head_dim"]
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_rope_freq_base_swa(sliding["rope_theta"])
    writer.add_expert_count(config.num_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    write_windows(writer, config)
    writer.add_head_count_kv(
        [config.num_key_value_heads if slides else kv_heads for slides in _slides(config)]
    )
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(0)
    for add, size in (
        (writer.add_key_length, head_dim),
        (writer.add_value_length, head_dim),
        (writer.add_key_length_swa, config.head_dim),
        (writer.add_value_length_swa, config.head_dim),
        (writer.add_rope_dimension_count, head_dim),
        (writer.add_rope_dimension_count_swa, config.head_dim),
    ):
        add(size)
    if config.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    rotated = int(head_dim * full["partial_rotary_factor"] / 2)
    factors = np.full(head_dim // 2, 1e30, np.float32)
    factors[:rotated] = 1
    writer.add_tensor("rope_freqs.weight", factors)


def _write_llama4(writer: GGUFWriter, config: Any) -> None:
    """Replaces the width that was written: it is that of dense layers. Scaled rotation is a tensor."""
    rope, head_dim = config.rope_parameters, config.head_dim
    writer.add_feed_forward_length(config.intermediate_size_mlp)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    write_heads(writer, config)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    if rope["rope_type"] == "llama3":
        waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
        factors = np.where(waves < rope["original_max_position_embeddings"], 1, rope["factor"])
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))


def _write_mimo2(writer: GGUFWriter, config: Any) -> None:
    full, sliding = (config.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
    heads = config.num_key_value_heads
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_rope_freq_base_swa(sliding["rope_theta"])
    writer.add_rope_dimension_count(int(config.head_dim * full["partial_rotary_factor"]))
    writer.add_head_count_kv([2 * heads if slides else heads for slides in _slides(config)])
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(list(map(int, _slides(config))))
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.v_head_dim)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_float32(f"{writer.arch}.attention.value_scale", config.attention_value_scale)


def _write_step35(writer: GGUFWriter, config: Any) -> None:
    """Heads and clamps of each layer; the scaling of layers that see everything is a tensor."""
    full, sliding = (config.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
    slides = _slides(config)
    writer.add_head_count([layer.num_attention_heads for layer in config.per_layer_config])
    writer.add_head_count_kv([config.num_key_value_heads] * len(slides))
    write_windows(writer, config)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_rope_freq_base_swa(sliding["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.share_expert_dim)
    writer.add_expert_weights_scale(config.moe_router_scaling_factor)
    writer.add_expert_weights_norm(True)
    writer.add_leading_dense_block_count(config.mlp_layer_types.index("sparse"))
    writer.add_moe_every_n_layers(1)
    if any(config.swiglu_limits or ()):
        writer.add_swiglu_clamp_exp([float(limit or 0) for limit in config.swiglu_limits])
    if any(config.swiglu_limits_shared or ()):
        writer.add_swiglu_clamp_shexp([float(limit or 0) for limit in config.swiglu_limits_shared])
    if full["rope_type"] == "llama3":
        _write_rope_factors(
            writer, full, int(config.head_dim * full["partial_rotary_factor"]), config.head_dim
        )


def _write_rope_factors(writer: GGUFWriter, rope: Any, size: int, head_dim: int) -> None:
    """Writes what each frequency of `size` rotated elements is divided by; ones for the other pairs."""
    turns = rope["rope_theta"] ** -(np.arange(0, size, 2) / size) / (2 * np.pi)
    turns *= rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clip(0, 1)
    factors = np.ones(head_dim // 2, np.float32)
    factors[: len(kept)] = 1 / (kept + (1 - kept) / rope["factor"])
    writer.add_tensor("rope_freqs.weight", factors)


def _write_rope(writer: GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _write_experts(writer: GGUFWriter, config: Any) -> None:
    kind = config.model_type
    deepseek_like = (*_LATENT, "glm4_moe", "dots1")
    if growth := config.rope_parameters.get("llama_4_scaling_beta"):
        writer.add_attn_temperature_scale(growth)
    if kind in deepseek_like:
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group or 1)
        writer.add_expert_group_used_count(config.topk_group or 1)
        if getattr(config, "norm_topk_prob", False):
            writer.add_expert_weights_norm(True)
    elif kind == "ernie4_5_moe":
        writer.add_expert_count(config.moe_num_experts)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
    else:
        writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
    if kind in ("qwen2_moe", *LINEAR):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if kind in ("afmoe", "exaone_moe"):
        writer.add_expert_shared_count(config.num_shared_experts)
        writer.add_expert_weights_norm(True)
        is_afmoe = kind == "afmoe"
        writer.add_leading_dense_block_count(
            config.num_dense_layers if is_afmoe else config.first_k_dense_replace
        )
        writer.add_expert_weights_scale(config.route_scale if is_afmoe else config.routed_scaling_factor)
    if kind == "hunyuan_v1_moe":
        writer.add_expert_shared_feed_forward_length(config.intermediate_size)
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if kind in ("afmoe", "exaone_moe", "gpt_oss"):
        writer.add_sliding_window(config.sliding_window)
    width = getattr(config, "moe_intermediate_size", None)
    if kind in ("gpt_oss", "minimax_m2"):
        width = config.intermediate_size
    if width is not None and kind not in ("hunyuan_v1_moe", "mixtral", "olmoe"):
        writer.add_expert_feed_forward_length(width)


def _write_indexer(writer: GGUFWriter, config: Any, lists_layers: bool) -> None:
    """Files of today list the layers that choose; in earlier ones their tensors say which they are."""
    write_indexer(writer, config)
    if lists_layers:
        full = [kind == "full" for kind in config.indexer_types]
        writer.add_array(f"{writer.arch}.attention.indexer.types", full)


def _write_linear(writer: GGUFWriter, config: Any) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(4)
    if sections := config.rope_parameters.get("mrope_section"):
        writer.add_rope_dimension_sections([*sections, 0])


def _write_streams_and_ngrams(writer: GGUFWriter, config: Any) -> None:
    """Keys that the package has no functions for."""
    (layer,) = config.ple_layer_ids
    table = NGramConfig(
        (layer - 1,),
        config.ngram_size,
        config.heads_per_ngram,
        config.ple_embed_dim,
        config.ngram_vocab_size_base,
        config.make_ngram_vocab_size_divisible_by,
        1,
        config.seed,
        config.eos_token_id,
        config.ple_conv_kernel_size,
    )
    primes = hash_primes(table, 0)
    arch = writer.arch
    numbers = {
        "hyper_connection.count": config.hc_count,
        "hyper_connection.low_rank": config.hc_lowrank,
        "ple.ngram_size": config.ngram_size,
        "ple.heads_per_ngram": config.heads_per_ngram,
        "ple.conv_kernel": config.ple_conv_kernel_size,
        "ple.eos_token_id": config.eos_token_id,
        "ple.image_token_id": 5,
        "embedding_length_per_layer_input": table.row_dim,
    }
    for name, number in numbers.items():
        writer.add_uint32(f"{arch}.{name}", number)
    writer.add_indexer_head_count(config.indexer_n_heads)
    writer.add_indexer_key_length(config.indexer_head_dim)
    writer.add_indexer_top_k(config.indexer_budget)
    ratios = _by_layer(config, "indexed_attention", config.indexer_compress_ratio)
    writer.add_array(f"{arch}.attention.compress_ratios", ratios)
    writer.add_array(f"{arch}.ple.layers", [layer - 1])
    of_hashes = {
        "layer_multipliers": hash_factors(table, 0, config.vocab_size),
        "head_offsets": [sum(primes[:i]) for i in range(len(primes))],
        "head_vocab_sizes": primes,
    }
    for name, listed in of_hashes.items():
        kinds = GGUFValueType.ARRAY, GGUFValueType.UINT64
        writer.add_key_value(f"{arch}.ple.{name}", listed, kinds[0], sub_type=kinds[1])


def _by_layer(config: Any, kind: str, value: int) -> list[int]:
    """Returns the value for the layers of a kind, 0 for all others."""
    return [value if found == kind else 0 for found in config.layer_types]


def write_mamba2(writer: GGUFWriter, config: Any) -> None:
    """Writes the keys of layers with Mamba-2: heads are called time steps, and lists have zeros for layers
    without.
    """
    is_granite = config.model_type == "granitemoehybrid"
    full = _by_layer(config, "full_attention", config.num_key_value_heads)
    writer.add_head_count_kv(full)
    heads = config.mamba_n_heads if is_granite else config.mamba_num_heads
    head_dim = config.mamba_d_head if is_granite else config.mamba_head_dim
    writer.add_ssm_conv_kernel(config.mamba_d_conv if is_granite else config.conv_kernel)
    writer.add_ssm_state_size(config.mamba_d_state if is_granite else config.ssm_state_size)
    writer.add_ssm_group_count(config.mamba_n_groups if is_granite else config.n_groups)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * head_dim)
    if is_granite:
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
        return
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    # Here, too, it replaces what was written for all layers.
    writer.add_feed_forward_length(_by_layer(config, "moe", config.moe_intermediate_size))
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_group_count(config.n_group)
    if config.moe_latent_size is not None:
        writer.add_moe_latent_size(config.moe_latent_size)
