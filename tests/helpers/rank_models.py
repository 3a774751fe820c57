"""Tiny configurations that can be divided over two or four ranks, for tests of groups."""

from __future__ import annotations

from tests.helpers.tables import read_table
from tests.helpers.tiny_models import TINY_MODELS, TinyModel, read_models

MODELS = read_models(read_table("tiny_rank_models.yaml"))


def _changed(name: str, **changes: object) -> TinyModel:
    tiny = TINY_MODELS[name]
    return TinyModel(tiny.model_type, tiny.changes | changes)


MODELS |= {
    "glm_sparse_dense": _changed("glm_moe_dsa_shared_groups_biased_tied", first_k_dense_replace=4),
    # Each KV head chooses blocks, in the second layer only.
    "minimax_blocks": _changed(
        "minimax_m3_vl",
        num_attention_heads=8,
        num_hidden_layers=2,
        mlp_layer_types=["dense", "sparse"],
        layer_types=["full_attention", "minimax_m3_sparse"],
    ),
    "linear_apart": _changed("qwen3_5_moe_text_bias_tied"),
    # Both stages embed n-grams and choose blocks, which all ranks do alike.
    "ngrams_and_streams": _changed("qwen4_exp_text_three_streams_bias_tied", num_key_value_heads=2),
    # Every layer chooses eight tokens by itself, and all ranks have to choose alike.
    "latent_and_linear": TINY_MODELS["kimi_linear_query_latent"],
    # Layers with two attentions, of which each stage has one; of what has no weights, one rank's sum counts.
    "shortcut": TINY_MODELS["longcat_flash"],
    # Sinks and gates of elements are those of a rank's heads; streams, and index keys, are every rank's.
    "latent_with_sinks": TINY_MODELS["hy_v4_three_streams_groups_tied"],
    # Learned growth is of a rank's heads; learned frequencies are every stage's.
    "latents_shared": TINY_MODELS["mistral_large4"],
    # With which weights streams are read, one stage computes for the next; entries are every rank's. Without
    # n-grams, which are hashed by a tokenizer of the model's own.
    "entries_shared": _changed("deepseek_v41_three_streams_tied", engram_layer_ids=[]),
    "latent": TINY_MODELS["deepseek_v3"],
    "latent_choosing": TINY_MODELS["deepseek_v32"],
    # Convolutions are of a rank's channels; the norm after lightning attention is over all ranks' heads.
    "short_convolutions": TINY_MODELS["lfm2_moe"],
    "lightning": TINY_MODELS["minimax_window_tied"],
    # The head's bias is divided as its rows; halves of a layer, of which experts begin first.
    "head_bias": TINY_MODELS["phimoe"],
    "parallel_halves": TINY_MODELS["cohere2_moe"],
}
