"""Tiny configurations that can be divided over two or four ranks, for tests of groups."""

from __future__ import annotations

from tests.helpers.tiny_models import TINY_MODELS, TinyModel

# Eight query heads over two KV heads: with four ranks each KV head is held twice. 211 tokens divide by
# neither two nor four.
MODELS = {
    "qwen3_bias_tied": TinyModel(
        "qwen3_moe",
        {
            "num_hidden_layers": 4,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "num_attention_heads": 8,
            "attention_bias": True,
            "mlp_only_layers": [1],
            "tie_word_embeddings": True,
        },
    ),
    "dense": TinyModel(
        "qwen3_moe",
        {"num_experts": 2, "num_experts_per_tok": 1, "num_attention_heads": 4, "mlp_only_layers": [0, 1, 2]},
    ),
    "glm4_shared": TinyModel(
        "glm4_moe",
        {
            "n_routed_experts": 6,
            "num_mtp_layers": 0,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "norm_topk_prob": True,
        },
    ),
    "glm_sparse_dense": TinyModel(
        "glm_moe_dsa",
        TINY_MODELS["glm_moe_dsa_shared_groups_biased_tied"].changes | {"first_k_dense_replace": 4},
    ),
    "gpt_oss": TinyModel(
        "gpt_oss",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "num_attention_heads": 8, "sliding_window": 5},
    ),
    "minimax": TinyModel(
        "minimax_m2",
        {"num_experts_per_tok": 3, "num_local_experts": 6, "num_attention_heads": 8, "rotary_dim": 8},
    ),
    # Each KV head chooses blocks, in the second layer only.
    "minimax_blocks": TinyModel(
        "minimax_m3_vl",
        TINY_MODELS["minimax_m3_vl"].changes
        | {"num_attention_heads": 8, "num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}
        | {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    ),
    # Eight heads in one layer, four in those that slide; clamps of both kinds of experts.
    "step_differing_heads": TinyModel(
        "step3p5",
        {
            "num_attention_heads": 8,
            "moe_num_experts": 6,
            "moe_top_k": 2,
            "share_expert_dim": 20,
            "moe_layers_enum": "1,2",
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "sliding_window": 5,
            "attention_other_setting": {"num_attention_heads": 4},
            "rope_theta": [5e5, 1e4, 1e4],
            "partial_rotary_factors": [0.5, 1.0, 1.0],
            "swiglu_limits": [0.0, 0.5, 0.0],
            "swiglu_limits_shared": [0.4, 0.0, 0.6],
            "rms_norm_eps": 1e-5,
        },
    ),
    "qwen2_shared_gate": TinyModel(
        "qwen2_moe", {"num_experts": 6, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 30}
    ),
}
MODELS |= {
    name: TinyModel("qwen3_next" if "mixed" in name else "qwen3_5_moe_text", changes)
    for name, changes in {
        "linear_mixed_projections": {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 28,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 10,
            "rms_norm_eps": 1e-3,
        },
        "linear_apart": TINY_MODELS["qwen3_5_moe_text_bias_tied"].changes,
    }.items()
}
# Both stages embed n-grams and choose blocks, which all ranks do alike.
MODELS |= {
    "ngrams_and_streams": TinyModel(
        "qwen4_exp_text",
        TINY_MODELS["qwen4_exp_text_three_streams_bias_tied"].changes | {"num_key_value_heads": 2},
    )
}
# Of the second, every layer chooses eight tokens by itself, and all ranks have to choose alike.
MODELS |= {"latent_and_linear": TINY_MODELS["kimi_linear_query_latent"]}
# Layers with two attentions, of which each stage has one; of what has no weights, one rank's sum counts.
MODELS |= {"shortcut": TINY_MODELS["longcat_flash"]}
# Sinks and gates of elements are those of a rank's heads; streams, and index keys, are every rank's.
MODELS |= {"latent_with_sinks": TINY_MODELS["hy_v4_three_streams_groups_tied"]}
# Learned growth is of a rank's heads; learned frequencies are every stage's.
MODELS |= {"latents_shared": TINY_MODELS["mistral_large4"]}
# With which weights streams are read, one stage computes for the next; entries are every rank's. Without
# n-grams, which are hashed by a tokenizer of the model's own.
MODELS |= {
    "entries_shared": TinyModel(
        "deepseek_v41", TINY_MODELS["deepseek_v41_three_streams_tied"].changes | {"engram_layer_ids": []}
    )
}
MODELS |= {"latent": TINY_MODELS["deepseek_v3"], "latent_choosing": TINY_MODELS["deepseek_v32"]}
# Convolutions are of a rank's channels; the norm after lightning attention is over all ranks' heads.
MODELS |= {"short_convolutions": TINY_MODELS["lfm2_moe"], "lightning": TINY_MODELS["minimax_window_tied"]}
# The head's bias is divided as its rows; halves of a layer, of which experts begin first.
MODELS |= {"head_bias": TINY_MODELS["phimoe"], "parallel_halves": TINY_MODELS["cohere2_moe"]}
