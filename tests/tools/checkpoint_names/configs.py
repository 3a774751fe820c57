"""config.json of published models, as far as it says what tensors there are and what they compute.

No hub could be asked: the numbers are those of the published configurations as remembered, checked against
the configuration classes of transformers 5.23 and against each other (every shape must fit). Keys that only
concern training are left out.
"""

from __future__ import annotations

from typing import Any

_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def _common(
    model_type: str, sizes: tuple[int, int, int, int, int, int], length: int, theta: float, eps: float = 1e-6
) -> dict[str, Any]:
    """`sizes`: vocabulary, hidden, dense MLP, layers, heads, KV heads."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {
        "model_type": model_type,
        **dict(zip((*names, "num_key_value_heads"), sizes, strict=True)),
        "max_position_embeddings": length,
        "rope_theta": theta,
        "rms_norm_eps": eps,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _qwen(
    sizes: tuple[int, int, int, int, int, int], experts: tuple[int, int, int], **more: Any
) -> dict[str, Any]:
    """Qwen3-MoE; `experts`: how many, chosen, width."""
    count, chosen, width = experts
    return {
        **_common("qwen3_moe", sizes, 40960, 1e6),
        "head_dim": 128,
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        **more,
    }


_QWEN_VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
}


def _qwen3_5(
    sizes: tuple[int, int, int, int, int, int], experts: tuple[int, int, int], value_heads: int
) -> dict[str, Any]:
    count, chosen, width = experts
    kinds = ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(sizes[3])]
    text = {
        **_common("qwen3_5_moe_text", sizes, 262144, 1e7),
        **_LINEAR,
        "linear_num_value_heads": value_heads,
        "head_dim": 256,
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
        "layer_types": kinds,
        "full_attention_interval": 4,
        "attn_output_gate": True,
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    }
    del text["rope_theta"]
    vision = {**_QWEN_VISION, "out_hidden_size": sizes[1], "deepstack_visual_indexes": []}
    return {
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "image_token_id": 248056,
        "text_config": text,
        "vision_config": vision,
    }


def _deepseek_moe(
    experts: tuple[int, int, int, int], dense: int, scale: float, **more: Any
) -> dict[str, Any]:
    """`experts`: how many, chosen, width, shared."""
    count, chosen, width, shared = experts
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": width,
        "n_shared_experts": shared,
        "first_k_dense_replace": dense,
        "routed_scaling_factor": scale,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        **more,
    }


def _latent(q_rank: int | None, nope: int, value: int) -> dict[str, Any]:
    ranks = {"q_lora_rank": q_rank, "kv_lora_rank": 512}
    return {**ranks, "qk_nope_head_dim": nope, "qk_rope_head_dim": 64, "v_head_dim": value}


def _yarn(factor: float, mscale: float, beta_fast: float = 32.0) -> dict[str, Any]:
    scaling: dict[str, Any] = {"type": "yarn", "factor": factor, "mscale": mscale, "mscale_all_dim": mscale}
    lengths = {"original_max_position_embeddings": 4096, "beta_fast": beta_fast, "beta_slow": 1.0}
    return {"rope_scaling": scaling | lengths}


def _glm(
    sizes: tuple[int, int, int, int, int, int], moe: dict[str, Any], length: int, **more: Any
) -> dict[str, Any]:
    return {
        **_common("glm4_moe", sizes, length, 1e6, 1e-5),
        "head_dim": 128,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "num_nextn_predict_layers": 1,
        **moe,
        **more,
    }


_V3 = {
    **_common("deepseek_v3", (129280, 7168, 18432, 61, 128, 128), 163840, 10000.0),
    **_latent(1536, 128, 128),
    **_deepseek_moe((256, 8, 2048, 1), 3, 2.5, n_group=8, topk_group=4),
    **_yarn(40.0, 1.0),
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "attention_bias": False,
    "num_nextn_predict_layers": 1,
    "quantization_config": _FP8,
}
_KIMI = {
    **_common("kimi_k2", (163840, 7168, 18432, 61, 64, 64), 131072, 50000.0, 1e-5),
    **_latent(1536, 128, 128),
    **_deepseek_moe((384, 8, 2048, 1), 1, 2.827),
    **_yarn(32.0, 1.0, 1.0),
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "attention_bias": False,
    "num_nextn_predict_layers": 0,
}
_INT4_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
_INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": _INT4_WEIGHTS, "input_activations": None}
    },
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
}
_AIR = _deepseek_moe((128, 8, 1408, 1), 1, 1.0)
_STEP_KINDS = ["full_attention" if i % 4 == 0 else "sliding_attention" for i in range(48)]


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    scaling = _yarn(32.0, 1.0)["rope_scaling"] | {"truncate": False, "rope_type": "yarn"}
    kept = ("beta_fast", "beta_slow", "factor", "original_max_position_embeddings", "rope_type", "truncate")
    return {
        **_common("gpt_oss", (201088, 2880, 2880, layers, 64, 8), 131072, 150000.0, 1e-5),
        "head_dim": 64,
        "attention_bias": True,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
        "rope_scaling": {name: scaling[name] for name in kept},
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        },
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": _qwen((151936, 2048, 6144, 48, 32, 4), (128, 8, 768)),
    "qwen3-235b-a22b": _qwen((151936, 4096, 12288, 94, 64, 4), (128, 8, 1536)),
    "qwen3-coder-480b-a35b": _qwen(
        (151936, 6144, 8192, 62, 96, 8), (160, 8, 2560), max_position_embeddings=262144, rope_theta=1e7
    ),
    "qwen2-57b-a14b": {
        **_common("qwen2_moe", (151936, 3584, 18944, 28, 28, 4), 32768, 1e6),
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2560,
        "shared_expert_intermediate_size": 20480,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "sliding_window": 65536,
        "use_sliding_window": False,
    },
    "qwen3-next-80b-a3b": {
        **_qwen(
            (151936, 2048, 5120, 48, 16, 2), (512, 10, 512), max_position_embeddings=262144, rope_theta=1e7
        ),
        **_LINEAR,
        "model_type": "qwen3_next",
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_num_value_heads": 32,
        "shared_expert_intermediate_size": 512,
    },
    "qwen3.5-35b-a3b": _qwen3_5((248320, 2048, 5632, 40, 16, 2), (256, 8, 512), 32),
    "qwen3.5-397b-a17b": _qwen3_5((248320, 4096, 12288, 60, 32, 2), (512, 10, 1024), 64),
    "qwen3-vl-30b-a3b": {
        "model_type": "qwen3_vl_moe",
        "tie_word_embeddings": False,
        "image_token_id": 151655,
        "text_config": {
            **_qwen((151936, 2048, 6144, 48, 32, 4), (128, 8, 768), max_position_embeddings=262144),
            "model_type": "qwen3_vl_moe_text",
            "rope_theta": 5e6,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
            },
        },
        "vision_config": {
            **_QWEN_VISION,
            "out_hidden_size": 2048,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    },
    "glm-4.5-air": _glm((151552, 4096, 10944, 46, 96, 8), _AIR, 131072, use_qk_norm=False),
    "glm-4.7": _glm(
        (151552, 5120, 12288, 92, 96, 8), _deepseek_moe((160, 8, 1536, 1), 3, 2.5), 202752, use_qk_norm=True
    ),
    "glm-4.7-flash": {
        **_common("glm4_moe_lite", (154880, 2048, 10240, 47, 20, 20), 202752, 1e6, 1e-5),
        **_latent(768, 192, 256),
        **_deepseek_moe((64, 4, 1536, 1), 1, 1.8),
        "topk_method": "noaux_tc",
        "attention_bias": False,
        "num_nextn_predict_layers": 1,
    },
    "glm-4.6v": {
        "model_type": "glm4v_moe",
        "tie_word_embeddings": False,
        "image_token_id": 151363,
        "image_start_token_id": 151339,
        "image_end_token_id": 151340,
        "video_token_id": 151364,
        "text_config": {
            **_glm(
                (151552, 4096, 10944, 46, 96, 8), _AIR, 131072, rope_theta=5e5, num_nextn_predict_layers=0
            ),
            "model_type": "glm4v_moe_text",
            "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]},
        },
        "vision_config": {
            "depth": 24,
            "hidden_size": 1536,
            "intermediate_size": 10944,
            "out_hidden_size": 4096,
            "num_heads": 12,
            "image_size": 336,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    },
    "glm-5": {
        **_common("glm_moe_dsa", (154880, 6144, 12288, 78, 64, 64), 202752, 1e6, 1e-5),
        **_latent(2048, 192, 256),
        **_deepseek_moe((256, 8, 2048, 1), 3, 2.5),
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "attention_bias": False,
        "num_nextn_predict_layers": 1,
    },
    "minimax-m2": {
        **_common("minimax_m2", (200064, 3072, 1536, 62, 48, 8), 196608, 5e6),
        "head_dim": 128,
        "rotary_dim": 64,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "shared_intermediate_size": 0,
        "quantization_config": _FP8
        | {"modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
    },
    "deepseek-v2-lite": {
        **_common("deepseek_v2", (102400, 2048, 10944, 27, 16, 16), 163840, 10000.0),
        **_latent(None, 128, 128),
        **_deepseek_moe((64, 6, 1408, 2), 1, 1.0, norm_topk_prob=False),
        **_yarn(40.0, 0.707),
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "attention_bias": False,
    },
    "deepseek-v3": _V3,
    "deepseek-v3.2": {
        **_V3,
        "model_type": "deepseek_v32",
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
    },
    "kimi-k2": {**_KIMI, "quantization_config": _FP8},
    "kimi-k2.5": {
        "model_type": "kimi_k25",
        "tie_word_embeddings": False,
        "media_placeholder_token_id": 163605,
        "text_config": {
            **_KIMI,
            **_yarn(64.0, 1.0),
            "max_position_embeddings": 262144,
            "quantization_config": _INT4,
        },
        "vision_config": {
            "patch_size": 14,
            "vt_num_attention_heads": 16,
            "vt_num_hidden_layers": 27,
            "vt_hidden_size": 1152,
            "vt_intermediate_size": 4304,
            "init_pos_emb_height": 64,
            "init_pos_emb_width": 64,
            "init_pos_emb_time": 4,
            "merge_kernel_size": [2, 2],
            "mm_hidden_size": 1152,
        },
    },
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "step-3.5-flash": {
        **_common("step3p5", (128896, 4096, 11264, 45, 64, 8), 262144, 0.0, 1e-5),
        "num_key_value_heads": None,
        "num_attention_groups": 8,
        "head_dim": 128,
        "moe_num_experts": 288,
        "moe_top_k": 8,
        "moe_intermediate_size": 1280,
        "share_expert_dim": 1280,
        "moe_layers_enum": ",".join(map(str, range(3, 45))),
        "moe_router_activation": "sigmoid",
        "moe_router_scaling_factor": 3.0,
        "norm_expert_weight": True,
        "need_fp32_gate": True,
        "use_moe_router_bias": True,
        "use_head_wise_attn_gate": True,
        "att_impl_type": "GQA",
        "zero_centered": True,
        "sliding_window": 512,
        "layer_types": _STEP_KINDS,
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 96,
            "num_attention_groups": 8,
            "head_dim": 128,
            "true_head_dim": 128,
        },
        "rope_theta": [5e6 if kind == "full_attention" else 1e4 for kind in _STEP_KINDS],
        "partial_rotary_factors": [0.5 if kind == "full_attention" else 1.0 for kind in _STEP_KINDS],
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 32.0,
            "original_max_position_embeddings": 131072,
        },
        "yarn_only_types": ["full_attention"],
        "swiglu_limits": [7.0 if i in (43, 44) else 0.0 for i in range(48)],
        "swiglu_limits_shared": [16.0 if i in (43, 44) else 0.0 for i in range(48)],
        "num_nextn_predict_layers": 3,
    },
    "mixtral-8x7b": {
        **_common("mixtral", (32000, 4096, 14336, 32, 32, 8), 32768, 1e6, 1e-5),
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "olmoe-1b-7b": {
        **_common("olmoe", (50304, 2048, 1024, 16, 16, 16), 4096, 10000.0, 1e-5),
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "clip_qkv": None,
        "attention_bias": False,
    },
    "dots1": {
        **_common("dots1", (152064, 4096, 10944, 62, 32, 32), 32768, 1e7, 1e-5),
        **_deepseek_moe((128, 6, 1408, 2), 1, 2.5),
        "head_dim": 128,
        "scoring_func": "noaux_tc",
        "attention_bias": False,
        "sliding_window": None,
    },
    "ernie-4.5-21b-a3b": {
        **_common("ernie4_5_moe", (103424, 2560, 12288, 28, 20, 4), 131072, 5e5, 1e-5),
        "tie_word_embeddings": True,
        "head_dim": 128,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_intermediate_size": 1536,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 27,
        "moe_layer_interval": 1,
        "moe_use_aux_free": True,
        "use_bias": False,
        "num_nextn_predict_layers": 1,
    },
}
