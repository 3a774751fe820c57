"""Tiny configurations of the families with latent attention, for `tiny_models.TINY_MODELS`.

Transformers takes the rotated part of a query for the head, so `head_dim` is that part's size.
"""

from __future__ import annotations

from typing import Any

_SIZES: dict[str, Any] = {
    "num_key_value_heads": 6,
    "head_dim": 8,
    "q_lora_rank": 28,
    "kv_lora_rank": 26,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "num_mtp_layers": 0,
}
# Both of YaRN's temperatures: that of the rotation and that of the scores.
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 128,
}

# Name -> fields of `TinyModel`.
MLA_MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "changes": {
            **_SIZES,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "attention_bias": True,
            "rope_parameters": _YARN,
        },
    },
    "deepseek_v3_direct_query_half_split_tied": {
        "model_type": "deepseek_v3",
        "changes": {
            **_SIZES,
            "q_lora_rank": None,
            "qk_nope_head_dim": 12,
            "v_head_dim": 9,
            "rope_interleave": False,
            "attention_bias": False,
            "rms_norm_eps": 1e-4,
            "n_routed_experts": 9,
            "num_experts_per_tok": 4,
            "n_shared_experts": 3,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "tie_word_embeddings": True,
        },
        "shard_bytes": 60_000,
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        "changes": {
            **_SIZES,
            "attention_bias": False,
            "n_routed_experts": 15,
            "num_experts_per_tok": 4,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 5,
            "topk_group": 2,
            "routed_scaling_factor": 6.0,
            "rope_parameters": _YARN,
        },
    },
    "deepseek_v2_lite_biased_tied": {
        "model_type": "deepseek_v2",
        "changes": {
            **_SIZES,
            "q_lora_rank": None,
            "kv_lora_rank": 22,
            "qk_nope_head_dim": 6,
            "v_head_dim": 12,
            "attention_bias": True,
            "n_routed_experts": 7,
            "num_experts_per_tok": 3,
            "n_shared_experts": 3,
            "first_k_dense_replace": 0,
            "topk_method": "greedy",
            "routed_scaling_factor": 1.0,
            "tie_word_embeddings": True,
        },
        "shard_bytes": 60_000,
    },
    "kimi_k2": {
        "model_type": "kimi_k2",
        "written_as": "deepseek_v3",
        "changes": {
            **_SIZES,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "n_routed_experts": 13,
            "num_experts_per_tok": 5,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.827,
            "rope_parameters": _YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "mscale_all_dim": 1.0},
        },
    },
    "glm4_moe_lite": {
        "model_type": "glm4_moe_lite",
        "changes": {
            **_SIZES,
            "qk_nope_head_dim": 10,
            "v_head_dim": 18,
            "rms_norm_eps": 1e-5,
            "n_routed_experts": 10,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.8,
            "norm_topk_prob": True,
            "attention_bias": False,
        },
    },
    "glm4_moe_lite_groups_direct_query_tied": {
        "model_type": "glm4_moe_lite",
        "changes": {
            **_SIZES,
            "q_lora_rank": None,
            "kv_lora_rank": 30,
            "qk_nope_head_dim": 14,
            "rope_interleave": False,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "n_routed_experts": 12,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": _YARN,
        },
        "shard_bytes": 60_000,
    },
}
