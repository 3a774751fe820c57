"""Qwen3.8-Flash-Next (`qwen4_exp`): linear attention, attention to chosen blocks of tokens in a quarter of
the layers, gated residual streams, and embeddings of n-grams from a large table. Text and images.

Sources: configuration, model and checkpoint conversion of transformers 5.23; the published model's
configuration in public tests.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moebius.models.attention_config import BlockIndexerConfig, HyperConnectionConfig, NGramConfig
from moebius.models.common import FULL, read_common, read_mtp_layers, read_softmax_router
from moebius.models.config import ModelConfig, RopeConfig
from moebius.models.families.qwen3_next import (
    LINEAR,
    MTP_KEYS,
    SECTIONS,
    read_gated_moe,
    read_linear_attention,
)
from moebius.models.family import Family, VisionFamily
from moebius.models.keys import HfKeys
from moebius.models.names import MTP, SHARED, TEXT, TEXT_SHARED, VISION, VISUAL, TensorNames, drop, rename
from moebius.models.rope import read_rope
from moebius.models.vision import read_grid_vision

_INDEXED = "indexed_attention"
_DEFAULT_SIZE, _DEFAULT_SEED = 3, 1234
# Of training, of states, which are float32 here, of the order that other keys give, and of prediction.
_HARMLESS = (
    "mamba_ssm_dtype",
    "mtp",
    "mtp_use_dedicated_embeddings",
    "number_of_conv_states",
)


def _read_linear(hf: HfKeys, common: dict[str, Any]) -> Any:
    """Layers that attend are called either way."""
    kinds = [FULL if kind == _INDEXED else kind for kind in hf.strings("layer_types")]
    linear = read_linear_attention(
        hf.with_values(layer_types=kinds or None), common["num_layers"], interleaved=False
    )
    gate = hf.string("output_gate_type", default=common["activation"])
    if gate not in ("sigmoid", "silu", "swish"):
        raise hf.error("output_gate_type", gate, "sigmoid, silu")
    return linear, gate == "sigmoid"


def _read_blocks(hf: HfKeys, layers: frozenset[int], rope: RopeConfig) -> BlockIndexerConfig:
    """Raises ModelConfigError where the indexer's sizes contradict one another."""
    if hf.integer("indexer_kv_heads") != 1:
        raise hf.error("indexer_kv_heads", hf.integer("indexer_kv_heads"), "1")
    head_dim, budget = hf.integer("indexer_head_dim"), hf.integer("indexer_budget")
    ratio = hf.integer("indexer_compress_ratio")
    if budget % ratio:
        raise hf.error("indexer_budget", budget, f"a multiple of indexer_compress_ratio ({ratio})")
    if rope.rotary_dim > head_dim:
        raise hf.error("indexer_head_dim", head_dim, f"at least what is rotated ({rope.rotary_dim})")
    return BlockIndexerConfig(
        head_dim=head_dim,
        block_size=ratio,
        top_blocks=budget // ratio,
        local_blocks=0,
        layers=layers,
        shared_heads=hf.integer("indexer_n_heads"),
        rotary_dim=rope.rotary_dim,
    )


def _read_ngrams(hf: HfKeys, common: dict[str, Any], linear: frozenset[int]) -> NGramConfig | None:
    """Layers are counted from 1. Raises ModelConfigError as `_read_blocks`."""
    layers = tuple(sorted({layer - 1 for layer in hf.integers("ple_layer_ids")}))
    ends = hf.integers("eos_token_id")
    found = NGramConfig(
        layers=layers,
        size=hf.integer("ngram_size", default=_DEFAULT_SIZE, minimum=2),
        heads=hf.integer("heads_per_ngram", default=8),
        embed_dim=hf.integer("ple_embed_dim", default=common["hidden_size"]),
        vocab_base=hf.integer("ngram_vocab_size_base", default=20_000_000, minimum=2),
        padded_to=hf.integer("make_ngram_vocab_size_divisible_by", default=128),
        parts=hf.integer("split_ngram_parts", default=512),
        seed=hf.integer("seed", default=_DEFAULT_SEED, minimum=0),
        end_token_id=ends[0] if ends else 0,
        conv_taps=hf.integer("ple_conv_kernel_size", default=4, minimum=2),
    )
    if not layers:
        return None
    if not ends:
        raise hf.error("eos_token_id", None, "a token, which no n-gram reaches beyond")
    if not set(layers) <= linear:
        allowed = f"layers of {LINEAR}, counted from 1"
        raise hf.error("ple_layer_ids", [layer + 1 for layer in layers], allowed)
    if found.embed_dim % found.num_hashes:
        allowed = f"a multiple of (ngram_size - 1) * heads_per_ngram ({found.num_hashes})"
        raise hf.error("ple_embed_dim", found.embed_dim, allowed)
    if found.padded_to % found.parts:
        allowed = f"a divisor of make_ngram_vocab_size_divisible_by ({found.padded_to})"
        raise hf.error("split_ngram_parts", found.parts, allowed)
    return found


def read_qwen4_exp(hf: HfKeys) -> ModelConfig:
    """The language model: every layer is MoE, and a token has three positions."""
    hf.skip("intermediate_size", *_HARMLESS)
    hf.refuse("mlp_only_layers", [])
    if not hf.boolean("attn_output_gate", default=True):
        raise hf.error("attn_output_gate", False, "true")
    common = read_common(hf, dense_size=0)
    linear, sigmoid_gates = _read_linear(hf, common)
    rope = read_rope(hf, common["head_dim"], mrope=SECTIONS)
    every = frozenset(range(common["num_layers"]))
    return ModelConfig(
        **common,
        model_type=hf.string("model_type"),
        rope=rope,
        moe=read_gated_moe(hf, read_softmax_router(hf, renormalizes=True), every),
        qk_norm=True,
        output_gate=True,
        output_bias=common["attention_bias"],
        one_plus_weight_norms=True,
        linear=replace(linear, sigmoid_gates=sigmoid_gates),
        block_indexer=_read_blocks(hf, every - linear.layers, rope),
        hyper=HyperConnectionConfig(
            num_streams=hf.integer("hc_count", default=4, minimum=2),
            iterations=0,
            eps=0.0,
            rank=hf.integer("hc_lowrank", default=320),
        ),
        ngram=_read_ngrams(hf, common, linear.layers),
        num_mtp_layers=read_mtp_layers(hf, *MTP_KEYS),
    )


# What is mixed last stands in the place of the last norm, and what follows from config.json is computed.
_OWN = tuple(
    rule
    for prefix in ("model.language_model.", "model.")
    for rule in (
        rename(f"{prefix}hyper_connection_mixer.**", "model.norm.**"),
        drop(f"{prefix}layers.*.ple.ple_embedding.layer_multipliers"),
        drop(f"{prefix}layers.*.ple.ple_embedding.ngram_heads_vocab_sizes"),
        drop(f"{prefix}layers.*.ple.ple_embedding.ngram_heads_offsets"),
    )
)
_NAMES = TensorNames(
    (MTP, VISION, *_OWN, TEXT_SHARED, TEXT, SHARED), ("fused", "per_expert"), mtp_layers=True
)

FAMILIES = (
    Family(
        "qwen4_exp",
        read_qwen4_exp,
        _NAMES,
        VisionFamily(read_grid_vision, (VISUAL,), tower="Qwen4Exp", processor="qwen"),
    ),
    Family("qwen4_exp_text", read_qwen4_exp, _NAMES),
)
