"""Compressed attention whose layers share entries: few make them, and the small keys that they are chosen by
are projected from them.

Source: `Compressor`, `Indexer` and `Attention` in DeepSeek-V4.1's published `inference/model.py`. Attribute
names of compressor and indexer are those of the checkpoint.
"""

from __future__ import annotations

import torch
from torch import nn

from gpu_service.attention.compressed.base import CompressedAttentionBackend
from gpu_service.core.depths import at_depth
from gpu_service.core.step import ForwardInputs
from gpu_service.layers.composition import Composition
from gpu_service.layers.compressed import EntryAttention, EntryQueries
from gpu_service.layers.linear import Linear
from gpu_service.layers.norm import RMSNorm
from gpu_service.layers.rank_weights import RankWeights
from gpu_service.ops.pooled import pooled_rows
from gpu_service.ops.rope import RopeTable, apply_rope
from moebius.models.layers import compressed
from moebius.models.layers.layer import Places


class EntryCompressor(nn.Module):
    """What tokens project for their entries; every rank has all of it."""

    def __init__(self, spec: compressed.SharedEntryAttention, own: RankWeights) -> None:
        super().__init__()
        self._rate = spec.rate
        self.projections, self.norm = Linear(own.under("projections")), RMSNorm(own.under("norm"), spec.eps)

    def forward(
        self, hidden_states: torch.Tensor, recent: list[torch.Tensor], inputs: ForwardInputs
    ) -> torch.Tensor:
        """Maps `[T, H]` to the entries `[T, head_dim]` that would end with each row, not rotated; the latest
        rows go to the slots that the step writes.
        """
        rows: torch.Tensor = self.projections(hidden_states)
        if self._rate > 1:
            rows = self._pooled(rows, recent[0], inputs)
        entries: torch.Tensor = self.norm(rows)
        return entries

    def _pooled(self, rows: torch.Tensor, recent: torch.Tensor, inputs: ForwardInputs) -> torch.Tensor:
        parts = [(depth.index, at_depth(inputs, depth)) for depth in inputs.depths]
        if not parts:
            return pooled_rows(rows, recent, inputs)
        output = rows.new_empty(rows.shape[0], rows.shape[1] // 2)
        for index, own in parts:
            output[index] = pooled_rows(rows[index], recent, own)
        return output


class SharedIndexer(EntryQueries):
    """Queries, and keys where the layer has entries."""

    def __init__(
        self,
        spec: compressed.SharedEntryAttention,
        sizes: compressed.EntryIndexer,
        own: RankWeights,
    ) -> None:
        super().__init__(spec, sizes, own)
        self.wk = Linear(keys) if (keys := own.under("wk")) else None
        self.k_norm = RMSNorm(norm, spec.eps) if (norm := own.under("k_norm")) else None

    def keys(self, entries: torch.Tensor, table: RopeTable) -> torch.Tensor:
        """Returns the keys `[T, index head_dim]` of entries `[T, head_dim]` that are not rotated."""
        assert self.wk is not None
        assert self.k_norm is not None
        keys: torch.Tensor = self.k_norm(self.wk(entries))
        apply_rope(keys[:, None, self._head_dim - self._rope_dim :], table)
        return keys


class SharedEntryAttention(EntryAttention):
    """A layer that has entries stores them and the keys that they are chosen by, others read them; a layer
    without an indexer attends to what the nearest earlier one chose.
    """

    def __init__(self, spec: compressed.SharedEntryAttention, places: Places, made: Composition) -> None:
        super().__init__(spec, places, made)
        own = self._own
        self._shared = spec
        self.compressor = EntryCompressor(spec, own.under("compressor")) if spec.compresses else None
        self.indexer: SharedIndexer | None = None
        if spec.indexer is not None:
            self.indexer = SharedIndexer(spec, spec.indexer, own.under("indexer"))

    def _compress(
        self,
        hidden_states: torch.Tensor,
        latent: torch.Tensor,
        rope: RopeTable,
        inputs: ForwardInputs,
        recent: list[torch.Tensor],
        backend: CompressedAttentionBackend,
    ) -> torch.Tensor | None:
        spec = self._shared
        if not spec.rate:
            return None
        if self.compressor is not None:
            entries = self.compressor(hidden_states, recent, inputs)
            self._store(entries, rope, inputs, backend)
        if self.indexer is not None:
            backend.selection = None
            if backend.selects:
                own = hidden_states, latent, rope, backend, self.layer_id, spec.blocks
                backend.selection = self.indexer(*own)
        return backend.selection

    def _store(
        self,
        entries: torch.Tensor,
        rope: RopeTable,
        inputs: ForwardInputs,
        backend: CompressedAttentionBackend,
    ) -> None:
        """Puts the entries that end with a row of the step into the pages; others go to the page that no
        request has.
        """
        spec, cache = self._shared, backend.cache
        table = self._tables.of_entries(rope, inputs.positions, spec.rate)
        places = cache.entry_places(self.layer_id, inputs.positions, inputs.slot_mapping)
        if self.indexer is not None:
            keys = self.indexer.keys(entries, table)
            cache.index_pages(self.layer_id).flatten(0, 1).index_copy_(0, places, keys)
        apply_rope(entries[:, None, spec.head_dim - spec.rope_dim :], table)
        cache.pages(self.layer_id).flatten(0, 1).index_copy_(0, places, entries)
