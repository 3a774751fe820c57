"""Tiny configurations of families with linear attention, for `tiny_models.TINY_MODELS`.

Four layers or five, so that layers of either kind follow both kinds; no two of the sizes that could be
mistaken for one another are alike.
"""

from __future__ import annotations

from typing import Any

from tests.helpers.tiny_mla_models import MLA_SIZES

_LINEAR, _FULL = "linear_attention", "full_attention"
# Of norms: with the usual 1e-6, heads that are zero but for rounding would be magnified a thousand times, and
# every way of summing them would give other logits.
_EPSILON = 1e-3

# Families whose norms, but for the one inside linear attention, hold their weight less 1.
ONE_PLUS_WEIGHT_NORMS = ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "step3p7", "minimax_m3_vl")


def _rope(**changes: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, **changes}


# Name -> fields of `TinyModel`; of `qwen3_5_moe`, `changes` are those of the text model.
LINEAR_MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "model_type": "qwen3_next",
        "changes": {
            "num_hidden_layers": 4,
            "rms_norm_eps": _EPSILON,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "shared_expert_intermediate_size": 28,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 10,
        },
    },
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        "changes": {
            "num_hidden_layers": 4,
            "rms_norm_eps": _EPSILON,
            "head_dim": 10,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "intermediate_size": 20,
            "shared_intermediate_size": 28,
            "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR],
            "mamba_n_heads": 8,
            "mamba_d_head": 12,
            "mamba_d_state": 10,
            "mamba_n_groups": 1,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.3,
            "logits_scaling": 1.7,
            "tie_word_embeddings": True,
        },
    },
    "granitemoehybrid_groups_rope": {
        "model_type": "granitemoehybrid",
        "changes": {
            "num_hidden_layers": 5,
            "rms_norm_eps": _EPSILON,
            "head_dim": 14,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "shared_intermediate_size": 36,
            "layer_types": [_FULL, _LINEAR, _LINEAR, _FULL, _LINEAR],
            "mamba_n_heads": 6,
            "mamba_d_head": 24,
            "mamba_expand": 3,
            "mamba_d_state": 14,
            "mamba_n_groups": 2,
            "mamba_d_conv": 3,
            "position_embedding_type": "rope",
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.15,
            "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
        },
        "shard_bytes": 60_000,
    },
    "qwen3_next_bias_dense_tied": {
        "model_type": "qwen3_next",
        "changes": {
            "num_hidden_layers": 5,
            "rms_norm_eps": _EPSILON,
            "num_experts": 9,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": 36,
            "attention_bias": True,
            "num_key_value_heads": 3,
            "mlp_only_layers": [1],
            "layer_types": [_FULL, _LINEAR, _LINEAR, _FULL, _LINEAR],
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 6,
            "linear_conv_kernel_dim": 3,
            "tie_word_embeddings": True,
            "rope_parameters": _rope(rope_theta=700.0, partial_rotary_factor=0.5),
        },
        "shard_bytes": 60_000,
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "changes": {
            "num_hidden_layers": 4,
            "rms_norm_eps": _EPSILON,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "shared_expert_intermediate_size": 28,
            "head_dim": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 14,
            "rope_parameters": _rope(mrope_section=[1, 1, 1]),
        },
    },
    "qwen3_5_moe_text_bias_tied": {
        "model_type": "qwen3_5_moe_text",
        "changes": {
            "num_hidden_layers": 4,
            "rms_norm_eps": _EPSILON,
            "num_experts": 10,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 44,
            "attention_bias": True,
            "num_key_value_heads": 1,
            "layer_types": [_LINEAR, _FULL, _FULL, _LINEAR],
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 2,
            "tie_word_embeddings": True,
            "rope_parameters": _rope(partial_rotary_factor=0.5, mrope_section=[2, 1, 1]),
        },
        "shard_bytes": 60_000,
    },
    # Latent attention in between; layers' types in a section that counts from 1.
    "kimi_linear": {
        "model_type": "kimi_linear",
        "changes": {
            **MLA_SIZES,
            "q_lora_rank": None,
            "num_hidden_layers": 4,
            "rms_norm_eps": _EPSILON,
            "num_local_experts": 12,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "linear_num_heads": 4,
            "linear_head_dim": 12,
            "layer_types": [_LINEAR, _LINEAR, _LINEAR, _FULL],
        },
    },
    "bailing_hybrid": {
        "model_type": "bailing_hybrid",
        "changes": {
            **MLA_SIZES,
            "q_lora_rank": None,
            "head_dim": 14,
            "num_hidden_layers": 4,
            "rms_norm_eps": _EPSILON,
            "num_local_experts": 12,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "layer_group_size": 2,
            "first_k_dense_replace": 1,
            "num_mtp_layers": 0,
        },
    },
    "bailing_hybrid_unbounded": {
        "model_type": "bailing_hybrid",
        "changes": {
            **MLA_SIZES,
            "q_lora_rank": None,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": 22,
            "qk_nope_head_dim": 12,
            "v_head_dim": 18,
            "head_dim": 20,
            "short_conv_kernel_size": 3,
            "num_hidden_layers": 5,
            "rms_norm_eps": 3 * _EPSILON,
            "num_local_experts": 9,
            "num_experts_per_tok": 4,
            "n_shared_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "kda_safe_gate": False,
            "layer_types": [_FULL, _LINEAR, _LINEAR, _FULL, _LINEAR],
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "sparse"],
            "num_mtp_layers": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
        },
        "shard_bytes": 60_000,
    },
    "kimi_linear_query_latent": {
        "model_type": "kimi_linear",
        "changes": {
            **MLA_SIZES,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": 22,
            "qk_nope_head_dim": 12,
            "v_head_dim": 18,
            "num_hidden_layers": 5,
            "rms_norm_eps": 3 * _EPSILON,
            "num_local_experts": 9,
            "num_experts_per_tok": 4,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "sparse"],
            "linear_num_heads": 2,
            "linear_head_dim": 20,
            "linear_conv_kernel_dim": 3,
            "layer_types": [_FULL, _LINEAR, _LINEAR, _FULL, _LINEAR],
        },
        "shard_bytes": 60_000,
    },
}
