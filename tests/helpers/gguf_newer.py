"""Files of architectures that the package `gguf` does not know: names and keys as llama.cpp's converters
write them (its sources of October 2026).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from gguf import ExpertGatingFuncType, GGUFValueType, GGUFWriter, RopeScalingType

from tests.helpers.deepseek_v41_reference import kinds_of_tokens, table_factors, table_primes
from tests.helpers.gguf_conversion import Converted, Function, same

# Their names, by transformers' names of the language models.
ARCHITECTURES_OF_TODAY = {
    "bailing_hybrid": "bailingmoe3",
    "cohere2_moe": "cohere2moe",
    "deepseek_v32": "deepseek32",
    "deepseek_v4": "deepseek4",
    "deepseek_v41": "deepseek41",
    "glm5_next_text": "glm5-next",
    "granitemoe_swa": "granite_swa",
    "granitemoeshared": "granitemoe",
    "hy_v3": "hy_v3",
    "hy_v4": "hy_v4",
    "laguna": "laguna",
    "mellum": "mellum",
    "minimax_m3_vl_text": "minimax-m3",
}
_SQRT_SOFTPLUS = 4
_GRANITE = ("granitemoe_swa", "granitemoeshared")
_LATENT = ("bailing_hybrid", "deepseek_v32", "glm5_next_text", "hy_v4")

_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.hc_head.hc_fn": "output_hc_fn",
    "model.hc_head.hc_base": "output_hc_base",
    "model.hc_head.hc_scale": "output_hc_scale",
}
# Below a layer, in memory and in the file.
_COMMON = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.experts.down_proj": "ffn_down_exps",
    **{
        f"mlp.{shared}.{part}_proj": f"ffn_{part}_shexp"
        for shared in ("shared_experts", "shared_expert", "shared_mlp")
        for part in ("gate", "up", "down")
    },
    **{
        f"{half}_hc.{part}": f"hc_{half}_{part}"
        for half in ("attn", "ffn")
        for part in ("fn", "base", "scale")
    },
    # Kimi Delta Attention.
    "self_attn.b_proj": "ssm_beta",
    "self_attn.o_norm": "ssm_norm",
    "self_attn.g_a_proj": "ssm_g_a",
    "self_attn.g_b_proj": "ssm_g_b",
    "self_attn.forget_gate.f_a_proj": "ssm_f_a",
    "self_attn.forget_gate.f_b_proj": "ssm_f_b",
    "self_attn.forget_gate.f_proj": "ssm_f_a",
    "self_attn.forget_gate.dt_bias": "ssm_dt.bias",
}
_COMPRESSOR = {"kv_proj": "kv", "gate_proj": "gate", "kv_norm": "norm", "position_bias": "ape"}
_OF_GRANITE = {
    "block_sparse_moe.router": "ffn_gate_inp",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps",
    "shared_mlp.output_linear": "ffn_down_shexp",
}
_OWN: Mapping[str, Mapping[str, str]] = {
    "granitemoe_swa": _OF_GRANITE
    | {
        "block_sparse_moe.experts.gate_up_proj": "ffn_gate_up_exps",
        "shared_mlp.input_linear": "ffn_up_shexp",
    },
    "granitemoeshared": _OF_GRANITE,
    "deepseek_v4": {
        "self_attn.q_a_norm": "attn_q_a_norm",
        "self_attn.kv_proj": "attn_kv",
        "self_attn.kv_norm": "attn_kv_a_norm",
        "self_attn.o_a_proj": "attn_output_a",
        "self_attn.o_b_proj": "attn_output_b",
        "self_attn.compressor.indexer.q_b_proj": "indexer.attn_q_b",
        "self_attn.compressor.indexer.scorer.weights_proj": "indexer.proj",
        **{f"self_attn.compressor.{one}": f"attn_compressor_{name}" for one, name in _COMPRESSOR.items()},
        **{
            f"self_attn.compressor.indexer.{one}": f"indexer_compressor_{name}"
            for one, name in _COMPRESSOR.items()
        },
    },
    "glm5_next_text": {
        f"self_attn.indexer.index_kpool_compress_{part}": f"indexer_compressor_{part}"
        for part in ("ape", "gate")
    },
    "hy_v4": {"self_attn.gate_proj": "attn_gate"},
    "laguna": {
        "self_attn.g_proj": "attn_gate",
        "mlp.experts.e_score_correction_bias": "exp_probs_b.bias",
    },
    "minimax_m3_vl_text": {
        f"self_attn.indexer.{part}": f"indexer.{part}" for part in ("q_proj", "k_proj", "q_norm", "k_norm")
    },
}


# Below a layer of the reference, whose names are the published ones; not experts, and what has its own name.
_DEEPSEEK_V41 = {
    "attn.wq_a": "attn_q_a",
    "attn.q_norm": "attn_q_a_norm",
    "attn.wq_b": "attn_q_b",
    "attn.wkv": "attn_kv",
    "attn.kv_norm": "attn_kv_a_norm",
    "attn.wo_a": "attn_output_a",
    "attn.wo_b": "attn_output_b",
    "attn.attn_sink": "attn_sinks",
    "attn.compressor.wkv": "attn_compressor_kv",
    "attn.compressor.wgate": "attn_compressor_gate",
    "attn.compressor.norm": "attn_compressor_norm",
    "attn.indexer.wq_b": "indexer.attn_q_b",
    "attn.indexer.weights_proj": "indexer.proj",
    "attn.indexer.wk": "indexer.attn_k",
    "attn.indexer.k_norm": "indexer.k_norm",
    "ffn.gate": "ffn_gate_inp",
    "engram.embed": "engram_embd",
    "engram.wkv": "engram_wkv",
    "engram.q_weight": "engram_q",
    "engram.k_weight": "engram_k",
}
_OF_EXPERTS = {"w1": "ffn_gate", "w2": "ffn_down", "w3": "ffn_up"}


def _published(name: str, places: torch.Tensor) -> Converted:
    """One tensor of DeepSeek-V4.1's reference; experts are parts of a stack."""
    stem = name.removesuffix(".weight").removesuffix(".bias")
    top = {"embed": "token_embd", "norm": "output_norm", "head": "output"}
    if stem in top:
        return Converted(f"{top[stem]}.weight", places, same, same, gguf=True)
    _, layer, module = stem.split(".", 2)
    found = f"{_DEEPSEEK_V41.get(module, module)}.weight"
    if ".experts." in module or "shared_experts" in module:
        kind = "_shexp" if "shared" in module else "_exps"
        places = places if "shared" in module else places[None]
        found = f"{_OF_EXPERTS[module.rpartition('.')[2]]}{kind}.weight"
    elif name.endswith("ffn.gate.bias"):
        found = "exp_probs_b.bias"
    return Converted(f"blk.{layer}.{found}", places, same, same, gguf=True)


