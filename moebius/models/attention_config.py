"""Parts of a `config.ModelConfig` that few models have: compressed attention, several residual streams, and
attention to tokens, or blocks of them, that a small one chooses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CompressedAttentionConfig:
    """Attention to the latest tokens, and to earlier ones compressed; filled by the family's reader.

    Keys are values, of one head; the last `rope_dim` elements of a head are rotated.
    """

    q_lora_rank: int  # Rank of the queries' projection.
    rope_dim: int
    window: int  # Latest tokens that a query sees as they are, its own included.
    # Per layer, how many consecutive tokens one entry stands for; 0: the layer has no entries.
    rates: tuple[int, ...]
    # Layers whose entries overlap (each is also of the tokens of the one before) and are chosen by an
    # indexer; in the others with entries a query sees all of them.
    sparse_layers: frozenset[int]
    index_num_heads: int
    index_head_dim: int
    top_k: int  # Entries that a query of a sparse layer attends to at most.
    # The output projection: heads in so many groups, each to `output_rank` elements by itself, then all.
    output_groups: int
    output_rank: int

    @property
    def has_entries(self) -> bool:
        """Whether any layer compresses."""
        return any(self.rates)


@dataclass(frozen=True, slots=True)
class HyperConnectionConfig:
    """Several residual streams instead of one; see `gpu_service.ops.hyper_connections`."""

    num_streams: int
    iterations: int  # Of Sinkhorn's normalisation of the weights between streams.
    eps: float  # Added to weights and to the sums that they are divided by.
    # Whether the streams end as a sum with learned weights; False: as their mean.
    weighs_last: bool = False


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """DeepSeek Sparse Attention: how a token chooses the ones it attends to."""

    num_heads: int  # Of the small attention that only scores; its keys have one head.
    head_dim: int  # Elements of its queries and keys; the first `qk_rope_head_dim` of them are rotated.
    # A token attends to at most so many, itself included; not counted are those after the last whole pool.
    top_k: int
    interleaved: bool  # As `RopeConfig.interleaved`, of these queries and keys.
    # Layers that choose for themselves; any other takes what the nearest of these before it chose.
    layers: frozenset[int]
    # So many consecutive tokens are chosen together, by one key; those after the last whole pool always are.
    pool: int = 1

    @property
    def row_dim(self) -> int:
        """Elements that the cache holds of a token: its key, and its logits within a pool."""
        return self.head_dim * (1 if self.pool == 1 else 2)


@dataclass(frozen=True, slots=True)
class BlockIndexerConfig:
    """Grouped-query attention to blocks of tokens, which each KV head chooses for itself (MiniMax-M3)."""

    head_dim: int  # Of the small queries, one head for each KV head, and of the one key, that only score.
    block_size: int  # Consecutive tokens that are chosen together, by the best of them.
    top_blocks: int  # A query attends to at most so many blocks, those that are always chosen included.
    local_blocks: int  # Latest blocks, the query's own included, that are always chosen.
    layers: frozenset[int]  # Layers that choose; all others attend to all tokens.
