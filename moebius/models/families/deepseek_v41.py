"""DeepSeek-V4.1 (Flash), its language model: DeepSeek-V4's attention with entries that layers share, lagging
hyper-connections, and embeddings of n-grams from large tables. Images and drafts (DSpark) are not served.

Sources: the published `inference/model.py` and `inference/engram.py` (revision dba1be0a40aa), as public tests
of other engines keep them, and the published `config.json`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from moebius.models.common import Common
from moebius.models.config import ModelConfig
from moebius.models.families.deepseek_v4 import (
    DSPARK_KEYS,
    LAYER_RULES,
    TOP_RULES,
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
from moebius.models.layers.ngrams import Engram, NGramConfig, num_table_rows
from moebius.models.layers.residual import HyperConnections
from moebius.models.names import MTP, TensorNames, drop, rename

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
    stream_size = num_streams * common.hidden_size
    return {
        layer: Engram(sizes, place, stream_size, kinds, str(Path(hf.source).parent))
        for place, layer in enumerate(layers)
    }


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

_NAMES = TensorNames((MTP, *_OWN, *LAYER_RULES, *TOP_RULES), layouts=("per_expert_ffn",))

FAMILIES = (
    Family("deepseek_v41", read_deepseek_v41, _NAMES),
    Family("deepseek_v41_text", read_deepseek_v41, _NAMES),
)
