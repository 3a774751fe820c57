"""Qwen3.8-Flash-Next (`qwen4_exp`): linear attention, attention to chosen blocks of tokens in a quarter of
the layers, gated residual streams, and embeddings of n-grams from a large table. Text and images.

Sources: configuration, model and checkpoint conversion of transformers 5.23; the published model's
configuration in public tests.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moebius.checkpoint.gguf.family import Config, GgufFamily
from moebius.checkpoint.gguf.names import GgufRule, gguf_layer, gguf_linear, gguf_top
from moebius.models.common import FULL, INDEXED, Common, read_common, read_mtp_layers, read_softmax_router
from moebius.models.config import ModelConfig
from moebius.models.families.qwen3_next import (
    LINEAR,
    LINEAR_KEYS,
    MTP_KEYS,
    RULES_3_5,
    SECTIONS,
    linear_of_three,
    read_gated_moe,
    read_linear_attention,
)
from moebius.models.family import Family, VisionFamily
from moebius.models.keys import HfKeys
from moebius.models.layers.gqa import BlockIndexer, Gate, QkNorm
from moebius.models.layers.ngrams import NGramConfig, NGrams, hash_factors, hash_primes
from moebius.models.layers.norms import RMSNorm
from moebius.models.layers.recurrent import GatedDeltaNet
from moebius.models.layers.residual import GatedStreams
from moebius.models.layers.rope import RopeConfig
from moebius.models.names import MTP, SHARED, TEXT, TEXT_SHARED, VISION, VISUAL, TensorNames, drop, rename
from moebius.models.rope import read_rope
from moebius.models.vision import read_grid_vision

if TYPE_CHECKING:
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

_DEFAULT_SIZE, _DEFAULT_SEED = 3, 1234
# Of training, of states, which are float32 here, of the order that other keys give, and of prediction.
_HARMLESS = (
    "mamba_ssm_dtype",
    "mtp",
    "mtp_use_dedicated_embeddings",
    "number_of_conv_states",
)


def _read_linear(hf: HfKeys, common: Common) -> tuple[GatedDeltaNet, frozenset[int]]:
    """Layers that attend are called either way."""
    kinds = [FULL if kind in INDEXED else kind for kind in hf.strings("layer_types")]
    linear, layers = read_linear_attention(
        hf.with_values(layer_types=kinds or None), common, interleaved=False
    )
    gate = hf.string("output_gate_type", default=common.activation)
    if gate not in ("sigmoid", "silu", "swish"):
        raise hf.error("output_gate_type", gate, "sigmoid, silu")
    return replace(linear, sigmoid_gates=gate == "sigmoid"), layers


def _read_blocks(hf: HfKeys, rope: RopeConfig, norm: RMSNorm) -> BlockIndexer:
    """Raises ModelConfigError where the indexer's sizes contradict one another."""
    if hf.integer("indexer_kv_heads") != 1:
        raise hf.error("indexer_kv_heads", hf.integer("indexer_kv_heads"), "1")
    head_dim, budget = hf.integer("indexer_head_dim"), hf.integer("indexer_budget")
    ratio = hf.integer("indexer_compress_ratio")
    if budget % ratio:
        raise hf.error("indexer_budget", budget, f"a multiple of indexer_compress_ratio ({ratio})")
    if rope.rotary_dim > head_dim:
        raise hf.error("indexer_head_dim", head_dim, f"at least what is rotated ({rope.rotary_dim})")
    return BlockIndexer(
        head_dim=head_dim,
        block_size=ratio,
        top_blocks=budget // ratio,
        local_blocks=0,
        norm=norm,
        shared_heads=hf.integer("indexer_n_heads"),
        rotary_dim=rope.rotary_dim,
    )