def _suffixed(name: str, published: str) -> str:
    """With the suffix of the published name; all else is a weight."""
    if name.endswith(".bias"):
        return name
    return f"{name}.bias" if published.endswith(".bias") else f"{name}.weight"


def _rotated_last(config: Any, module: str, places: torch.Tensor) -> torch.Tensor:
    """Hy4's rows as published, where neighbours are pairs; in memory they lie half a head apart."""
    size = config.qk_rope_head_dim
    heads = {
        "self_attn.q_b_proj": config.qk_nope_head_dim + size,
        "self_attn.indexer.wq_b": config.index_head_dim,
    }
    if module not in (
        *heads,
        "self_attn.kv_a_proj_with_mqa",
        "self_attn.indexer.wk",
        "self_attn.indexer.k_norm",
    ):
        return places
    by_head = places.view(-1, heads.get(module, places.shape[0]), *places.shape[1:]).clone()
    halves = by_head[:, -size:].clone().chunk(2, dim=1)
    by_head[:, -size::2], by_head[:, 1 - size :: 2] = halves
    return by_head.flatten(0, 1)


def newer_tensors(config: Any, name: str, shape: torch.Size) -> Iterator[Converted]:
    """Yields one tensor of the model as its architecture's files have it: whole, or in parts."""
    kind, places = config.model_type, torch.arange(shape.numel()).reshape(shape)
    if kind == "deepseek_v41":
        yield _published(name, places)
        return
    stem = name.removesuffix(".weight").removesuffix(".bias")
    functions: tuple[Function, Function] = same, same
    if kind == "minimax_m3_vl_text" and name.endswith("norm.weight"):
        functions = (lambda values: values + 1), (lambda values: values - 1)
    if stem in _TOP:
        yield Converted(f"{_TOP[stem]}.weight", places, *functions, gguf=True)
        return
    _, _, below = stem.partition(".layers.")
    layer, _, module = below.partition(".")
    block = f"blk.{layer}"
    parts = list(_parts(config, module, places))
    for part, own in parts:
        yield Converted(f"{block}.{part}.weight", own, gguf=True)
    if module == "self_attn.forget_gate.A_log":
        yield _decay(kind, f"{block}.ssm_a", places)
    elif not parts:
        own_names = _OWN.get(kind, {})
        mapped = own_names.get(module) or _COMMON.get(module) or _gate(kind, module, shape, config)
        if kind == "hy_v4":
            places = _rotated_last(config, module, places)
        if kind in _GRANITE and module in ("self_attn.q_proj", "self_attn.k_proj"):
            places = _alternating(config, module, places)
        yield Converted(f"{block}.{_suffixed(mapped, name)}", places, *functions, gguf=True)


