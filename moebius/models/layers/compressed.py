"""Attention to the latest tokens, and to earlier ones compressed.

Sources: DeepSeek-V4's report, section 2.3; DeepSeek-V4.1's published `inference/model.py`, whose layers share
what a few of them compress.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from moebius.models.layers.layer import Layers, cached
from moebius.models.layers.mixer import Mixer
from moebius.models.layers.ranks import WHOLE, Cut, Even, even_shard
from moebius.models.layers.rope import RopeConfig
from moebius.models.layers.tensors import CacheTensor, StateTensor
from moebius.models.layers.weights import Weight, Weights, fused, linear, rms_norm, under


@dataclass(frozen=True, slots=True)
class EntryIndexer:
    """Small queries and small entries that choose among entries; every rank has all of it."""

    num_heads: int
    head_dim: int
    top_k: int  # Entries that a query attends to at most.


@dataclass(frozen=True, slots=True)
class EntryBlocks:
    """Blocks of consecutive entries, chosen by their best one; later layers choose among their entries."""

    top_blocks: int  # Blocks that a query keeps at most; the one of its latest entry is always among them.
    size: int  # Entries of a block.
    chosen_here: bool = False  # Whether this layer chooses them, for later ones; False: an earlier one did.


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryAttention(Mixer):
    """One head of keys that are values: of the latest tokens, and of entries that stand for several each."""

    stores_8_bits: ClassVar[bool] = False

    num_heads: int
    head_dim: int
    q_lora_rank: int  # Rank of the queries' projection.
    rope_dim: int  # Last elements of a head, which are rotated.
    rope: RopeConfig
    window: int  # Latest tokens that a query sees as they are, its own included.
    rate: int  # Consecutive tokens that one entry stands for; 0: there are no entries.
    # Groups of heads in the output projection: each to `output_rank` elements by itself, then all together.
    output_groups: int
    output_rank: int
    scale: float  # Factor of the scores.
    eps: float
    indexer: EntryIndexer | None = None

    @property
    def cache(self) -> tuple[CacheTensor, ...]:
        """Entries, and what they are chosen by; nothing where they are another layer's."""
        if self.attends_back:
            return ()
        entries = CacheTensor((self.head_dim,), self.rate)
        if self.indexer is None:
            return (entries,)
        return entries, CacheTensor((self.indexer.head_dim,), self.rate, is_index=True)

    def on_rank(self, rank: int, num_ranks: int) -> Self:
        """Keys and entries, which all heads share, are every rank's."""
        return replace(
            self,
            num_heads=even_shard(self.num_heads, rank, num_ranks).size,
            output_groups=even_shard(self.output_groups, rank, num_ranks).size,
        )

    def indivisible(self, num_ranks: int) -> str:
        heads, groups = self.num_heads, self.output_groups
        if heads % num_ranks:
            return f"{heads} attention heads and 1 KV heads"
        return f"the {groups} groups of heads that are projected together" if groups % num_ranks else ""

    @property
    def row_elements(self) -> int:
        # Queries, normed, rotated and attended to; the groups' outputs; both kinds of rows to compress.
        heads = 4 * self.num_heads * self.head_dim + 2 * self.output_groups * self.output_rank
        index = 0 if self.indexer is None else self.indexer.head_dim
        return heads + 8 * (self.head_dim + index) + 2 * self.q_lora_rank

    @property
    def widest_row(self) -> int:
        return 2 * (self.num_heads + 1) * self.head_dim

    def _attention_weights(self, hidden_size: int) -> Weights:
        """Yields what every layer has, whatever it compresses."""
        heads, groups = Even(self.num_heads), Even(self.output_groups)
        queries, outputs = self.num_heads * self.head_dim, self.output_groups * self.output_rank
        narrow: dict[str, tuple[int, Cut]] = {"q_a_proj": (self.q_lora_rank, WHOLE)}
        narrow["kv_proj"] = self.head_dim, WHOLE
        yield from fused("a_proj", hidden_size, narrow)
        yield from (*rms_norm("q_a_norm", self.q_lora_rank), *rms_norm("kv_norm", self.head_dim))
        yield from linear("q_b_proj", queries, self.q_lora_rank, cut=heads)
        yield Weight("sinks", (self.num_heads,), "float32", cut=heads)
        # No product: each group has its own.
        yield Weight("o_a_proj.weight", (outputs, queries // self.output_groups), cut=groups)
        yield from linear("o_b_proj", hidden_size, outputs, cut=groups, axis=1)

    @property
    def score_width(self) -> int:
        return self.num_heads * self.head_dim

    def choice_bytes(self, hidden_size: int, max_model_len: int, activation_bytes: int) -> int:
        index = self.indexer
        if index is None:
            return 0
        query = 2 * index.num_heads * index.head_dim * activation_bytes
        return query + 4 * (hidden_size + 2 * index.num_heads + index.top_k)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttention(EntryAttention):
    """Each layer has entries of its own.

    With an indexer, entries overlap (each is also of the tokens of the one before) and are chosen; without
    one a query sees all of them.
    """

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """Keys of the latest tokens but one; of each kind of entries, the tokens before a new one that its
        entry may need: values, then logits of their weights. Of overlapping entries both are there twice.
        """
        window = StateTensor((self.window - 1, self.head_dim))
        if not self.rate:
            return (window,)
        if self.indexer is None:
            return window, StateTensor((self.rate - 1, 2 * self.head_dim))
        kept = 2 * self.rate - 1
        return window, *(StateTensor((kept, 4 * size)) for size in (self.head_dim, self.indexer.head_dim))

    def weights(self, hidden_size: int) -> Weights:
        yield from self._attention_weights(hidden_size)
        if self.rate:
            yield from under("compressor", self._compressor(hidden_size, self.head_dim))
        index = self.indexer
        if index is not None:
            own = self._compressor(hidden_size, index.head_dim)
            yield from under("indexer.compressor", own)
            yield from linear("indexer.wq_b", index.num_heads * index.head_dim, self.q_lora_rank)
            # Its few rows weigh whole heads against one another: in 16 bits, ranks of entries would change.
            yield from linear("indexer.weights_proj", index.num_heads, hidden_size, dtype="float32")

    def _compressor(self, hidden_size: int, size: int) -> Weights:
        """Yields what makes entries of `size` elements; a token is part of two of those that are chosen."""
        width = size if self.indexer is None else 2 * size
        yield from fused("projections", hidden_size, {"wkv": (width, WHOLE), "wgate": (width, WHOLE)})
        # Float32 as they are added.
        yield Weight("ape", (self.rate, width), "float32")
        yield from rms_norm("norm", size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedEntryAttention(EntryAttention):
    """Few layers have entries, which do not overlap; those after them attend to the same ones.

    An indexer of such a layer chooses by keys that are projected from its entries; one of a later layer by
    the same keys, with queries of its own. Layers without an indexer attend to what the nearest earlier one
    chose.
    """

    entries_back: int = 0  # How many layers before this one the entries are that it attends to; 0: its own.
    blocks: EntryBlocks | None = None

    @property
    def compresses(self) -> bool:
        """Returns whether the entries are its own."""
        return self.rate > 0 and not self.entries_back

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """Keys of the latest tokens but one; where several tokens are an entry, those before its last one:
        values, then logits of their weights.
        """
        window = StateTensor((self.window - 1, self.head_dim))
        if not self.compresses or self.rate == 1:
            return (window,)
        return window, StateTensor((self.rate - 1, 2 * self.head_dim))

    @property
    def attends_back(self) -> int:
        return self.entries_back

    @property
    def chooses(self) -> bool:
        return self.indexer is not None

    @property
    def awaits_choice(self) -> bool:
        return self.rate > 0 and self.indexer is None

    def within(self, max_model_len: int) -> Self:
        """Blocks are not chosen where all of them are kept."""
        blocks = self.blocks
        if blocks is None or max_model_len // self.rate > blocks.top_blocks * blocks.size:
            return self
        return replace(self, blocks=None)

    def weights(self, hidden_size: int) -> Weights:
        yield from self._attention_weights(hidden_size)
        size, index = self.head_dim, self.indexer
        if self.compresses:
            # A single token needs no weight.
            parts = {"wkv": (size, WHOLE)} | ({"wgate": (size, WHOLE)} if self.rate > 1 else {})
            yield from under("compressor", fused("projections", hidden_size, parts))
            yield from rms_norm("compressor.norm", size)
        if index is None:
            return
        yield from linear("indexer.wq_b", index.num_heads * index.head_dim, self.q_lora_rank)
        # Its few rows weigh whole heads against one another: in 16 bits, ranks of entries would change.
        yield from linear("indexer.weights_proj", index.num_heads, hidden_size, dtype="float32")
        if self.compresses:
            yield from linear("indexer.wk", index.head_dim, size)
            yield from rms_norm("indexer.k_norm", index.head_dim)


def entry_mixers(layers: Layers) -> list[EntryAttention]:
    """Returns the layers of the cache that holds entries: all such attention but that to another layer's."""
    return [mixer for mixer, _ in cached(layers) if isinstance(mixer, EntryAttention)]
