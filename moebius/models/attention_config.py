"""Parts of a `config.ModelConfig` that few models have: compressed attention, several residual streams."""

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
