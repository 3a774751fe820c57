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
}
