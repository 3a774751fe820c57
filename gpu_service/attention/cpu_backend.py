"""Paged attention on a CPU: single tokens by the kernels of `kernels/dense`, chunks of prompts by torch.

A token's query reads keys and values where they lie, in blocks with a running softmax (Dao et al. 2022,
arXiv:2205.14135), so that nothing is gathered, masked or padded. Chunks of a few tokens (draft tokens) are
computed row by row likewise; longer ones share what they read in torch's kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gpu_service.attention.base import AttentionLayer, grouped_queries
from gpu_service.attention.torch_reference import FirstSeen, TorchReferenceAttention
from gpu_service.cache.kv_cache import KVCache
from gpu_service.core.step import ForwardInputs
from gpu_service.ops.host_kernels import dense_threads
from moebius.models.layers.layer import Layers

# Longer chunks gain more from sharing what they read than they lose by gathering it.
_MOST_CHUNK_ROWS = 8


class _Rows(NamedTuple):
    """Rows of a step that are computed one by one, for one window or chunk; int32 `[n]` each."""

    requests: torch.Tensor
    begins: torch.Tensor  # The first position that a row sees.
    ends: torch.Tensor  # After the last one.


class CpuAttention(TorchReferenceAttention):
    """Float32 and bfloat16 keys and values as they are stored; anything else as the reference has it."""

    def __init__(self, layers: Layers, kv_cache: KVCache) -> None:
        super().__init__(layers, kv_cache)
        self._threads = dense_threads(torch.get_num_threads())
        # Of the planned step: rows that are computed one by one, with their requests and positions.
        self._single_rows: list[tuple[int, int, int]] = []
        self._row_index: torch.Tensor | None = None  # int64; None: all rows of the step, in order.
        self._rows: dict[tuple[int | None, int | None], _Rows] = {}

    @classmethod
    def unsupported(cls, layers: Layers, kv_cache: KVCache) -> str:
        """Returns the reason, as `AttentionBackend.unsupported`."""
        if kv_cache.is_quantised or kv_cache.dtype not in (torch.float32, torch.bfloat16):
            return f"keys and values are {kv_cache.storage_dtype}; allowed: float32, bfloat16"
        sizes = sorted({mixer.head_dim for mixer in grouped_queries(layers) if mixer.head_dim % 16})
        return f"heads have {sizes} elements; allowed: multiples of 16" if sizes else ""

    def plan(self, inputs: ForwardInputs) -> None:
        super().plan(inputs)
        starts, single, rows = inputs.query_start_loc, set[int](), []
        for request, kv_len in enumerate(inputs.seq_lens):
            begin, end = starts[request], starts[request + 1]
            is_masked = inputs.visible_ends is not None and end - begin > 1
            if end - begin > _MOST_CHUNK_ROWS or is_masked:
                continue
            single.add(request)
            first = kv_len - (end - begin)
            rows += [(begin + i, request, first + i) for i in range(end - begin)]
        self._left_out, self._single_rows, self._rows = frozenset(single), rows, {}
        everything = len(rows) == starts[-1]
        self._row_index = None if everything else torch.tensor([row for row, _, _ in rows])

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_id: int,
        layer: AttentionLayer,
    ) -> torch.Tensor:
        if layer.kept_blocks is not None:
            return self._attend_gathered(query, key, value, layer_id, layer)
        index = self._row_index
        if index is None:
            return self._attend_rows(query, layer_id, layer)
        output = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        if self._single_rows:
            output[index] = self._attend_rows(query[index], layer_id, layer)
        for chunk in self._plan_of(layer.window, layer.chunk).chunks:
            rows = slice(chunk.begin, chunk.end)
            output[rows] = self._attend_chunk(query[rows], layer_id, chunk, layer)
        return output

    def _attend_gathered(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_id: int,
        layer: AttentionLayer,
    ) -> torch.Tensor:
        """Returns all requests as the reference has them: of layers that chose what they see."""
        left_out, plans = self._left_out, self._plans
        self._left_out, self._plans = frozenset(), {}
        try:
            return super()._attend(query, key, value, layer_id, layer)
        finally:
            self._left_out, self._plans = left_out, plans

    def _attend_rows(self, query: torch.Tensor, layer_id: int, layer: AttentionLayer) -> torch.Tensor:
        """Returns `[n, num_heads, head_dim]` of the single rows, in order, to `[n, num_heads * head_dim]`."""
        pages, rows = self.kv_cache.pages(layer_id), self._rows_of(layer)
        num_rows, num_heads, head_dim = query.shape
        if query.stride(2) != 1 or query.stride(1) != head_dim or query.dtype != pages.dtype:
            query = query.to(pages.dtype).contiguous()
        sinks = None if layer.sinks is None else layer.sinks.float().contiguous()
        output = torch.empty(num_rows, num_heads * head_dim, dtype=pages.dtype)
        table = self._planned.block_table
        self._threads.attend(
            pages.dtype == torch.bfloat16,
            query.data_ptr(),
            query.stride(0),
            pages.data_ptr(),
            self.kv_cache.page_size,
            table.data_ptr(),
            table.stride(0),
            rows.requests.data_ptr(),
            rows.begins.data_ptr(),
            rows.ends.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            output.data_ptr(),
            self.mixers[layer_id].scale,
            num_rows,
            num_heads,
            self.kv_cache.kv_heads(layer_id),
            head_dim,
        )
        return output

    def _rows_of(self, layer: AttentionLayer) -> _Rows:
        """Returns the single rows with what they see in layers of this window or chunk."""
        found = self._rows.get((layer.window, layer.chunk))
        if found is None:
            seen = FirstSeen(layer.window, layer.chunk)
            columns = [(request, seen(position), position + 1) for _, request, position in self._single_rows]
            requests, begins, ends = torch.tensor(columns, dtype=torch.int32).t().contiguous()
            found = self._rows[layer.window, layer.chunk] = _Rows(requests, begins, ends)
        return found
