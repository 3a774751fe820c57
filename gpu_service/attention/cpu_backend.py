"""Paged attention on a CPU by the kernels of `kernels/dense`.

Queries read keys and values where they lie, in blocks with a running softmax (Dao et al. 2022,
arXiv:2205.14135), so that nothing is gathered, masked or padded. Single tokens and chunks of a few (draft
tokens) are computed row by row; rows of longer chunks share what they read. Layers that choose the blocks
that they see are left to torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from gpu_service.attention.base import AttentionLayer, grouped_queries
from gpu_service.attention.torch_reference import FirstSeen, TorchReferenceAttention
from gpu_service.cache.kv_cache import KVCache, PagedCache
from gpu_service.core.step import ForwardInputs
from gpu_service.ops.host_kernels import dense_threads
from moebius import _kernels
from moebius.models.layers.layer import Layers

# Longer chunks gain more from sharing what they read than they lose by widening it.
_MOST_CHUNK_ROWS = 8


class AttendingRows(NamedTuple):
    """Rows of a step that one call computes, for one window or chunk of layers; int32 `[n]` each."""

    requests: torch.Tensor
    begins: torch.Tensor  # The first position that a row sees.
    ends: torch.Tensor  # After the last one.


class HostAttention(ABC):
    """An attention backend on a CPU whose kernels `_kernels.DecoderLayers` calls as well."""

    # Those of all dense layers of the process.
    threads: _kernels.DenseThreads

    @property
    @abstractmethod
    def paged_cache(self) -> PagedCache:
        """Returns what the layers store in and attend to, in the activations' type or as e4m3."""

    @abstractmethod
    def lone_rows(self, window: int | None, chunk: int | None) -> AttendingRows | None:
        """Returns what the planned step's rows see in layers of this window or chunk, where all of them are
        computed one by one; None: some are not.
        """


class LoneRow(NamedTuple):
    """One such row."""

    row: int  # Of the step.
    request: int
    position: int


def divide_rows(inputs: ForwardInputs) -> tuple[list[LoneRow], list[int]]:
    """Returns the rows that are computed one by one, and the requests whose rows are computed together.

    Rows of an image, which see one another, are computed together.
    """
    starts = inputs.query_start_loc
    rows: list[LoneRow] = []
    prompts: list[int] = []
    for request, kv_len in enumerate(inputs.seq_lens):
        begin, end = starts[request], starts[request + 1]
        is_masked = inputs.visible_ends is not None and end - begin > 1
        if end - begin > _MOST_CHUNK_ROWS or is_masked:
            prompts.append(request)
            continue
        first = kv_len - (end - begin)
        rows += [LoneRow(begin + i, request, first + i) for i in range(end - begin)]
    return rows, prompts


