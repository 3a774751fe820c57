"""Which consecutive part of a dimension a rank holds.

All partitions are functions of sizes and ranks only, so that every rank can compute everybody's part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpu_service.core.parallel import ParallelContext
from moebius.errors import ConfigError
from moebius.models.attention_config import (
    BlockIndexerConfig,
    CompressedAttentionConfig,
    MlaConfig,
    NGramConfig,
)
from moebius.models.config import (
    LinearAttentionConfig,
    ModelConfig,
)

# Rows of a rank's part of the head: products of GPUs like multiples of 8.
_VOCAB_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class ShardRange:
    """Elements [begin, end) of a dimension of `total` elements."""

    begin: int
    end: int
    total: int

    @staticmethod
    def whole(total: int) -> ShardRange:
        """The range of an axis that is not divided."""
        return ShardRange(0, total, total)

    @property
    def size(self) -> int:
        """Elements of the range."""
        return self.end - self.begin

    @property
    def is_whole(self) -> bool:
        """Whether the range covers its axis."""
        return self.size == self.total

    def scaled(self, factor: int) -> ShardRange:
        """The same part of a dimension whose every element is `factor` wide."""
        return ShardRange(self.begin * factor, self.end * factor, self.total * factor)

    @property
    def slice(self) -> slice:
        """The range as an index."""
        return slice(self.begin, self.end)

    @property
    def indices(self) -> range:
        """The elements of the range."""
        return range(self.begin, self.end)


def even_shard(total: int, rank: int, count: int) -> ShardRange:
    """The rank-th of `count` nearly equal parts."""
    return ShardRange(rank * total // count, (rank + 1) * total // count, total)


def vocab_shard(vocab_size: int, parallel: ParallelContext) -> ShardRange:
    """Token ids a rank holds embedding and head rows of; later ranks may have fewer, or none.

    All ranks have `padded_vocab` rows in memory, so that gathered logits have equal parts.
    """
    rows = padded_vocab(vocab_size, parallel)
    begin = min(parallel.tp_rank * rows, vocab_size)
    return ShardRange(begin, min(begin + rows, vocab_size), vocab_size)


def padded_vocab(vocab_size: int, parallel: ParallelContext) -> int:
    """Rows of embedding and head in each rank's memory; those without a token are zero."""
    if parallel.tp_size == 1:
        return vocab_size
    rows = -(-vocab_size // parallel.tp_size)
    return -(-rows // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE


def query_heads(config: ModelConfig, parallel: ParallelContext, num_heads: int | None = None) -> ShardRange:
    """Query heads of a rank; `num_heads`: the layer's, where layers differ."""
    return even_shard(num_heads or config.num_heads, parallel.tp_rank, parallel.tp_size)


def kv_heads(config: ModelConfig, parallel: ParallelContext, num_heads: int | None = None) -> ShardRange:
    """Key and value heads of a rank: a share of them, or, with more ranks than heads, one, held by several.

    query heads  | 0 1 | 2 3 | 4 5 | 6 7 |      8 query heads, 2 KV heads, 4 ranks
    KV heads     |  0  |  0  |  1  |  1  |

    `num_heads`: the layer's KV heads, where layers differ.
    """
    heads, rank, size = num_heads or config.num_kv_heads, parallel.tp_rank, parallel.tp_size
    if heads >= size:
        return even_shard(heads, rank, size)
    head = rank * heads // size
    return ShardRange(head, head + 1, heads)


def stage_layers(config: ModelConfig, parallel: ParallelContext) -> range:
    """Decoder layers of a pipeline stage, by their index in the checkpoint."""
    shard = even_shard(config.num_layers, parallel.stage, parallel.num_stages)
    return range(shard.begin, shard.end)


def check_divisible(config: ModelConfig, parallel: ParallelContext) -> None:
    """Raises ConfigError naming the size that cannot be divided over the ranks, and what is allowed."""
    size, heads, kv = parallel.tp_size, config.num_heads, config.num_kv_heads
    all_heads, all_kv = {heads, *config.layer_num_heads}, {kv, *config.layer_kv_heads}
    if any(count % size for count in all_heads) or any(count % size and size % count for count in all_kv):
        dividing = [n for n in range(1, heads + 1) if not any(count % n for count in all_heads)]
        allowed = [n for n in dividing if all(count % n == 0 or n % count == 0 for count in all_kv)]
        raise ConfigError(
            f"tensor_parallel_size: {size} does not divide {heads} attention heads and {kv} KV heads; "
            f"allowed for this model: {', '.join(map(str, allowed))}"
        )
    narrowest = min(size for size in (config.intermediate_size, _shared_size(config)) if size)
    if narrowest < size:
        raise ConfigError(f"tensor_parallel_size: {size} ranks cannot share an MLP of width {narrowest}")
    if config.num_layers < parallel.num_stages:
        raise ConfigError(
            f"pipeline_parallel_size: {parallel.num_stages} stages for {config.num_layers} layers; "
            f"allowed: 1 to {config.num_layers}"
        )
    _check_linear_attention(config, parallel)
    _check_output_groups(config, parallel)
    _check_choices_stay(config, parallel)


def _check_choices_stay(config: ModelConfig, parallel: ParallelContext) -> None:
    """Raises ConfigError where a layer would attend to what a layer of an earlier stage chose, or cached."""
    indexer = config.mla.indexer if config.mla is not None else None
    if config.mla is None or indexer is None:
        return
    for stage in range(parallel.num_stages):
        layers = stage_layers(config, replace(parallel, stage=stage))
        for layer, source in enumerate(config.mla.latent_sources):
            if layer in layers and source not in layers:
                raise ConfigError(
                    f"pipeline_parallel_size: of {parallel.num_stages} stages, the one that begins at layer "
                    f"{layers.start} would attend in layer {layer} to latents of layer {source}, of an "
                    "earlier stage; layers that share latents have to be in the same stage"
                )
    stages = [stage_layers(config, replace(parallel, stage=i)) for i in range(parallel.num_stages)]
    # The first layer of each that attends; that there is one, is checked before.
    firsts = [min(set(config.attention_layers) & set(layers)) for layers in stages]
    shared = [first for first in firsts if first not in indexer.layers]
    if shared:
        raise ConfigError(
            f"pipeline_parallel_size: {parallel.num_stages} stages would begin at layer {shared[0]}, which "
            f"uses the tokens chosen by an earlier layer; stages may begin at layers {sorted(indexer.layers)}"
        )


def _own_choices(config: ModelConfig, layers: range) -> MlaConfig | None:
    """Latent attention of a stage; the layers that choose count from its first one."""
    mla = config.mla
    if mla is None or mla.indexer is None:
        return mla
    own = frozenset(layer - layers.start for layer in mla.indexer.layers if layer in layers)
    sources = tuple(source - layers.start for source in mla.latent_sources[layers.start : layers.stop])
    return replace(mla, indexer=replace(mla.indexer, layers=own), latent_sources=sources)


def _own_blocks(config: ModelConfig, layers: range) -> BlockIndexerConfig | None:
    """Choice of blocks in a stage; the layers that choose count from its first one."""
    indexer = config.block_indexer
    if indexer is None:
        return None
    own = frozenset(layer - layers.start for layer in indexer.layers if layer in layers)
    return replace(indexer, layers=own) if own else None


def _own_compressed(config: ModelConfig, layers: range) -> CompressedAttentionConfig | None:
    """Compressed attention of a stage, whose layers count from its first one."""
    sizes = config.compressed
    if sizes is None:
        return None
    sparse = frozenset(layer - layers.start for layer in sizes.sparse_layers if layer in layers)
    return replace(sizes, rates=sizes.rates[layers.start : layers.stop], sparse_layers=sparse)


def _own_ngrams(config: ModelConfig, layers: range) -> NGramConfig | None:
    """Layers of a stage that embed n-grams, counted from its first one."""
    if config.ngram is None:
        return None
    own = tuple(layer - layers.start for layer in config.ngram.layers if layer in layers)
    return replace(config.ngram, layers=own) if own else None


def _check_output_groups(config: ModelConfig, parallel: ParallelContext) -> None:
    """Raises ConfigError where a group of heads that is projected as one would be divided."""
    groups = 0 if config.compressed is None else config.compressed.output_groups
    if groups % parallel.tp_size:
        allowed = ", ".join(str(n) for n in range(1, groups + 1) if groups % n == 0)
        raise ConfigError(
            f"tensor_parallel_size: {parallel.tp_size} does not divide the {groups} groups of heads that are "
            f"projected together; allowed for this model: {allowed}"
        )


def shard_config(config: ModelConfig, parallel: ParallelContext) -> ModelConfig:
    """What attention, KV cache and memory planning of this rank work with: its own heads, layers and widths.

    Layers count from the stage's first one. The vocabulary stays whole: every rank's sampler needs all of
    it. Raises ConfigError as `check_divisible`.
    """
    check_divisible(config, parallel)
    if parallel.tp_size == parallel.num_stages == 1:
        return config
    layers, rank, size = stage_layers(config, parallel), parallel.tp_rank, parallel.tp_size
    moe = replace(
        config.moe,
        shared_intermediate_size=even_shard(_shared_size(config), rank, size).size,
        layers=frozenset(layer - layers.start for layer in config.moe.layers if layer in layers),
        hash_layers=frozenset(layer - layers.start for layer in config.moe.hash_layers if layer in layers),
    )
    return replace(
        config,
        num_layers=len(layers),
        linear=_own_linear(config, layers, parallel),
        attention_windows=config.attention_windows[layers.start : layers.stop],
        attention_chunks=config.attention_chunks[layers.start : layers.stop],
        num_heads=query_heads(config, parallel).size,
        layer_num_heads=tuple(
            query_heads(config, parallel, heads).size
            for heads in config.layer_num_heads[layers.start : layers.stop]
        ),
        layer_kv_heads=tuple(
            kv_heads(config, parallel, heads).size
            for heads in config.layer_kv_heads[layers.start : layers.stop]
        ),
        layer_head_dims=config.layer_head_dims[layers.start : layers.stop],
        sink_layers=config.sink_layers[layers.start : layers.stop],
        keys_as_values=config.keys_as_values[layers.start : layers.stop],
        layer_ropes=config.layer_ropes[layers.start : layers.stop],
        mlp_limits=config.mlp_limits[layers.start : layers.stop],
        layer_halves=config.layer_halves[layers.start : layers.stop],
        num_kv_heads=kv_heads(config, parallel).size,
        intermediate_size=even_shard(config.intermediate_size, rank, size).size,
        moe=moe,
        mla=_own_choices(config, layers),
        block_indexer=_own_blocks(config, layers),
        compressed=_own_compressed(config, layers),
        ngram=_own_ngrams(config, layers),
    )


def key_heads(linear: LinearAttentionConfig, parallel: ParallelContext) -> ShardRange:
    """Key heads of linear attention of a rank; it has the value heads that they serve."""
    return even_shard(linear.num_key_heads, parallel.tp_rank, parallel.tp_size)


def own_heads(linear: LinearAttentionConfig, parallel: ParallelContext) -> LinearAttentionConfig:
    """The linear attention that a rank computes: its heads, in all layers."""
    heads = key_heads(linear, parallel).size
    repeats = linear.num_value_heads // linear.num_key_heads
    return replace(linear, num_key_heads=heads, num_value_heads=heads * repeats)


def _own_linear(
    config: ModelConfig, layers: range, parallel: ParallelContext
) -> LinearAttentionConfig | None:
    """Linear attention of a rank; its layers count from its stage's first one."""
    if config.linear is None:
        return None
    own = frozenset(layer - layers.start for layer in config.linear.layers if layer in layers)
    return replace(own_heads(config.linear, parallel), layers=own)


def _check_linear_attention(config: ModelConfig, parallel: ParallelContext) -> None:
    """Raises ConfigError where heads cannot be divided, or a stage would have no cache of tokens."""
    if config.linear is None:
        return
    size, heads = parallel.tp_size, config.linear.num_key_heads
    if heads % size:
        allowed = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ConfigError(
            f"tensor_parallel_size: {size} does not divide the {heads} key heads of linear attention; "
            f"allowed for it: {allowed}"
        )
    for stage in range(parallel.num_stages):
        layers = stage_layers(config, replace(parallel, stage=stage))
        if not set(config.attention_layers) & set(layers):
            raise ConfigError(
                f"pipeline_parallel_size: of {parallel.num_stages} stages, one would have layers "
                f"{layers.start} to {layers.stop - 1} only, none of which attends; fewer stages are allowed"
            )


def _shared_size(config: ModelConfig) -> int:
    return config.moe.shared_intermediate_size
