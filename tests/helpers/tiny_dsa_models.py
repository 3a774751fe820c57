"""Tiny configurations of the families with sparse attention, for `tiny_models.TINY_MODELS`.

`index_topk` is far below the tests' contexts, so that tokens are left out in most steps. The indexers have
many heads: where all of them say zero, tokens are equal, and which one transformers then takes is nowhere
written.
"""

from __future__ import annotations

from typing import Any

from tests.helpers.tiny_mla_models import MLA_SIZES, MLA_YARN

# Name -> fields of `TinyModel`.
DSA_MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v32": {
        "model_type": "deepseek_v32",
        "changes": {
            **MLA_SIZES,
            "index_n_heads": 16,
            "index_head_dim": 12,
            "index_topk": 8,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "attention_bias": False,
            "rope_parameters": MLA_YARN,
        },
    },
    "deepseek_v32_listed_layers_biased_tied": {
        "model_type": "deepseek_v32",
        "changes": {
            **MLA_SIZES,
            "q_lora_rank": 20,
            "kv_lora_rank": 22,
            "qk_nope_head_dim": 12,
            "v_head_dim": 9,
            # The whole key is rotated.
            "index_n_heads": 20,
            "index_head_dim": 8,
            "index_topk": 5,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "n_routed_experts": 9,
            "num_experts_per_tok": 4,
            "n_shared_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "attention_bias": True,
            "rms_norm_eps": 1e-4,
            "tie_word_embeddings": True,
        },
        "shard_bytes": 60_000,
    },
    "glm_moe_dsa": {
        "model_type": "glm_moe_dsa",
        "changes": {
            **MLA_SIZES,
            "index_n_heads": 12,
            "index_head_dim": 18,
            "index_topk": 7,
            "n_routed_experts": 10,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "attention_bias": False,
        },
    },
    "glm_moe_dsa_shared_groups_biased_tied": {
        "model_type": "glm_moe_dsa",
        "changes": {
            **MLA_SIZES,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 30,
            "v_head_dim": 18,
            "index_n_heads": 18,
            "index_head_dim": 10,
            "index_topk": 6,
            "indexer_types": ["full", "shared", "full", "shared"],
            "first_k_dense_replace": 0,
            "n_routed_experts": 12,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": MLA_YARN,
        },
        "shard_bytes": 60_000,
    },
}
