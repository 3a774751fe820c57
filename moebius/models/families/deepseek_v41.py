"""DeepSeek-V4.1 (Flash), its language model: DeepSeek-V4's attention with entries that layers share, lagging
hyper-connections, and embeddings of n-grams from large tables. Images and drafts (DSpark) are not served.

Sources: the published `inference/model.py` and `inference/engram.py` (revision dba1be0a40aa), as public tests
of other engines keep them, and the published `config.json`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moebius.checkpoint.gguf.family import Config, GgufFamily
from moebius.checkpoint.gguf.names import gguf_layer, gguf_linear
from moebius.models.common import Common
from moebius.models.config import ModelConfig
from moebius.models.families.deepseek_v4 import (
    DSPARK_KEYS,
    GGUF_KEYS,
    GGUF_RULES,
    LAYER_RULES,
    TOP_RULES,
    gguf_rates,
    read_attention,
    read_clamped,
    read_indexer,
    read_moe,
    read_ropes,
    read_streams,
)
from moebius.models.family import Family
from moebius.models.keys import HfKeys
from moebius.models.layers.compressed import EntryBlocks, SharedEntryAttention
from moebius.models.layers.ngrams import Engram, NGramConfig, hash_factors, num_table_rows
from moebius.models.layers.residual import HyperConnections
from moebius.models.names import MTP, TensorNames, drop, rename

if TYPE_CHECKING:
    from moebius.checkpoint.gguf.metadata_keys import MetadataKeys

# Of drafts and of images, neither of which is served, and of training.
_HARMLESS = (
    *DSPARK_KEYS,
    "dspark_n_routed_experts",
    "dspark_num_experts_per_tok",
    "expert_dtype",
    "image_token_id",
    "intermediate_size",
    "num_nextn_predict_layers",
    "vision_config",
)
# Seeds of layers' hashes are multiples of it.
_SEED = 10007


def _read_blocks(hf: HfKeys, top_k: int) -> tuple[int, EntryBlocks] | None:
    """Returns the layer that chooses blocks of entries for itself and later ones, and how; None: none does.

    Raises ModelConfigError where the entries of the blocks may be fewer than are chosen among them.
    """
    layer = hf.integer("candidate_source_layer_id", default=-1, minimum=-1)
    if layer < 0:
        hf.skip("candidate_topk_blocks", "candidate_block_size")
        return None
    blocks = EntryBlocks(hf.integer("candidate_topk_blocks"), hf.integer("candidate_block_size"))
    # The block of the latest entry, which is always chosen, may have one only.
    least = (blocks.top_blocks - 1) * blocks.size + 1
    if least < top_k:
        allowed = f"blocks of at least index_topk ({top_k}) entries together"
        raise hf.error("candidate_topk_blocks", blocks.top_blocks, allowed)
    return layer, blocks


def _read_mixers(hf: HfKeys, common: Common) -> list[SharedEntryAttention]:
    """Returns the attention of each layer. Raises ModelConfigError for a layer that would read what no layer
    before it made.
    """
    ropes = read_ropes(hf, common.head_dim)
    num_layers, rates = common.num_layers, hf.integers("compress_ratios")
    if len(rates) < num_layers or min(rates) < 0:
        raise hf.error("compress_ratios", list(rates), f"{num_layers} numbers of at least 0")
    sources, indexers = (set(hf.integers(f"{kind}_source_layer_ids")) for kind in ("kv", "index"))
    if not sources <= indexers:
        allowed = f"some of index_source_layer_ids ({sorted(indexers)})"
        raise hf.error("kv_source_layer_ids", sorted(sources), allowed)
    indexer = read_indexer(hf, ropes[True])
    plain = SharedEntryAttention(rope=ropes[False], rate=0, **read_attention(hf, common, ropes[True]))
    blocks, found, source = _read_blocks(hf, indexer.top_k), [], -1
    for layer, rate in enumerate(rates[:num_layers]):
        source = layer if layer in sources else source
        if not rate:
            if layer in indexers:
                raise hf.error("index_source_layer_ids", layer, "layers whose compress_ratios are not 0")
            found.append(plain)
            continue
        if source < 0 or rates[source] != rate:
            allowed = f"a layer of the ratio {rate} at or before layer {layer}"
            raise hf.error("kv_source_layer_ids", sorted(sources), allowed)
        mixer = replace(plain, rope=ropes[True], rate=rate, entries_back=layer - source)
        if layer in indexers:
            mixer = replace(mixer, indexer=indexer)
            if blocks is not None and layer >= blocks[0]:
                if blocks[0] < source or blocks[0] not in indexers:
                    allowed = f"a layer of index_source_layer_ids, not before layer {source}"
                    raise hf.error("candidate_source_layer_id", blocks[0], allowed)
                mixer = replace(mixer, blocks=replace(blocks[1], chosen_here=layer == blocks[0]))
        found.append(mixer.within(common.max_model_len))
    return found


def _read_engrams(hf: HfKeys, common: Common, num_streams: int) -> dict[int, Engram]:
    """Returns the embeddings of n-grams by layer. Raises ModelConfigError where tables have other rows than
    their hashes.
    """
    layers = hf.integers("engram_layer_ids")
    if not layers:
        hf.skip(*(key for key in hf.unread if key.startswith("engram_")))
        return {}
    size, heads = hf.integer("engram_max_ngram_size", minimum=2), hf.integer("engram_n_heads")
    if list(layers) != sorted(set(layers)) or layers[-1] >= common.num_layers:
        raise hf.error("engram_layer_ids", list(layers), f"ascending layers below {common.num_layers}")
    sizes = NGramConfig(
        layers=layers,
        size=size,
        heads=heads,
        embed_dim=hf.integer("engram_head_dim") * (size - 1) * heads,
        vocab_base=hf.integer("engram_vocab_size", minimum=2),
        padded_to=1,
        parts=1,
        seed=_SEED,
        end_token_id=hf.integer("engram_pad_token_id", minimum=0),
        conv_taps=0,
        generator="pcg64",
    )
    rows = [num_table_rows(sizes, place) for place in range(len(layers))]
    if list(hf.integers("engram_num_embeddings")) != rows:
        raise hf.error("engram_num_embeddings", list(hf.integers("engram_num_embeddings")), f"{rows}")
    if sizes.end_token_id >= common.vocab_size:
        raise hf.error("engram_pad_token_id", sizes.end_token_id, f"a token below {common.vocab_size}")
    kinds = hf.integer("engram_compressed_vocab_size")
    stream_size, source = num_streams * common.hidden_size, Path(hf.source)
    # A GGUF file has its tokenizer in itself.
    tokenizer = str(source.parent if source.name == "config.json" else source)
    return {layer: Engram(sizes, place, stream_size, kinds, tokenizer) for place, layer in enumerate(layers)}


def read_deepseek_v41(hf: HfKeys) -> ModelConfig:
    """Reads the language model of DeepSeek-V4.1-Flash."""
    hf.skip(*_HARMLESS)
    hf.refuse("num_hash_layers", 0)
    common = read_clamped(hf)
    streams = replace(read_streams(hf), lags=True)
    engrams = _read_engrams(hf, common, streams.num_streams)
    residuals: list[HyperConnections] = [
        replace(streams, ngrams=engrams.get(layer)) for layer in range(common.num_layers)
    ]
    return common.model(_read_mixers(hf, common), read_moe(hf, common), residuals=residuals)


_OWN = (
    # Corrects the choice for tokens of images.
    drop("layers.*.ffn.gate.bias_vl"),
    *(drop(name) for name in ("vision.**", "aligner.**", "image_start", "image_end", "image_newline")),
    rename("layers.*.engram.**", "model.layers.*.engram.**"),
)

# Sizes by the names that converters give them: llama.cpp's, which leave out what constants of hashes tell,
# and those of config.json.
_GGUF_ENGRAM = {
    "engram_n_heads": ("engram.head_count", "engram.n_heads", "engram_n_heads"),
    "engram_head_dim": ("engram.key_length", "engram.head_dim", "engram_head_dim"),
    "engram_max_ngram_size": ("engram.max_ngram_size", "engram_max_ngram_size"),
    "engram_vocab_size": ("engram.vocab_size", "engram_vocab_size"),
    "engram_compressed_vocab_size": ("engram.compressed_vocab_size", "engram_compressed_vocab_size"),
    "engram_pad_token_id": ("engram.pad_token_id", "engram_pad_token_id"),
}
# Of the published model, where a file has no keys for them.
_GGUF_BLOCKS = {"candidate_topk_blocks": 2048, "candidate_block_size": 8}


def _gguf_config(keys: MetadataKeys, config: Config) -> Config:
    """Which layers make entries and choose among them is seen by their tensors, which only those have."""
    sources = keys.layers_with("attn_compressor_kv.weight")
    found = gguf_rates(keys, config) | {
        "kv_source_layer_ids": sources,
        "index_source_layer_ids": keys.layers_with("indexer.attn_q_b.weight"),
        "candidate_source_layer_id": keys.integer(
            "attention.candidate_source_layer_id", sources[-1] if sources else -1
        ),
    }
    for name, published in _GGUF_BLOCKS.items():
        found[name] = keys.integer(f"attention.{name}", published)
    for kind in ("kv", "index"):
        keys.skip(f"attention.{kind}_source_layer_ids", f"{kind}_source_layer_ids")
    keys.skip("expert_scoring_func", "dspark_target_layer_ids")
    return found | _gguf_engrams(keys)


def _gguf_engrams(keys: MetadataKeys) -> Config:
    """Returns the keys of embeddings of n-grams. Raises CheckpointError where a file's factors of hashes are
    not those that follow from its sizes.
    """
    constants = ("multipliers", "primes", "offsets", "token_map", "pad_id")
    keys.skip(*(f"engram.{name}" for name in ("layer_ids", "present", "num_embeddings", *constants)))
    layers = keys.layers_with("engram_embd.weight")
    if not layers:
        return {"engram_layer_ids": []}
    tables = [keys.model.tensors[f"blk.{layer}.engram_embd.weight"] for layer in layers]
    rows = [table.shape[0] for table in tables]
    found: Config = {"engram_layer_ids": layers, "engram_num_embeddings": rows}
    given: dict[str, Any] = {name: keys.model.value(f"engram.{name}") for name in constants}
    kinds = given["token_map"] or []
    derived: dict[str, Callable[[], int]] = {
        "engram_vocab_size": lambda: given["primes"][0],
        "engram_compressed_vocab_size": lambda: max(kinds) + 1,
        # The number of a kind of tokens.
        "engram_pad_token_id": lambda: kinds.index(given["pad_id"]),
    }
    for name, names in _GGUF_ENGRAM.items():
        stored = next((one for one in names if keys.get(one) is not None), None)
        if stored is not None:
            found[name] = keys.integer(stored)
            continue
        try:
            found[name] = derived[name]()
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise keys.error(names[0], None, "an integer") from error
    _check_factors(keys, found, given["multipliers"])
    return found


def _check_factors(keys: MetadataKeys, found: Config, multipliers: list[int] | None) -> None:
    size, heads = found["engram_max_ngram_size"], found["engram_n_heads"]
    layers = tuple(found["engram_layer_ids"])
    sizes = NGramConfig(layers, size, heads, 0, 2, 1, 1, _SEED, 0, 0, "pcg64")
    kinds = found["engram_compressed_vocab_size"]
    factors = [factor for place in range(len(layers)) for factor in hash_factors(sizes, place, kinds)]
    if multipliers is not None and list(multipliers) != factors:
        raise keys.error("engram.multipliers", multipliers, f"what {kinds} kinds of tokens make: {factors}")


_GGUF_RULES = (
    *GGUF_RULES,
    *gguf_linear("indexer.attn_k", "self_attn.indexer.wk"),
    *gguf_linear("indexer.k_norm", "self_attn.indexer.k_norm"),
    *gguf_linear("engram_embd", "engram.embed"),
    *gguf_linear("engram_wkv", "engram.wkv"),
    gguf_layer("engram_q.weight", "engram.q_weight"),
    gguf_layer("engram_k.weight", "engram.k_weight"),
)

_NAMES = TensorNames((MTP, *_OWN, *LAYER_RULES, *TOP_RULES), layouts=("per_expert_ffn",))

FAMILIES = (
    Family(
        "deepseek_v41",
        read_deepseek_v41,
        _NAMES,
        gguf=(GgufFamily("deepseek41", GGUF_KEYS, 4, derive=_gguf_config, rules=_GGUF_RULES),),
    ),
    Family("deepseek_v41_text", read_deepseek_v41, _NAMES),
)