def _read_ngrams(hf: HfKeys, common: Common, linear: frozenset[int]) -> NGramConfig | None:
    """Layers are counted from 1. Raises ModelConfigError as `_read_blocks`."""
    layers = tuple(sorted({layer - 1 for layer in hf.integers("ple_layer_ids")}))
    ends = hf.integers("eos_token_id")
    found = NGramConfig(
        layers=layers,
        size=hf.integer("ngram_size", default=_DEFAULT_SIZE, minimum=2),
        heads=hf.integer("heads_per_ngram", default=8),
        embed_dim=hf.integer("ple_embed_dim", default=common.hidden_size),
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
    """Returns the language model: every layer is MoE, and a token has three positions."""
    hf.skip("intermediate_size", *_HARMLESS)
    hf.refuse("mlp_only_layers", [])
    if not hf.boolean("attn_output_gate", default=True):
        raise hf.error("attn_output_gate", False, "true")
    common = read_common(hf, dense_size=0)
    linear, own = _read_linear(hf, common)
    rope = read_rope(hf, common.head_dim, mrope=SECTIONS)
    norm, layers = RMSNorm(common.eps, one_plus_weight=True), range(common.num_layers)
    attention = common.gqa(
        rope,
        qk_norm=QkNorm(norm),
        gate=Gate("query"),
        output_bias=common.attention_bias,
        blocks=_read_blocks(hf, rope, norm),
    )
    streams = GatedStreams(
        hf.integer("hc_count", default=4, minimum=2), hf.integer("hc_lowrank", default=320)
    )
    size, ngrams = common.hidden_size * streams.num_streams, _read_ngrams(hf, common, own)
    embedding = {} if ngrams is None else {at: NGrams(ngrams, i, size) for i, at in enumerate(ngrams.layers)}
    return common.model(
        [linear if layer in own else attention for layer in layers],
        read_gated_moe(hf, common, read_softmax_router(hf, renormalizes=True)),
        norm=norm,
        residuals=[replace(streams, ngrams=embedding.get(layer)) for layer in layers],
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

_GGUF_KEYS = LINEAR_KEYS | {
    "attention.compress_ratios": "indexer_compress_ratio",
    "attention.indexer.head_count": "indexer_n_heads",
    "attention.indexer.key_length": "indexer_head_dim",
    "attention.indexer.top_k": "indexer_budget",
    "hyper_connection.count": "hc_count",
    "hyper_connection.low_rank": "hc_lowrank",
    "ple.conv_kernel": "ple_conv_kernel_size",
    "ple.heads_per_ngram": "heads_per_ngram",
    "ple.ngram_size": "ngram_size",
}
_TABLE = "per_layer_token_embd.weight"


def _gguf_config(keys: MetadataKeys, config: Config) -> Config:
    """Files have the numbers of hashes, which here follow from a seed: they are compared with those.

    Raises CheckpointError where they are others.
    """
    model, found = keys.model, linear_of_three(keys, config)
    layers = model.value("ple.layers")
    keys.skip("ple.layers", "ple.image_token_id", "ple.head_offsets")
    if not layers:
        return found | {"ple_layer_ids": []}
    table = model.tensors.get(_TABLE)
    if table is None or len(layers) != 1:
        raise keys.error("ple.layers", layers, f"one layer, and a tensor {_TABLE!r}")
    primes = model.value("ple.head_vocab_sizes")
    end = keys.integer("ple.eos_token_id")
    rows = table.shape[0]
    width = keys.integer("embedding_length_per_layer_input")
    sizes = NGramConfig(
        layers=(layers[0],),
        size=config["ngram_size"],
        heads=config["heads_per_ngram"],
        embed_dim=width * (config["ngram_size"] - 1) * config["heads_per_ngram"],
        vocab_base=primes[0],
        padded_to=rows,
        parts=1,
        seed=_DEFAULT_SEED,
        end_token_id=end,
        conv_taps=config["ple_conv_kernel_size"],
    )
    expected = {
        "ple.head_vocab_sizes": hash_primes(sizes, 0),
        "ple.layer_multipliers": hash_factors(sizes, 0, config["vocab_size"]),
    }
    for name, numbers in expected.items():
        keys.skip(name)
        if list(model.value(name)) != numbers:
            raise keys.error(name, model.value(name), f"{numbers}, which follow from seed {_DEFAULT_SEED}")
    return found | {
        "ple_layer_ids": [layers[0] + 1],
        "ple_embed_dim": sizes.embed_dim,
        "ngram_vocab_size_base": sizes.vocab_base,
        "make_ngram_vocab_size_divisible_by": rows,
        "split_ngram_parts": 1,
        # No n-gram reaches beyond the first.
        "eos_token_id": list(dict.fromkeys((end, *config["eos_token_id"]))),
    }


def _gguf_mixer(prefix: str, module: str) -> tuple[GgufRule, ...]:
    return (
        gguf_layer(f"{prefix}_norm.weight", f"{module}.hc_norm.weight", "one_plus_weight"),
        *gguf_linear(f"{prefix}_down", f"{module}.input_mix_weight_down"),
        *gguf_linear(f"{prefix}_up", f"{module}.input_mix_weight_up"),
        *gguf_linear(f"{prefix}_inject", f"{module}.block_inject_weight"),
    )


_GGUF_RULES = (
    gguf_top("output_hc_norm.weight", "model.norm.hc_norm.weight", "one_plus_weight"),
    gguf_top("output_hc_down.weight", "model.norm.input_mix_weight_down.weight"),
    gguf_top("output_hc_up.weight", "model.norm.input_mix_weight_up.weight"),
    *_gguf_mixer("hc_attn", "attn_hyper_connection"),
    *_gguf_mixer("hc_ffn", "mlp_hyper_connection"),
    gguf_layer("indexer.q_proj.weight", "self_attn.indexer.index_qk_proj.weight", "first_rows"),
    gguf_layer("indexer.k_proj.weight", "self_attn.indexer.index_qk_proj.weight", "later_rows"),
    gguf_layer("indexer.q_norm.weight", "self_attn.indexer.q_layernorm.weight", "one_plus_weight"),
    gguf_layer("indexer.k_norm.weight", "self_attn.indexer.k_layernorm.weight", "one_plus_weight"),
    *gguf_linear("ple_key", "ple.key_proj"),
    *gguf_linear("ple_value", "ple.value_proj"),
    gguf_layer("ple_norm_key.weight", "ple.norm_key.weight", "one_plus_weight"),
    gguf_layer("ple_norm_query.weight", "ple.norm_query.weight", "one_plus_weight"),
    gguf_layer("ple_norm_conv.weight", "ple.norm_conv.weight", "one_plus_weight"),
    gguf_layer("ple_conv1d.weight", "ple.conv1d.weight", "channel_taps"),
    gguf_top(_TABLE, "model.layers.<ple.layers>.ple.ple_embedding.ngram_embedding.shard_0.weight"),
    *RULES_3_5,
)

FAMILIES = (
    Family(
        "qwen4_exp",
        read_qwen4_exp,
        _NAMES,
        VisionFamily(read_grid_vision, (VISUAL,), tower="Qwen4Exp", processor="qwen"),
    ),
    Family(
        "qwen4_exp_text",
        read_qwen4_exp,
        _NAMES,
        # Without the vision tower, which is a file of another kind.
        gguf=(
            GgufFamily(
                "qwen4exp",
                _GGUF_KEYS,
                1,
                {"norm_topk_prob": True, "output_gate_type": "sigmoid", "indexer_kv_heads": 1},
                _gguf_config,
                rules=_GGUF_RULES,
            ),
        ),
    ),
)