def _alternating(config: Any, module: str, places: torch.Tensor) -> torch.Tensor:
    """Returns the rows of a head, whose pairs are halves in memory, as neighbours."""
    heads = config.num_attention_heads if "q_proj" in module else config.num_key_value_heads
    by_head = places.view(heads, 2, -1, *places.shape[1:])
    return by_head.transpose(1, 2).reshape(places.shape)


def _gate(kind: str, module: str, shape: torch.Size, config: Any) -> str:
    """Both kinds of Ling's layers call their gates the same."""
    assert (kind, module) == ("bailing_hybrid", "self_attn.g_proj"), f"{kind} has no name for {module}"
    return "attn_gate" if shape[0] == config.num_attention_heads else "ssm_g_a"


def _decay(kind: str, name: str, places: torch.Tensor) -> Converted:
    if kind == "bailing_hybrid":
        return Converted(name, places[:, None], torch.exp, torch.log, gguf=True)
    return Converted(name, places, lambda values: -values.exp(), lambda values: (-values).log(), gguf=True)


_KINDS = {
    "block_sparse_moe.experts": "_exps",
    "mlp": "",
    "mlp.experts": "_exps",
    "mlp.shared_experts": "_shexp",
    "shared_mlp": "_shexp",
}


def _parts(config: Any, module: str, places: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the parts of what is one tensor in memory and several in the file."""
    if module in _OWN.get(config.model_type, {}):
        return
    if module.endswith(("gate_up_proj", "input_linear")):
        kind = _KINDS[module.rpartition(".")[0]]
        gate, up = places.chunk(2, dim=-2)
        yield f"ffn_gate{kind}", gate
        yield f"ffn_up{kind}", up
    elif module == "self_attn.kv_b_proj":
        by_head = places.view(config.num_attention_heads, -1, places.shape[1])
        yield "attn_k_b", by_head[:, : config.qk_nope_head_dim].transpose(1, 2)
        yield "attn_v_b", by_head[:, config.qk_nope_head_dim :]
    elif module == "self_attn.conv1d":
        for part, own in zip("qkv", places.chunk(3), strict=True):
            yield f"ssm_conv1d_{part}", own.squeeze(1)[None, :, None]


def write_newer(writer: GGUFWriter, config: Any) -> None:
    """Keys of the family beyond those that all have."""
    kind, arch = config.model_type, writer.arch
    if kind == "deepseek_v41":
        _write_deepseek41(writer, config)
        return
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention") or rope.get("main") or rope
    if kind != "glm5_next_text":
        writer.add_rope_freq_base(rope["rope_theta"])
    scaled = config.rope_parameters.get("compress", rope) if kind == "deepseek_v4" else rope
    if scaled.get("rope_type") == "yarn":
        _write_yarn(writer, scaled)
        if kind == "deepseek_v32":
            writer.add_rope_scaling_yarn_log_mul(0.1 * scaled["mscale_all_dim"])
    if kind in _GRANITE:
        _write_granite(writer, config)
        return
    gating = _SQRT_SOFTPLUS if kind == "deepseek_v4" else ExpertGatingFuncType.SIGMOID
    if kind != "mellum":
        writer.add_uint32(f"{arch}.expert_gating_func", int(gating))
    experts = getattr(config, "n_routed_experts", None) or getattr(config, "num_local_experts", None)
    writer.add_expert_count(experts or config.num_experts)
    if kind not in ("cohere2_moe", "minimax_m3_vl_text"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if kind in _LATENT:
        _write_latent(writer, config)
    {
        "bailing_hybrid": _write_bailing,
        "cohere2_moe": _write_cohere2,
        "deepseek_v32": write_indexer,
        "deepseek_v4": _write_deepseek4,
        "glm5_next_text": _write_glm5,
        "hy_v3": _write_hy3,
        "hy_v4": _write_hy4,
        "laguna": _write_laguna,
        "mellum": _write_mellum,
        "minimax_m3_vl_text": _write_minimax3,
    }[kind](writer, config)


def write_heads(writer: GGUFWriter, config: Any) -> None:
    """Writes KV heads and their sizes."""
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)


def write_windows(writer: GGUFWriter, config: Any) -> None:
    """Writes which layers see a window, and how long it is."""
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def write_latent(writer: GGUFWriter, config: Any, split: bool = True) -> None:
    """Writes the sizes of latent attention: newer files, `split`, call a head's own sizes _mla, and what is
    cached its sizes.
    """
    query, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if getattr(config, "q_lora_rank", None) is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    if split:
        writer.add_head_count_kv(1)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(query)
        writer.add_value_length_mla(value)
    else:
        writer.add_head_count_kv(config.num_attention_heads)
        writer.add_key_length(query)
        writer.add_value_length(value)


def write_indexer(writer: GGUFWriter, config: Any) -> None:
    """Writes how tokens are chosen."""
    writer.add_indexer_head_count(config.index_n_heads)
    writer.add_indexer_key_length(config.index_head_dim)
    writer.add_indexer_top_k(config.index_topk)


def _write_yarn(writer: GGUFWriter, rope: Any) -> None:
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast", 32.0))
    writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow", 1.0))


def _write_granite(writer: GGUFWriter, config: Any) -> None:
    """Experts are as wide as what is written for all layers; heads as hidden size and their number say."""
    head_dim = config.hidden_size // config.num_attention_heads
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(head_dim)
    writer.add_expert_count(config.num_local_experts)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    if config.shared_intermediate_size:
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if config.model_type == "granitemoe_swa":
        write_windows(writer, config)
        writer.add_array(f"{writer.arch}.attention.rope_pattern", list(map(bool, config.layer_rope_theta)))


def _write_latent(writer: GGUFWriter, config: Any) -> None:
    """With what all of these write of their experts."""
    write_latent(writer, config)
    writer.add_expert_shared_count(getattr(config, "n_shared_experts", None) or config.num_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_leading_dense_block_count(config.mlp_layer_types.count("dense"))
    if config.model_type != "hy_v4":
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def _write_streams(writer: GGUFWriter, config: Any) -> None:
    writer.add_uint32(f"{writer.arch}.hyper_connection.count", config.hc_mult)
    writer.add_float32(f"{writer.arch}.hyper_connection.epsilon", config.hc_eps)
    if config.model_type != "hy_v4":
        writer.add_uint32(f"{writer.arch}.hyper_connection.sinkhorn_iterations", config.hc_sinkhorn_iters)


def _write_limits(writer: GGUFWriter, config: Any, *names: str) -> None:
    for name in names:
        writer.add_array(f"{writer.arch}.{name}", [float(config.swiglu_limit)] * config.num_hidden_layers)


def _write_compressed(writer: GGUFWriter, config: Any, rotary_dim: int) -> None:
    """What DeepSeek-V4 and V4.1 write alike: attention to compressed entries, shared experts, streams."""
    writer.add_head_count_kv(1)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(rotary_dim)
    writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(True)
    _write_limits(writer, config, "swiglu_clamp_exp", "swiglu_clamp_shexp")
    write_indexer(writer, config)
    _write_streams(writer, config)


def _write_deepseek4(writer: GGUFWriter, config: Any) -> None:
    arch = writer.arch
    ratios = {"sliding_attention": 0, **config.compress_rates}
    _write_compressed(writer, config, int(config.head_dim * config.partial_rotary_factor))
    numbers = {
        "attention.output_group_count": config.o_groups,
        "attention.output_lora_rank": config.o_lora_rank,
        "hash_layer_count": config.mlp_layer_types.count("hash_moe"),
        "embedding_length_out": config.hidden_size * config.hc_mult,
    }
    for name, number in numbers.items():
        writer.add_uint32(f"{arch}.{name}", number)
    theta = config.rope_parameters["compress"]["rope_theta"]
    writer.add_float32(f"{arch}.attention.compress_rope_freq_base", theta)
    # One more, of multi-token prediction.
    listed = [*(ratios[layer] for layer in config.layer_types), 0]
    writer.add_array(f"{arch}.attention.compress_ratios", listed)


def _write_deepseek41(writer: GGUFWriter, config: Any) -> None:
    """Keys of llama.cpp's pull request 28696, and constants of hashes, which tell what these leave out."""
    arch = writer.arch
    writer.add_rope_freq_base(config.rope_theta)
    _write_yarn(writer, config.rope_scaling)
    writer.add_uint32(f"{arch}.expert_gating_func", _SQRT_SOFTPLUS)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    _write_compressed(writer, config, config.qk_rope_head_dim)
    kinds = kinds_of_tokens(config.vocab_size)
    numbers = {
        "attention.output_group_count": config.o_groups,
        "attention.output_lora_rank": config.o_lora_rank,
        "attention.candidate_source_layer_id": config.candidate_source_layer_id,
        "attention.candidate_topk_blocks": config.candidate_topk_blocks,
        "attention.candidate_block_size": config.candidate_block_size,
        "hash_layer_count": 0,
        "engram.head_count": config.engram_n_heads,
        "engram.key_length": config.engram_head_dim,
        "engram.max_ngram_size": config.engram_max_ngram_size,
        "engram.pad_id": kinds[config.engram_pad_token_id],
    }
    for name, number in numbers.items():
        writer.add_uint32(f"{arch}.{name}", number)
    writer.add_float32(f"{arch}.attention.compress_rope_freq_base", config.compress_rope_theta)
    primes = [prime for own in table_primes(config) for prime in own]
    factors = [
        factor for place in range(len(config.engram_layer_ids)) for factor in table_factors(config, place)
    ]
    kind_of_list = GGUFValueType.ARRAY, GGUFValueType.UINT64
    writer.add_key_value(f"{arch}.engram.multipliers", factors, kind_of_list[0], sub_type=kind_of_list[1])
    lists = {"attention.compress_ratios": config.compress_ratios, "engram.layer_ids": config.engram_layer_ids}
    for name, listed in (lists | {"engram.primes": primes, "engram.token_map": kinds}).items():
        writer.add_array(f"{arch}.{name}", listed)


def _write_glm5(writer: GGUFWriter, config: Any) -> None:
    arch, linear = writer.arch, [layer == "linear_attention" for layer in config.layer_types]
    writer.add_head_count_kv([0 if one else 1 for one in linear])
    writer.add_layer_norm_eps(1e-6)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_kda_head_dim(config.linear_head_dim)
    if config.linear_lower_bound is not None:
        writer.add_float32(f"{arch}.kda.gate_lower_bound", config.linear_lower_bound)
    write_indexer(writer, config)
    writer.add_uint32(f"{arch}.attention.indexer.kpool", config.index_kpool)
    if arch == "glm5-next":
        writer.add_bool(f"{arch}.attention.indexer.kpool_select_tail", True)
        writer.add_array(f"{arch}.attention.indexer.types", [True] * len(linear))
    _write_streams(writer, config)
    _write_limits(writer, config, "swiglu_clamp_exp", "swiglu_clamp_shexp")


def _write_bailing(writer: GGUFWriter, config: Any) -> None:
    linear = [layer == "linear_attention" for layer in config.layer_types]
    writer.add_head_count_kv([0 if one else 1 for one in linear])
    writer.add_ssm_conv_kernel(config.short_conv_kernel_size)
    writer.add_kda_head_dim(config.linear_head_dim)
    writer.add_bool(f"{writer.arch}.kda.safe_gate", True)
    writer.add_float32(f"{writer.arch}.kda.gate_lower_bound", config.kda_lower_bound)
    writer.add_expert_shared_feed_forward_length(config.num_shared_experts * config.moe_intermediate_size)


def _write_grouped_queries(writer: GGUFWriter, config: Any) -> None:
    write_heads(writer, config)
    writer.add_expert_weights_norm(True)


def _write_hy3(writer: GGUFWriter, config: Any) -> None:
    _write_grouped_queries(writer, config)
    writer.add_expert_shared_feed_forward_length(config.num_shared_experts * config.moe_intermediate_size)
    writer.add_expert_weights_scale(config.router_scaling_factor)


def _write_hy4(writer: GGUFWriter, config: Any) -> None:
    arch = writer.arch
    write_indexer(writer, config)
    writer.add_array(f"{arch}.attention.indexer.types", [one == "full" for one in config.indexer_types])
    _write_streams(writer, config)
    writer.add_float32(f"{arch}.hyper_connection.magnitude", config.hc_magnitude)
    _write_limits(writer, config, "swiglu_clamp_exp")


def _write_laguna(writer: GGUFWriter, config: Any) -> None:
    """Which layers slide is not written where it is every four but the first."""
    _write_grouped_queries(writer, config)
    writer.add_head_count(config.num_attention_heads_per_layer)
    if "sliding_attention" in config.layer_types:
        writer.add_sliding_window(config.sliding_window)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_expert_weights_scale(config.moe_routed_scaling_factor)
    writer.add_leading_dense_block_count(config.mlp_layer_types.count("dense"))
    kinds = {"full_attention": "", "sliding_attention": "_swa"}
    for kind, suffix in kinds.items():
        rope = config.rope_parameters.get(kind)
        if rope is None:
            continue
        rotated = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
        writer.add_uint32(f"{writer.arch}.rope.dimension_count{suffix}", rotated)
        if suffix:
            writer.add_rope_freq_base_swa(rope["rope_theta"])


def _write_cohere2(writer: GGUFWriter, config: Any) -> None:
    """Replaces the width that was written: it is that of dense layers."""
    write_heads(writer, config)
    writer.add_feed_forward_length(config.prefix_dense_intermediate_size or config.intermediate_size)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_leading_dense_block_count(config.mlp_layer_types.count("dense"))
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_logit_scale(config.logit_scale)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    write_windows(writer, config)
    writer.add_rope_dimension_count(config.head_dim)
    if config.num_shared_experts:
        writer.add_expert_shared_count(config.num_shared_experts)
        shared = config.num_shared_experts * config.intermediate_size
        writer.add_expert_shared_feed_forward_length(shared)


def _write_mellum(writer: GGUFWriter, config: Any) -> None:
    write_heads(writer, config)
    write_windows(writer, config)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


def _write_minimax3(writer: GGUFWriter, config: Any) -> None:
    """Replaces the width that was written: it is that of dense layers."""
    arch = writer.arch
    _write_grouped_queries(writer, config)
    writer.add_feed_forward_length(config.dense_intermediate_size)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_rope_dimension_count(config.rotary_dim)
    writer.add_leading_dense_block_count(config.mlp_layer_types.count("dense"))
    _write_indexer_blocks(writer, arch, config)


def _write_indexer_blocks(writer: GGUFWriter, arch: str, config: Any) -> None:
    writer.add_indexer_head_count(config.index_n_heads)
    writer.add_indexer_key_length(config.index_head_dim)
    writer.add_indexer_top_k(config.index_topk_blocks)
    writer.add_uint32(f"{arch}.attention.indexer.block_size", config.index_block_size)
    writer.add_uint32(f"{arch}.attention.indexer.local_blocks", config.index_local_blocks)
