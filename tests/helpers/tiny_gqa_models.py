"""Tiny configurations of families with grouped-query attention, for `tiny_models.TINY_MODELS`."""

from __future__ import annotations

from typing import Any

_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}

# Name -> fields of `TinyModel`.
GQA_MODELS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "changes": {"num_experts": 8, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 28},
    },
    "qwen2_moe_renormalized_dense_tied": {
        "model_type": "qwen2_moe",
        "changes": {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 36,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 2,
            "mlp_only_layers": [2],
            "tie_word_embeddings": True,
            "rope_parameters": _YARN,
        },
        "shard_bytes": 60_000,
    },
    "mixtral": {"model_type": "mixtral", "changes": {"num_local_experts": 6, "num_experts_per_tok": 2}},
    "mixtral_tied_multi_head": {
        "model_type": "mixtral",
        "changes": {
            "intermediate_size": 28,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "num_key_value_heads": 6,
            "sliding_window": 9,
            "tie_word_embeddings": True,
            "rope_parameters": _YARN,
        },
        "shard_bytes": 60_000,
    },
    # Experts and the shared MLP are as wide as `intermediate_size` says.
    "hunyuan_v1_moe": {
        "model_type": "hunyuan_v1_moe",
        "changes": {
            "intermediate_size": 28,
            "moe_intermediate_size": 28,
            "num_experts": 7,
            "moe_topk": 3,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 10000.0,
                "alpha": 50.0,
                "factor": 1.0,
            },
        },
    },
    "hunyuan_v1_moe_lists_bias_tied": {
        "model_type": "hunyuan_v1_moe",
        "changes": {
            "intermediate_size": 36,
            "moe_intermediate_size": [36, 36, 36],
            "num_experts": 5,
            "moe_topk": [2, 2, 2],
            "num_shared_expert": [1, 1, 1],
            "attention_bias": True,
            "num_key_value_heads": 6,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        },
        "shard_bytes": 60_000,
    },
    # The family's head is the hidden size divided by the heads.
    "olmoe": {
        "model_type": "olmoe",
        "changes": {"head_dim": 8, "num_experts": 8, "num_experts_per_tok": 3, "num_key_value_heads": 6},
    },
    "olmoe_renormalized_bias_tied": {
        "model_type": "olmoe",
        "changes": {
            "head_dim": 8,
            "intermediate_size": 28,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "attention_bias": True,
            "clip_qkv": 0.7,
            "tie_word_embeddings": True,
        },
    },
    # Heads are as wide as hidden size and heads say, unless the configuration names another width.
    "granitemoe": {
        "model_type": "granitemoe",
        "changes": {
            "intermediate_size": 20,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.3,
            "logits_scaling": 1.7,
        },
    },
    "granitemoe_bias_tied": {
        "model_type": "granitemoe",
        "changes": {
            "head_dim": 8,
            "num_key_value_heads": 3,
            "intermediate_size": 28,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "attention_multiplier": 0.2,
            "tie_word_embeddings": True,
            "rope_parameters": _YARN,
        },
        "shard_bytes": 60_000,
    },
    "granitemoeshared": {
        "model_type": "granitemoeshared",
        "changes": {
            "head_dim": 10,
            "intermediate_size": 24,
            "shared_intermediate_size": 36,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.25,
            "logits_scaling": 0.8,
        },
    },
    "flex_olmo": {
        "model_type": "flex_olmo",
        "changes": {"intermediate_size": 20, "num_experts": 7, "num_experts_per_tok": 3},
    },
    "flex_olmo_renormalized_bias": {
        "model_type": "flex_olmo",
        "changes": {
            "head_dim": 10,
            "intermediate_size": 28,
            "num_key_value_heads": 6,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "attention_bias": True,
            "rope_parameters": _YARN,
        },
        "shard_bytes": 60_000,
    },
    "dots1": {
        "model_type": "dots1",
        "changes": {
            "n_routed_experts": 9,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "attention_bias": True,
        },
    },
    "dots1_groups_tied": {
        "model_type": "dots1",
        "changes": {
            "n_routed_experts": 12,
            "num_experts_per_tok": 4,
            "n_shared_experts": 3,
            "n_group": 4,
            "topk_group": 2,
            "sliding_window": 7,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
            "rope_parameters": _YARN,
        },
    },
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        "changes": {"moe_num_experts": 9, "moe_k": 3, "moe_num_shared_experts": 2},
    },
    "ernie4_5_moe_interval_untied": {
        "model_type": "ernie4_5_moe",
        "changes": {
            "num_hidden_layers": 5,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_num_shared_experts": 0,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 3,
            "moe_layer_interval": 2,
            "tie_word_embeddings": False,
            "rope_parameters": _YARN,
        },
        "shard_bytes": 60_000,
    },
    "minimax_m2": {
        "model_type": "minimax_m2",
        "changes": {"num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 8},
    },
    "minimax_m2_rotated_whole_tied": {
        "model_type": "minimax_m2",
        "changes": {
            "intermediate_size": 28,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
            "rope_parameters": _YARN,
        },
        "shard_bytes": 60_000,
    },
    # The experts that are hardly worse than the best are several, as published numbers would have none.
    "phimoe": {
        "model_type": "phimoe",
        "changes": {
            "intermediate_size": 28,
            "num_local_experts": 7,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.3,
            "attention_bias": True,
            "lm_head_bias": True,
        },
    },
    "phimoe_longrope_window_tied": {
        "model_type": "phimoe",
        "changes": {
            "intermediate_size": 36,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.05,
            "num_key_value_heads": 6,
            "head_dim": 12,
            "sliding_window": 9,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "original_max_position_embeddings": 512,
                "short_factor": [1.0 + 0.1 * pair for pair in range(6)],
                "long_factor": [1.0 + 1.5 * pair for pair in range(6)],
                "short_mscale": 1.2,
                "long_mscale": 1.2,
            },
        },
        "shard_bytes": 60_000,
    },
}
