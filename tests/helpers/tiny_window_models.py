"""Tiny configurations of families with windows, gates or several norms, for `tiny_models.TINY_MODELS`.

Windows are shorter than the prompts of the tests, and no two sizes that could be mistaken for one another are
alike.
"""

from __future__ import annotations

from typing import Any

_FULL, _SLIDING = "full_attention", "sliding_attention"
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}

# Name -> fields of `TinyModel`.
WINDOW_MODELS: dict[str, dict[str, Any]] = {
    "solar_open": {
        "model_type": "solar_open",
        "changes": {"n_routed_experts": 9, "num_experts_per_tok": 3, "rope_parameters": _YARN},
    },
    "solar_open_groups_bias_tied": {
        "model_type": "solar_open",
        "changes": {
            "n_routed_experts": 12,
            "num_experts_per_tok": 4,
            "n_shared_experts": 3,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "num_key_value_heads": 6,
            "tie_word_embeddings": True,
        },
        "shard_bytes": 60_000,
    },
    "exaone_moe": {
        "model_type": "exaone_moe",
        "changes": {
            "num_hidden_layers": 4,
            "num_experts": 9,
            "num_experts_per_tok": 3,
            "sliding_window": 5,
            "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING],
        },
    },
    "exaone_moe_groups_tied": {
        "model_type": "exaone_moe",
        "changes": {
            "num_experts": 12,
            "num_experts_per_tok": 4,
            "num_shared_experts": 3,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "sliding_window": 11,
            "layer_types": [_FULL, _SLIDING, _FULL],
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.3,
            "tie_word_embeddings": True,
            "rope_parameters": _YARN,
        },
        "shard_bytes": 60_000,
    },
    "hy_v3": {"model_type": "hy_v3", "changes": {"num_experts": 9, "num_experts_per_tok": 3}},
    "hy_v3_bias_tied": {
        "model_type": "hy_v3",
        "changes": {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 3,
            "mlp_layer_types": ["sparse", "sparse", "dense"],
            "router_scaling_factor": 1.4,
            "attention_bias": True,
            "enable_moe_fp32_combine": False,
            "num_key_value_heads": 6,
            "tie_word_embeddings": True,
            "rope_parameters": _YARN,
        },
        "shard_bytes": 60_000,
    },
    "afmoe": {
        "model_type": "afmoe",
        "changes": {
            "num_hidden_layers": 4,
            "num_experts": 9,
            "num_experts_per_tok": 3,
            "sliding_window": 5,
            "global_attn_every_n_layers": 2,
            "mup_enabled": True,
            "route_scale": 2.826,
        },
    },
    "afmoe_two_dense_tied": {
        "model_type": "afmoe",
        "changes": {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "num_dense_layers": 2,
            "num_key_value_heads": 6,
            "sliding_window": 11,
            "layer_types": [_FULL, _SLIDING, _SLIDING],
            "tie_word_embeddings": True,
            "rope_parameters": _YARN,
        },
        "shard_bytes": 60_000,
    },
    "laguna": {
        "model_type": "laguna",
        "changes": {
            "num_hidden_layers": 4,
            "num_experts": 9,
            "num_experts_per_tok": 3,
            "shared_expert_intermediate_size": 28,
            "sliding_window": 5,
            "layer_types": [_FULL, _SLIDING, _SLIDING, _FULL],
            "num_attention_heads_per_layer": [6, 10, 10, 6],
            "gating": "per-head",
            "attention_bias": True,
            "moe_routed_scaling_factor": 2.5,
            "moe_router_logit_softcapping": 0.8,
            "rope_parameters": {
                _FULL: _YARN | {"partial_rotary_factor": 0.5, "attention_factor": 1.2},
                _SLIDING: {"rope_type": "default", "rope_theta": 3000.0, "partial_rotary_factor": 1.0},
            },
        },
    },
    "laguna_element_gates_tied": {
        "model_type": "laguna",
        "changes": {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 36,
            "sliding_window": 11,
            "layer_types": [_SLIDING, _FULL, _SLIDING],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "gating": "per-element",
            "tie_word_embeddings": True,
        },
        "shard_bytes": 60_000,
    },
    "granitemoe_swa": {
        "model_type": "granitemoe_swa",
        "changes": {
            "num_hidden_layers": 4,
            "intermediate_size": 20,
            "shared_intermediate_size": 28,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "sliding_window": 5,
            # No rotation in one layer, another base in the next.
            "layer_rope_theta": [0.0, 3000.0, 10000.0, 10000.0],
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "granitemoe_swa_no_shared_bias_tied": {
        "model_type": "granitemoe_swa",
        "changes": {
            "head_dim": 10,
            "num_key_value_heads": 3,
            "intermediate_size": 28,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
            "layer_types": [_SLIDING, _FULL, _SLIDING],
            "attention_bias": True,
            "attention_multiplier": 0.15,
            "embedding_multiplier": 2.0,
            "logits_scaling": 1.7,
            "tie_word_embeddings": True,
            "rope_parameters": _YARN,
        },
        "shard_bytes": 60_000,
    },
    # Layers that slide have twice the KV heads.
    "mimo_v2_flash": {
        "model_type": "mimo_v2_flash",
        "changes": {
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "head_dim": 20,
            "v_head_dim": 12,
            "n_routed_experts": 9,
            "num_experts_per_tok": 3,
            "sliding_window": 5,
            "layer_types": [_FULL, _SLIDING, _SLIDING, _FULL],
            "rope_parameters": {
                _FULL: {"rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.4},
                _SLIDING: {"rope_type": "default", "rope_theta": 3000.0, "partial_rotary_factor": 0.6},
            },
        },
    },
    "mimo_v2_flash_bias_tied": {
        "model_type": "mimo_v2_flash",
        "changes": {
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "v_head_dim": 16,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "mlp_layer_types": ["sparse", "sparse", "dense"],
            "sliding_window": 11,
            "layer_types": [_SLIDING, _FULL, _SLIDING],
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.7,
            "attention_value_scale": None,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                _FULL: _YARN | {"partial_rotary_factor": 0.5},
                _SLIDING: {"rope_type": "default", "rope_theta": 3000.0, "partial_rotary_factor": 1.0},
            },
        },
        "shard_bytes": 60_000,
    },
    # The last layer sees the whole context.
    "gemma4_text": {
        "model_type": "gemma4_text",
        "changes": {
            "num_hidden_layers": 4,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 9,
            "top_k_experts": 3,
            "sliding_window": 5,
            "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL],
            "global_head_dim": 24,
            "attention_bias": True,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 3.0,
        },
    },
    "gemma4_text_own_values_untied": {
        "model_type": "gemma4_text",
        "changes": {
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "num_key_value_heads": 3,
            "sliding_window": 11,
            "layer_types": [_FULL, _SLIDING, _FULL],
            "global_head_dim": 12,
            "tie_word_embeddings": False,
            "rope_parameters": {
                _FULL: {"rope_type": "proportional", "rope_theta": 3000.0, "partial_rotary_factor": 0.5},
                _SLIDING: {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        "shard_bytes": 60_000,
    },
}
