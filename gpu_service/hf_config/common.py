"""What all families' config.json have in common."""

from __future__ import annotations

from typing import Any

from gpu_service.hf_config.keys import HfKeys
from gpu_service.ops.activation import GATED_ACTIVATIONS

# Keys that say nothing about the function the model computes at inference.
_HARMLESS = (
    "architectures",
    "attention_dropout",
    "auto_map",
    "initializer_range",
    "max_window_layers",
    "output_router_logits",
    "pad_token_id",
    # Of routed experts, which are not read here; the loader refuses dense weights that are not floats.
    "quantization_config",
    "router_aux_loss_coef",
    "transformers_version",
    "use_cache",
)

# What transformers 4 writes into nested configurations besides: settings of its own `generate` and of tasks.
_OF_GENERATE = (
    "_name_or_path",
    "add_cross_attention",
    "bad_words_ids",
    "begin_suppress_tokens",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "id2label",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "prefix",
    "problem_type",
    "pruned_heads",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torchscript",
    "typical_p",
    "use_bfloat16",
)

# Keys of relatives of these families that would change the function if they were set.
_REFUSED = (
    "attention_chunk_size",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
)


def read_common(hf: HfKeys, *, dense_size: int | None = None) -> dict[str, Any]:
    """Fields that all families spell alike; raises on features that no family here has.

    `dense_size`: the width of dense layers where a family says nothing of them.
    """
    hf.skip("model_type", *_HARMLESS, *_OF_GENERATE)
    for name in _REFUSED:
        hf.refuse(name)
    heads = hf.integer("num_attention_heads")
    kv_heads = hf.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise hf.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    hidden_size = hf.integer("hidden_size")
    activation = hf.string("hidden_act", default="silu")
    if activation not in GATED_ACTIVATIONS:
        raise hf.error("hidden_act", activation, ", ".join(sorted(GATED_ACTIVATIONS)))
    dtype = hf.string("dtype", "torch_dtype", default="bfloat16")
    bos = hf.integers("bos_token_id")
    return {
        "vocab_size": hf.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": hf.integer("intermediate_size") if dense_size is None else dense_size,
        "num_layers": hf.integer("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": hf.integer("head_dim", default=hidden_size // heads),
        "rms_norm_eps": hf.number("rms_norm_eps"),
        "activation": activation,
        "dtype": dtype,
        "max_model_len": hf.integer("max_position_embeddings"),
        "attention_bias": hf.boolean("attention_bias", default=False),
        "tie_word_embeddings": hf.boolean("tie_word_embeddings", default=False),
        "eos_token_ids": hf.integers("eos_token_id"),
        "bos_token_id": bos[0] if bos else None,
    }
