"""The Triton backend of compressed attention: nothing planned on the host, any step captured."""

from __future__ import annotations

import torch

from gpu_service.attention.compressed.base import (
    CompressedAttentionBackend,
    CompressedDimensions,
    Compression,
    slots_of,
)
from gpu_service.attention.compressed.triton_kernels import (
    compress_rows,
    compressed_attention,
    keep_latest,
)
from gpu_service.attention.mla.triton_kernels import MAX_SCORES, choose_pools, mla_tile
from gpu_service.attention.triton_tiles import streaming_multiprocessors
from gpu_service.cache.kv_cache import CompressedCache
from gpu_service.core.depths import at_depth
from gpu_service.core.step import ForwardInputs
from gpu_service.ops.rope import RopeTable
from moebius.models.layers.compressed import EntryBlocks


class TritonCompressedAttention(CompressedAttentionBackend):
    """Indices are read from the step's device tensors."""

    captures = True

    def __init__(self, dimensions: CompressedDimensions, cache: CompressedCache) -> None:
        super().__init__(dimensions, cache)
        self._longest = 1
        # Of a step with drafts, the rows of each depth and their inputs.
        self._depths: list[tuple[torch.Tensor, ForwardInputs]] = []
        self._num_sms = streaming_multiprocessors(cache.device)
        # One for all layers: in stream order, no two use it at a time.
        num_scores = MAX_SCORES if dimensions.sparse_layers else 0
        self._scores = torch.empty(num_scores, dtype=torch.float32, device=cache.device)

    @classmethod
    def unsupported(cls, dimensions: CompressedDimensions, cache: CompressedCache) -> str:
        if dimensions.chooses_blocks:
            return "layers that choose blocks of entries first: a shorter max_model_len needs no such choice"
        odd = [size for size in (dimensions.head_dim, dimensions.index_head_dim) if size % 2]
        return f"heads of {odd[0]} elements: an even number is needed" if odd else ""

    def plan(self, inputs: ForwardInputs) -> None:
        self._prepare(inputs, max(inputs.seq_lens, default=1))

    def plan_capture(self, inputs: ForwardInputs) -> None:
        """Plans the step as if it had the longest sequence that the block table can hold."""
        self._prepare(inputs, inputs.block_table.shape[1] * self.cache.page_size)

    def plan_replay(self, inputs: ForwardInputs) -> None:
        """The recorded kernels find all they need in the refilled tensors."""

    def _prepare(self, inputs: ForwardInputs, longest: int) -> None:
        inputs.check(self.cache.page_size)
        slots_of(inputs)
        self._inputs, self._longest = inputs, longest
        self._depths = [(depth.index, at_depth(inputs, depth)) for depth in inputs.depths]
        self.selects = self._may_select(longest)

    def compress(
        self, rows: torch.Tensor, recent: torch.Tensor, pages: torch.Tensor, how: Compression
    ) -> None:
        parts = [(rows, how, self._planned)]
        if self._depths:
            parts = [
                (rows[index], how._replace(table=_table_rows(how.table, index)), inputs)
                for index, inputs in self._depths
            ]
        for own, own_table, inputs in parts:
            compress_rows(own, recent, pages, own_table, inputs, self.cache.page_size)
            keep_latest(own, recent, inputs)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        window: torch.Tensor,
        layer_id: int,
        sinks: torch.Tensor,
        selection: torch.Tensor | None,
    ) -> torch.Tensor:
        if not self._depths:
            return self._attend(query, keys, window, layer_id, sinks, selection, self._planned)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for index, inputs in self._depths:
            chosen = None if selection is None else selection[index]
            own = query[index], keys[index], window, layer_id, sinks, chosen, inputs
            output[index] = self._attend(*own)
        return output

    def _attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        window: torch.Tensor,
        layer_id: int,
        sinks: torch.Tensor,
        selection: torch.Tensor | None,
        inputs: ForwardInputs,
    ) -> torch.Tensor:
        """`attend` of the rows of `inputs`."""
        sizes, rate = self.dimensions, self.cache.rates[layer_id]
        output = compressed_attention(
            query,
            keys,
            window,
            self.cache.pages(layer_id) if rate else None,
            rate,
            sinks,
            selection,
            inputs,
            self.cache.page_size,
            sizes.softmax_scale,
            mla_tile(query.dtype, query.shape[0], sizes.num_heads, self._num_sms),
        )
        keep_latest(keys, window, inputs)
        return output

    def select(
        self,
        query: torch.Tensor,
        head_weights: torch.Tensor,
        layer_id: int,
        blocks: EntryBlocks | None = None,
    ) -> torch.Tensor:
        assert blocks is None, "`unsupported` says so"
        inputs, sizes = self._planned, self.dimensions
        return choose_pools(
            query,
            head_weights,
            self.cache.index_pages(layer_id),
            inputs.block_table,
            inputs.seq_lens_tensor,
            inputs.query_start_loc_tensor,
            self._longest,
            self.cache.rates[layer_id],
            sizes.top_k,
            self.cache.page_size,
            self._scores,
        )


def _table_rows(table: RopeTable, index: torch.Tensor) -> RopeTable:
    """Returns the table of some rows of the step."""
    parts = (table.cos_sin, table.rows, table.query_scale)
    cos_sin, rows, query_scale = (None if part is None else part[index] for part in parts)
    return RopeTable(table.cos[index], table.sin[index], table.interleaved, cos_sin, rows, query_scale)
