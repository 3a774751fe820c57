"""The contract of a backend for attention to a window of tokens and to entries that stand for earlier ones.

Source: DeepSeek-V4's report, section 2.3.1 (compressed sparse attention) and 2.3.2 (heavily compressed
attention). Entry e of a layer stands for the tokens e m to e m + m - 1, m being the layer's rate: the sum of
what each of them projects, weighed element by element by a softmax of what each of them projects besides,
and of an offset by its place. Overlapping entries are of the tokens of entry e - 1, too, which have
projections of their own for it. A query sees the latest tokens as they are, and entries that end up to it:
all, or those that an indexer chose by entries of its own, smaller ones.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gpu_service.attention.base import PlannedAttention
from gpu_service.cache.kv_cache import CompressedCache
from gpu_service.core.step import ForwardInputs
from gpu_service.ops.rope import RopeTable
from moebius.models.layers.compressed import EntryBlocks


@dataclass(frozen=True, slots=True)
class CompressedDimensions:
    """Sizes of one rank's attention; filled by `attention.registry` from its configuration."""

    num_heads: int  # of this rank
    head_dim: int
    window: int
    rates: tuple[int, ...]  # Of each layer of the rank.
    sparse_layers: frozenset[int]  # Of these, those that choose.
    top_k: int
    index_num_heads: int
    index_head_dim: int
    softmax_scale: float
    # Whether layers store entries and keys themselves, which `compress` is not asked for.
    projects_keys: bool = False
    chooses_blocks: bool = False  # Whether some layer chooses blocks of entries first.


class Compression(NamedTuple):
    """How tokens become entries; filled by the layer, the same in every step but for the table."""

    rate: int
    # Float32 `[rate, row / 2]`, by a token's place in its entry; added to the logits of its weights.
    offsets: torch.Tensor
    norm_weight: torch.Tensor  # `[size]`
    eps: float
    # Of the first token of the entry that each row of the step ends; rotates the last elements of an entry.
    table: RopeTable

    @property
    def size(self) -> int:
        """Elements of an entry."""
        return self.norm_weight.shape[0]

    @property
    def width(self) -> int:
        """Tokens that have a part in an entry."""
        return self.rate * self.parts

    @property
    def parts(self) -> int:
        """Entries that a token has a part in: 2 where they overlap."""
        return self.offsets.shape[1] // self.size


class CompressedAttentionBackend(PlannedAttention):
    """Attention with one head of keys, which are values, too.

    Rows of the latest tokens are read from the slots `state_reads` of the planned inputs and left in the
    slots `state_writes`, so that a step may be run again; entries are written in place, always the same.
    """

    def __init__(self, dimensions: CompressedDimensions, cache: CompressedCache) -> None:
        self.dimensions = dimensions
        self.cache = cache
        # Whether queries of the planned step may have to choose entries; filled by `plan`.
        self.selects = False
        # What the latest layer that chooses did, for layers that share its choice; None: all entries.
        self.selection: torch.Tensor | None = None

    @classmethod
    def unsupported(cls, dimensions: CompressedDimensions, cache: CompressedCache) -> str:
        """Why this backend cannot serve these sizes on this machine; empty: it can."""
        return ""

    @abstractmethod
    def compress(
        self, rows: torch.Tensor, recent: torch.Tensor, pages: torch.Tensor, how: Compression
    ) -> None:
        """Stores the entries that end with a token of the step, and the latest rows.

        rows `[T, 2 * parts * size]`: values, for the entry after (where entries overlap) and for the own
        one, then logits of weights alike. recent `[slots, tokens, 2 * parts * size]`, at least `width` - 1
        tokens. pages `[num_pages, places, size]`.
        """

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        window: torch.Tensor,
        layer_id: int,
        sinks: torch.Tensor,
        selection: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns `[T, num_heads, head_dim]` of queries of that shape; the step's entries are stored already.

        keys `[T, head_dim]`, window `[slots, window - 1, head_dim]`, both rotated; the latest keys are left
        there. sinks float32 `[num_heads]`, a logit of each head without a value. selection: as `select`
        returns it; None: all entries up to a query, where the layer has any.
        """

    @abstractmethod
    def select(
        self,
        query: torch.Tensor,
        head_weights: torch.Tensor,
        layer_id: int,
        blocks: EntryBlocks | None = None,
    ) -> torch.Tensor:
        """Returns the entries with the highest scores: int32 `[T, top_k]`, ascending, then -1; where
        `selects`.

        query `[T, index heads, index head_dim]`, rotated; head_weights float32 `[T, index heads]`, scales
        included. Scores as in `MlaAttentionBackend.select`; among equal ones the earlier entry wins. blocks:
        the layer chooses them for later ones, or chooses among the entries of those that an earlier layer of
        this step chose.
        """

    def _may_select(self, longest: int) -> bool:
        """Returns whether some layer has more entries in `longest` tokens than a query may attend to."""
        sizes = self.dimensions
        return any(longest // sizes.rates[layer] > sizes.top_k for layer in sizes.sparse_layers)


def slots_of(inputs: ForwardInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the latest rows of each request are read and left, int64 `[R]`."""
    assert inputs.state_reads is not None, "a model with compressed attention keeps the latest tokens"
    assert inputs.state_writes is not None
    return inputs.state_reads, inputs.state_writes
