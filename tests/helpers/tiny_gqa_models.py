"""Tiny configurations of the families of `gpu_service/hf_gqa.py`, for `tiny_models.TINY_MODELS`."""

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
            "mlp_only_layers": [2],
            "tie_word_embeddings": True,
            "rope_parameters": _YARN,
        },
        "shard_bytes": 60_000,
    },
}
