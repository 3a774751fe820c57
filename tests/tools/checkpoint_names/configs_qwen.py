"""Qwen's published models, from Qwen2-MoE to Qwen3.5."""

from __future__ import annotations

from typing import Any

from tests.tools.checkpoint_names.config_parts import FP8, common, without

_ROUTER = {"router_aux_loss_coef": 0.001, "output_router_logits": False}
_ENDS = {"bos_token_id": 151643, "eos_token_id": 151645}
_QWEN3 = {
    "head_dim": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_WINDOWS = {"use_sliding_window": False, "sliding_window": None, "rope_scaling": None}


def _experts(count: int, chosen: int, width: int) -> dict[str, Any]:
    return {"num_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": width}


def _qwen3(
    sizes: tuple[int, int, int, int, int, int], experts: tuple[int, int, int], **more: Any
) -> dict[str, Any]:
    """`experts`: how many, chosen, width."""
    return {
        **common("qwen3_moe", sizes, 40960, 1e6),
        **_QWEN3,
        **_WINDOWS,
        **_ROUTER,
        **_ENDS,
        **_experts(*experts),
        "attention_bias": False,
        "max_window_layers": sizes[3],
        **more,
    }


_VISION = {
    "depth": 27,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
}


def _vision(model_type: str, out: int, deep: list[int]) -> dict[str, Any]:
    return {**_VISION, "model_type": model_type, "out_hidden_size": out, "deepstack_visual_indexes": deep}


def _qwen3_5(
    sizes: tuple[int, int, int, int, int, int], experts: tuple[int, int, int], value_heads: int
) -> dict[str, Any]:
    kinds = ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(sizes[3])]
    base = common("qwen3_5_moe_text", sizes, 262144, 1e7)
    text = {
        **without(base, "rope_theta", "intermediate_size", "tie_word_embeddings", "torch_dtype"),
        **_LINEAR,
        **_experts(*experts),
        "attention_bias": False,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "layer_types": kinds,
        "linear_num_value_heads": value_heads,
        "mamba_ssm_dtype": "float32",
        "mlp_only_layers": [],
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": experts[2],
    }
    return {
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "image_token_id": 248056,
        "video_token_id": 248057,
        "vision_start_token_id": 248053,
        "vision_end_token_id": 248054,
        "text_config": text,
        "vision_config": _vision("qwen3_5_moe", sizes[1], []),
    }


def _qwen3_vl() -> dict[str, Any]:
    base = common("qwen3_vl_moe_text", (151936, 2048, 6144, 48, 32, 4), 262144, 5e6)
    text = {
        **without(base, "tie_word_embeddings", "torch_dtype"),
        **_QWEN3,
        **_ENDS,
        **_experts(128, 8, 768),
        "attention_bias": False,
        "dtype": "bfloat16",
        "rope_scaling": {
            "rope_type": "default",
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
        },
    }
    return {
        "model_type": "qwen3_vl_moe",
        "tie_word_embeddings": False,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "text_config": text,
        "vision_config": _vision("qwen3_vl_moe", 2048, [8, 16, 24]),
    }


_CODER = _qwen3(
    (151936, 6144, 8192, 62, 96, 8), (160, 8, 2560), max_position_embeddings=262144, rope_theta=1e7
)
_NEXT = _qwen3((151936, 2048, 5120, 48, 16, 2), (512, 10, 512), rope_theta=1e7)
QWEN: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": _qwen3((151936, 2048, 6144, 48, 32, 4), (128, 8, 768)),
    "qwen3-30b-a3b-fp8": _qwen3((151936, 2048, 6144, 48, 32, 4), (128, 8, 768), quantization_config=FP8),
    "qwen3-235b-a22b": _qwen3((151936, 4096, 12288, 94, 64, 4), (128, 8, 1536)),
    "qwen3-coder-480b-a35b": {
        **without(_CODER, "bos_token_id", "attention_bias"),
        "qkv_bias": False,
        "router_aux_loss_coef": 0.0,
        "shared_expert_intermediate_size": 0,
        "use_qk_norm": True,
    },
    "qwen2-57b-a14b": {
        **common("qwen2_moe", (151936, 3584, 18944, 28, 28, 4), 131072, 1e6),
        **_ROUTER,
        **_experts(64, 8, 2560),
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "shared_expert_intermediate_size": 20480,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "max_window_layers": 28,
        "sliding_window": 131072,
        "use_sliding_window": False,
    },
    "qwen3-next-80b-a3b": {
        **without(_NEXT, "attention_bias", "max_window_layers", "use_sliding_window", "sliding_window"),
        **_LINEAR,
        "model_type": "qwen3_next",
        "max_position_embeddings": 262144,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_num_value_heads": 32,
        "shared_expert_intermediate_size": 512,
    },
    "qwen3.5-35b-a3b": _qwen3_5((248320, 2048, 0, 40, 16, 2), (256, 8, 512), 32),
    "qwen3.5-397b-a17b": _qwen3_5((248320, 4096, 0, 60, 32, 2), (512, 10, 1024), 64),
    "qwen3-vl-30b-a3b": _qwen3_vl(),
}
