"""Published models with grouped-query attention that are not Qwen's."""

from __future__ import annotations

from typing import Any

from tests.tools.checkpoint_names.config_parts import FP8, SAVED, common, deepseek_moe, without, yarn

_GLM_ENDS = {"eos_token_id": [151329, 151336, 151338], "pad_token_id": 151329}
_LARGE = deepseek_moe((160, 8, 1536, 1), 3, 2.5)
_AIR = deepseek_moe((128, 8, 1408, 1), 1, 1.0)
_STEP_KINDS = ["full_attention" if i % 4 == 0 else "sliding_attention" for i in range(48)]


def _glm(
    sizes: tuple[int, int, int, int, int, int], moe: dict[str, Any], length: int, **more: Any
) -> dict[str, Any]:
    return {
        **common("glm4_moe", sizes, length, 1e6, 1e-5),
        **_GLM_ENDS,
        "head_dim": 128,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "num_nextn_predict_layers": 1,
        "rope_scaling": None,
        **moe,
        **more,
    }


def _glm_4_5v() -> dict[str, Any]:
    """As transformers 5 writes it."""
    sizes = (151552, 4096, 10944, 46, 96, 8)
    text = _glm(sizes, _AIR, 65536, use_qk_norm=False, model_type="glm4v_moe_text")
    marks = {"image_token_id": 151363, "image_start_token_id": 151339, "image_end_token_id": 151340}
    return {
        "model_type": "glm4v_moe",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        **marks,
        "video_start_token_id": 151341,
        "video_end_token_id": 151342,
        "video_token_id": 151364,
        "text_config": {
            **without(text, "num_nextn_predict_layers", "rope_scaling", "rope_theta", "torch_dtype"),
            **marks,
            "dtype": "bfloat16",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [8, 12, 12],
            },
            "router_aux_loss_coef": 0.0001,
        },
        "vision_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "depth": 24,
            "hidden_act": "silu",
            "hidden_size": 1536,
            "image_size": 336,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": 10944,
            "model_type": "glm4v_moe_vision",
            "num_heads": 12,
            "out_hidden_size": 4096,
            "patch_size": 14,
            "rms_norm_eps": 1e-05,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    scaling = yarn(32.0, 1.0)["rope_scaling"] | {"truncate": False, "rope_type": "yarn"}
    kept = ("beta_fast", "beta_slow", "factor", "original_max_position_embeddings", "rope_type", "truncate")
    base = common("gpt_oss", (201088, 2880, 2880, layers, 64, 8), 131072, 150000, 1e-5)
    return {
        **without(base, "torch_dtype"),
        "eos_token_id": 200002,
        "pad_token_id": 199999,
        "head_dim": 64,
        "attention_bias": True,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "initial_context_length": 4096,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
        "rope_scaling": {name: scaling[name] for name in kept},
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    }


_STEP = {
    **without(common("step3p5", (128896, 4096, 11264, 45, 64, 8), 262144, 0.0, 1e-5), "num_key_value_heads"),
    "bos_token_id": 0,
    "eos_token_id": [1, 2, 128007],
    "num_attention_groups": 8,
    "head_dim": 128,
    "max_seq_len": 262144,
    "use_moe": True,
    "moe_num_experts": 288,
    "moe_top_k": 8,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
    "moe_layer_offset": 0,
    "moe_every_n_layer": 1,
    "moe_layers_enum": ",".join(map(str, range(3, 45))),
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0,
    "norm_expert_weight": True,
    "need_fp32_gate": True,
    "use_moe_router_bias": True,
    "use_qk_norm": True,
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
    "swiglu_limits": [7 if i in (43, 44) else 0.0 for i in range(48)],
    "swiglu_limits_shared": [16 if i == 44 else 0.0 for i in range(48)],
    "num_nextn_predict_layers": 3,
}
GQA: dict[str, dict[str, Any]] = {
    "glm-4.5-air": _glm((151552, 4096, 10944, 46, 96, 8), _AIR, 131072, use_qk_norm=False),
    "glm-4.7": {
        **without(_glm((151552, 5120, 12288, 92, 96, 8), _LARGE, 202752, use_qk_norm=True), "torch_dtype"),
        "dtype": "bfloat16",
    },
    "glm-4.5v": _glm_4_5v(),
    "minimax-m2": {
        **without(
            common("minimax_m2", (200064, 3072, 1536, 62, 48, 8), 196608, 5000000),
            "torch_dtype",
            *(key for key in SAVED if key != "use_cache"),
        ),
        "attn_type_list": [1] * 62,
        "head_dim": 128,
        "mtp_transformer_layers": 1,
        "num_experts_per_tok": 8,
        "num_local_experts": 256,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "rotary_dim": 64,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "quantization_config": FP8
        | {
            "fmt": "float8_e4m3fn",
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
    },
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "step-3.5-flash": _STEP,
    "mixtral-8x7b": {
        **common("mixtral", (32000, 4096, 14336, 32, 32, 8), 32768, 1e6, 1e-5),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
    },
    "olmoe-1b-7b": {
        **common("olmoe", (50304, 2048, 1024, 16, 16, 16), 4096, 10000.0, 1e-5),
        "eos_token_id": 50279,
        "pad_token_id": 1,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "clip_qkv": None,
        "attention_bias": False,
    },
    "dots1": {
        **common("dots1", (152064, 4096, 10944, 62, 32, 32), 32768, 1e7, 1e-5),
        **deepseek_moe((128, 6, 1408, 2), 1, 2.5, n_group=None, topk_group=None),
        "scoring_func": "noaux_tc",
        "attention_bias": False,
        "sliding_window": None,
    },
    "ernie-4.5-21b-a3b": {
        **common("ernie4_5_moe", (103424, 2560, 12288, 28, 20, 4), 131072, 5e5, 1e-5),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
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