class CpuAttention(TorchReferenceAttention, HostAttention):
    """Keys and values as they are stored: in the activations' float32 or bfloat16, or as e4m3."""

    def __init__(self, layers: Layers, kv_cache: KVCache) -> None:
        super().__init__(layers, kv_cache)
        self.threads = dense_threads(torch.get_num_threads())
        # Of the planned step: rows that are computed one by one, with their requests and positions.
        self._single_rows: list[LoneRow] = []
        self._row_index: torch.Tensor | None = None  # int64; None: all rows of the step, in order.
        # Requests whose rows are computed together.
        self._prompts: list[int] = []
        # By window and chunk of layers, and by request; None: the single rows.
        self._rows: dict[tuple[int | None, int | None, int | None], AttendingRows] = {}

    @classmethod
    def unsupported(cls, layers: Layers, kv_cache: KVCache) -> str:
        """Returns the reason, as `AttentionBackend.unsupported`."""
        if kv_cache.dtype not in (torch.float32, torch.bfloat16):
            return f"activations are {kv_cache.dtype}; allowed: float32, bfloat16"
        sizes = sorted({mixer.head_dim for mixer in grouped_queries(layers) if mixer.head_dim % 16})
        return f"heads have {sizes} elements; allowed: multiples of 16" if sizes else ""

    def plan(self, inputs: ForwardInputs) -> None:
        super().plan(inputs)
        self._single_rows, self._prompts = divide_rows(inputs)
        self._rows = {}
        index = [lone.row for lone in self._single_rows]
        self._row_index = torch.tensor(index) if self._prompts else None

    @property
    def paged_cache(self) -> KVCache:
        """Returns keys and values."""
        return self.kv_cache

    def lone_rows(self, window: int | None, chunk: int | None) -> AttendingRows | None:
        """Returns the rows as `HostAttention`."""
        if self._row_index is not None:
            return None
        return self._rows_of(AttentionLayer(window, chunk=chunk), None)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_id: int,
        layer: AttentionLayer,
    ) -> torch.Tensor:
        if layer.kept_blocks is not None:
            return super()._attend(query, key, value, layer_id, layer)
        index = self._row_index
        if index is None:
            return self._attend_rows(query, layer_id, layer)
        starts, prompts = self._planned.query_start_loc, self._prompts
        if len(prompts) == 1 and starts[prompts[0] + 1] - starts[prompts[0]] == starts[-1]:
            return self._attend_rows(query, layer_id, layer, prompts[0])
        output = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        if self._single_rows:
            output[index] = self._attend_rows(query[index], layer_id, layer)
        for request in prompts:
            rows = slice(starts[request], starts[request + 1])
            output[rows] = self._attend_rows(query[rows], layer_id, layer, request)
        return output

    def _attend_rows(
        self, query: torch.Tensor, layer_id: int, layer: AttentionLayer, prompt: int | None = None
    ) -> torch.Tensor:
        """`[n, num_heads, head_dim]` to `[n, num_heads * head_dim]`, of the single rows or of a prompt's."""
        pages, rows = self.kv_cache.pages(layer_id), self._rows_of(layer, prompt)
        num_rows, num_heads, head_dim = query.shape
        dtype = self.kv_cache.dtype
        if query.stride(2) != 1 or query.stride(1) != head_dim or query.dtype != dtype:
            query = query.to(dtype).contiguous()
        sinks = None if layer.sinks is None else layer.sinks.float().contiguous()
        output = torch.empty(num_rows, num_heads * head_dim, dtype=dtype)
        table = self._planned.block_table
        self.threads.attend(
            dtype == torch.bfloat16,
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
            prompt is not None,
            *self.kv_cache.host_storage(layer_id),
        )
        return output

    def _rows_of(self, layer: AttentionLayer, prompt: int | None) -> AttendingRows:
        """The single rows, or those of one request, with what they see in layers of this window or chunk."""
        key = layer.window, layer.chunk, prompt
        found = self._rows.get(key)
        if found is None:
            seen = FirstSeen(layer.window, layer.chunk)
            if prompt is None:
                columns = [(row.request, seen(row.position), row.position + 1) for row in self._single_rows]
                requests, begins, ends = torch.tensor(columns, dtype=torch.int32).t().contiguous()
            else:
                requests, begins, ends = self._rows_of_prompt(prompt, seen, layer.window)
            found = self._rows[key] = AttendingRows(requests, begins, ends)
        return found

    def _rows_of_prompt(
        self, request: int, seen: FirstSeen, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the columns of `AttendingRows`; layers with a window see to the ends of images, too."""
        inputs = self._planned
        begin, end = inputs.query_start_loc[request : request + 2]
        last = inputs.seq_lens[request]
        positions = torch.arange(last - (end - begin), last)
        ends = positions + 1
        if window is not None and inputs.visible_ends is not None:
            ends = inputs.visible_ends[begin:end]
        columns = torch.full_like(positions, request), seen.of_rows(positions), ends
        requests, begins, ends = (column.to(torch.int32).contiguous() for column in columns)
        return requests, begins, ends
