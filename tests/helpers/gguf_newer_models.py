"""Tiny models of architectures that the package `gguf` does not know, for `gguf_models.CASES`."""

from __future__ import annotations

from typing import Any

from tests.helpers.gguf_files import GgufTypes

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
_LATENT: dict[str, Any] = _SIZES | {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_mtp_layers": 0,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 6,
    "attention_bias": False,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_GROUPS = {"n_group": 4, "topk_group": 2}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
# Hyper-connections magnify what rounds.
_STREAMS = {"hc_mult": 4, "rms_norm_eps": 3e-2}
_QUANTISED = GgufTypes("Q4_0", "Q8_0", "Q8_0")
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"

_GRANITE: dict[str, Any] = _SIZES | {
    "intermediate_size": 32,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.25,
    "logits_scaling": 2.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}

# Name -> fields of `GgufModelCase`.
NEWER_CASES: dict[str, dict[str, Any]] = {
    "deepseek_v32": {
        "model_type": "deepseek_v32",
        "types": _QUANTISED,
        "changes": _LATENT
        | _GROUPS
        | {
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
        },
        "prediction_layer": True,
    },
    "deepseek_v4": {
        "model_type": "deepseek_v4",
        "types": GgufTypes("MXFP4", "MXFP4", "Q8_0"),
        "changes": _SIZES
        | _STREAMS
        | {
            "intermediate_size": 32,
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "q_lora_rank": 32,
            "partial_rotary_factor": 0.25,
            "layer_types": [_SLIDING, _SPARSE, _HEAVY, _SPARSE],
            "sliding_window": 6,
            "o_groups": 2,
            "o_lora_rank": 16,
            "index_n_heads": 16,
            "index_head_dim": 32,
            "index_topk": 3,
            "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "swiglu_limit": 0.7,
            "rope_parameters": _YARN | {"rope_theta": 10000.0},
        },
    },
    "glm5_next": {
        "model_type": "glm5_next",
        "types": _QUANTISED,
        "changes": _LATENT
        | _STREAMS
        | _ONE_GROUP
        | {
            "head_dim": 0,
            "qk_rope_head_dim": 0,
            "num_hidden_layers": 4,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "routed_scaling_factor": 2.5,
            "swiglu_limit": 0.7,
            "linear_num_heads": 2,
            "linear_head_dim": 32,
            "index_kpool": 3,
        },
        "prediction_layer": True,
    },
    # As the first published files have it, without keys that came later.
    "glm5_next_by_its_first_name": {
        "model_type": "glm5_next",
        "types": GgufTypes("F32", "F32", "F32"),
        "changes": _LATENT
        | _STREAMS
        | _ONE_GROUP
        | {
            "head_dim": 0,
            "qk_rope_head_dim": 0,
            "num_hidden_layers": 4,
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "linear_num_heads": 3,
            "linear_head_dim": 16,
            "index_kpool": 2,
        },
        "architecture": "glm5next",
    },
    "bailing_hybrid": {
        "model_type": "bailing_hybrid",
        "types": _QUANTISED,
        "changes": _LATENT
        | _GROUPS
        | {
            "q_lora_rank": None,
            "head_dim": 32,
            "num_hidden_layers": 4,
            "rms_norm_eps": 3e-3,
            "num_local_experts": 8,
            "layer_group_size": 2,
            "first_k_dense_replace": 1,
            "kda_lower_bound": -4.0,
        },
        "prediction_layer": True,
    },
    "granitemoeshared": {
        "model_type": "granitemoeshared",
        "types": _QUANTISED,
        "changes": _GRANITE | {"shared_intermediate_size": 64, "tie_word_embeddings": True},
    },
    "granitemoe": {
        "model_type": "granitemoeshared",
        "types": GgufTypes("F32", "F32", "F32"),
        "changes": _GRANITE | {"num_key_value_heads": 4},
    },
    "granitemoe_swa": {
        "model_type": "granitemoe_swa",
        "types": _QUANTISED,
        "changes": _GRANITE
        | {
            "shared_intermediate_size": 64,
            "sliding_window": 5,
            "layer_types": [_SLIDING, _FULL, _SLIDING],
            "layer_rope_theta": [10000.0, 0.0, 10000.0],
        },
    },
    "hy_v3": {
        "model_type": "hy_v3",
        "types": _QUANTISED,
        "changes": _SIZES
        | {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "router_scaling_factor": 1.4,
        },
        "prediction_layer": True,
    },
    "hy_v4": {
        "model_type": "hy_v4",
        "types": _QUANTISED,
        "changes": _LATENT
        | _STREAMS
        | _ONE_GROUP
        | {
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "indexer_types": ["full", "full", "shared"],
            "swiglu_limit": 0.7,
            "hc_magnitude": 1.25,
        },
    },
    "laguna": {
        "model_type": "laguna",
        "types": _QUANTISED,
        "changes": _SIZES
        | {
            "num_hidden_layers": 5,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 64,
            "sliding_window": 5,
            "layer_types": [_FULL, _SLIDING, _SLIDING, _SLIDING, _FULL],
            "num_attention_heads_per_layer": [4, 6, 6, 6, 4],
            "gating": "per-head",
            "moe_routed_scaling_factor": 2.5,
            "rope_parameters": {
                _FULL: _YARN | {"partial_rotary_factor": 0.5},
                _SLIDING: {"rope_type": "default", "rope_theta": 3000.0, "partial_rotary_factor": 1.0},
            },
        },
    },
    "laguna_element_gates": {
        "model_type": "laguna",
        "types": GgufTypes("F32", "F32", "F32"),
        "changes": _SIZES
        | {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 32,
            "layer_types": [_FULL] * 3,
            "num_attention_heads_per_layer": [4, 4, 4],
            "mlp_layer_types": ["dense", "dense", "sparse"],
            "gating": "per-element",
            "rope_parameters": {
                _FULL: {"rope_type": "default", "rope_theta": 9000.0, "partial_rotary_factor": 1.0}
            },
        },
    },
    "cohere2_moe": {
        "model_type": "cohere2_moe",
        "types": _QUANTISED,
        "changes": _SIZES
        | {
            "intermediate_size": 32,
            "prefix_dense_intermediate_size": 96,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-5,
            "logit_scale": 0.8,
            "first_k_dense_replace": 1,
            "sliding_window": 5,
            "layer_types": [_FULL, _SLIDING, _FULL],
            "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0},
        },
    },
    "cohere2_moe_shared": {
        "model_type": "cohere2_moe",
        "types": GgufTypes("F32", "F32", "F32"),
        "changes": _SIZES
        | {
            "intermediate_size": 32,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "expert_selection_fn": "sigmoid",
            "logit_scale": 0.5,
            "sliding_window": 4,
            "layer_types": [_SLIDING, _SLIDING, _FULL],
            "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0},
        },
    },
    "mellum": {
        "model_type": "mellum",
        "types": _QUANTISED,
        "changes": _SIZES
        | {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "layer_types": [_SLIDING, _FULL, _SLIDING],
            "rope_parameters": {
                _FULL: _YARN,
                _SLIDING: {"rope_type": "default", "rope_theta": 3000.0},
            },
        },
    },
    # Every layer that is not dense chooses blocks, and experts are as wide as the shared one.
    "minimax_m3_vl": {
        "model_type": "minimax_m3_vl",
        "types": _QUANTISED,
        "changes": _SIZES
        | {
            "intermediate_size": 32,
            "dense_intermediate_size": 96,
            "shared_intermediate_size": 32,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "layer_types": [_FULL, *["minimax_m3_sparse"] * 2],
            "rotary_dim": 8,
            "routed_scaling_factor": 1.3,
            "index_n_heads": 2,
            "index_head_dim": 32,
            "index_block_size": 3,
            "index_topk_blocks": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        },
    },
}
