"""Parts of a `config.ModelConfig` that few models have: choices of tokens or blocks, compressed attention,
several residual streams, embeddings of n-grams, experts of two kinds.
"""

from __future__ import annotations

import math
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
    # Groups of heads in the output projection: each to `output_rank` elements by itself, then all together.
    output_groups: int
    output_rank: int


@dataclass(frozen=True, slots=True)
class BlockIndexerConfig:
    """Grouped-query attention to blocks of tokens, which each KV head chooses for itself (MiniMax-M3), or
    which are chosen once for all heads (`shared_heads`; Qwen4).
    """

    head_dim: int  # Of the small queries, one head for each KV head, and of the one key, that only score.
    block_size: int  # Consecutive tokens that are chosen together, by the best of them.
    top_blocks: int  # Most blocks that a query attends to, those that are always chosen included.
    local_blocks: int  # Latest blocks, the query's own included, that are always chosen.
    layers: frozenset[int]  # Layers that choose; all others attend to all tokens.
    # Heads whose positive products with the mean key of a block add up to its score, which counts for all
    # heads of attention; the tokens after the last whole block are always read, and not counted. 0: each KV
    # head has one of its own.
    shared_heads: int = 0
    rotary_dim: int = 0  # With shared heads, elements of their queries and keys that are rotated.


@dataclass(frozen=True, slots=True)
class HyperConnectionConfig:
    """Several residual streams instead of one; see `gpu_service.ops.hyper_connections`, or with a `rank`
    `gpu_service.ops.gated_streams`.
    """

    num_streams: int
    # Of Sinkhorn's normalisation of the weights between streams; 0: there are none, and each stream stays as
    # it is but for what is added to it.
    iterations: int
    eps: float  # Added to weights and to the sums that they are divided by.
    # Whether the streams end as a sum with learned weights; False: as their mean.
    weighs_last: bool = False
    magnitude: float = 2.0  # The largest weight with which a half of a layer is added to a stream.
    # Qwen4: streams are normed and mixed element by element, by weights that come through a bottleneck of
    # this width, also at the end; 0: streams are mixed as wholes.
    rank: int = 0


@dataclass(frozen=True, slots=True)
class NormedResidualConfig:
    """What a half of a layer reads, normed, becomes the residual stream (MiniMax-01): times the first number;
    what the half adds is multiplied by the second.
    """

    attention: tuple[float, float]
    linear: tuple[float, float]  # Of layers with linear attention.
    mlp: tuple[float, float]


@dataclass(frozen=True, slots=True)
class NGramConfig:
    """Embeddings of the latest tokens together, which some layers add to the residual streams (Qwen4).

    Rows of a table are found by hashing the latest 2, 3, ... `size` tokens, several times each.
    """

    # Layers that have them, ascending, counted over the whole model: a layer's place decides its hashes.
    layers: tuple[int, ...]
    size: int  # Tokens of the longest n-gram.
    heads: int  # Hashes of each order.
    embed_dim: int  # Elements of all hashes' rows together.
    vocab_base: int  # Each hash has a prime number of rows, the next ones from here on.
    padded_to: int  # A layer's table has a multiple of this many rows,
    parts: int  # and is stored as this many tensors of equal size.
    seed: int  # Of the hashes' factors.
    end_token_id: int  # No n-gram reaches beyond it.
    conv_taps: int  # Of the causal convolution, `size` tokens apart.

    @property
    def num_hashes(self) -> int:
        """Rows of the table that a token has."""
        return (self.size - 1) * self.heads

    @property
    def row_dim(self) -> int:
        """Elements of a row of the table."""
        return self.embed_dim // self.num_hashes

    @property
    def conv_width(self) -> int:
        """Tokens that the convolution spans, the newest included."""
        return (self.conv_taps - 1) * self.size + 1


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """DeepSeek Sparse Attention: how a token chooses the ones it attends to."""

    num_heads: int  # Of the small attention that only scores; its keys have one head.
    head_dim: int  # Elements of its queries and keys; the first `qk_rope_head_dim` of them are rotated.
    # Most tokens that a token attends to, itself included; not counted are those after the last whole pool.
    top_k: int
    interleaved: bool  # As `RopeConfig.interleaved`, of these queries and keys.
    # Layers that choose for themselves; any other takes what the nearest of these before it chose.
    layers: frozenset[int]
    # Consecutive tokens that are chosen together, by one key; those after the last whole pool always are.
    pool: int = 1
    reads_hidden: bool = False  # Whether queries come from the normed hidden states, not from their latent.
    rotates_last: bool = False  # Whether the last `qk_rope_head_dim` elements are rotated, not the first.
    # Of the keys' norm; most families were trained with this, whatever `rms_norm_eps` says.
    key_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class ExpertKindsConfig:
    """Experts of two kinds and widths, of which a token's id says between which it chooses (ERNIE 4.5 VL).

    So that all that computes experts knows one width, what `MoeConfig`, `MoeGeometry` and all after the
    router call an expert is a part of one, `part_size` channels wide: an expert's answer is the sum of its
    parts'. The parts of an expert follow one another, those of the second kind all others.
    """

    num_experts: int  # Of either kind.
    top_k: int  # Experts that a token chooses, of its kind.
    widths: tuple[int, int]  # Intermediate sizes of an expert of either kind.
    tokens: tuple[int, ...]  # Ids that choose among the second kind; all others choose among the first.

    @property
    def part_size(self) -> int:
        """Intermediate size of a part."""
        return math.gcd(*self.widths)

    @property
    def num_parts(self) -> tuple[int, int]:
        """Parts of an expert of either kind."""
        first, second = self.widths
        return first // self.part_size, second // self.part_size

    @property
    def total_parts(self) -> int:
        """The number of parts of all experts of both kinds."""
        return self.num_experts * sum(self.num_parts)

    @property
    def most_parts(self) -> int:
        """That a token is computed by."""
        return self.top_k * max(self.num_parts)

    def stored_place(self, part: int) -> tuple[int, int, int]:
        """Returns the place of a part: its expert's number in the checkpoint, its first channel, and the
        expert's width.
        """
        first, second = self.num_parts
        place, of_first = part, self.num_experts * first
        if part < of_first:
            return place // first, place % first * self.part_size, self.widths[0]
        place -= of_first
        return self.num_experts + place // second, place % second * self.part_size, self.widths[1]


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Multi-head latent attention; filled by `mla.read_mla_common`. Names as in config.json."""

    q_lora_rank: int | None  # Rank of the queries' projection; None: they are projected directly.
    kv_lora_rank: int  # Elements of a token's latent, from which all heads' keys and values are projected.
    # A query or key of a head: what carries no position, then what is rotated.
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float  # Factor of the scores: that of the head's size, times what rotary scaling adds.
    indexer: IndexerConfig | None = None  # None: a token attends to all earlier ones.
    # Of the norms of latents; most families were trained with this, whatever `rms_norm_eps` says.
    latent_eps: float = 1e-6
    # What latents of keys and values are multiplied by after their norm.
    latent_scale: float = 1.0
    # Whether each head's queries are multiplied by `scale * ln(position + 1) + bias`, both learned; the
    # indexer's as well.
    learned_query_growth: bool = False
    # Whether, in layers that do not rotate, keys have no part that all heads share: `qk_rope_head_dim` more
    # elements are projected from the latent instead. The cache holds zeros for that part.
    unrotated_from_latent: bool = False
    # Per layer, the one whose latents it attends to, itself or an earlier one; empty: all have their own.
    latent_sources: tuple[int, ...] = ()

    @property
    def qk_head_dim(self) -> int:
        """Elements of a head's query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim
