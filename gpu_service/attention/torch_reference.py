"""Paged attention in plain torch: the oracle of every other backend, and what a machine without GPU runs.

Requests that compute one token share padded, masked products (one per class of similar length); each
prefill chunk gets its own. Keys are gathered by whole pages, because long contiguous rows copy fastest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from gpu_service.attention.base import AttentionBackend, check_step
from gpu_service.batch import ForwardInputs
from gpu_service.cache.fp8 import dequantise_into
from gpu_service.cache.kv_cache import KVCache
from gpu_service.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Requests of similar length that compute one token each; filled by `plan`."""

    rows: torch.Tensor | None  # int64 [R], their rows in the step; None: all rows, in order
    pages: torch.Tensor  # int64 [R * P], each request's pages, padded with the dummy page
    num_requests: int
    mask: torch.Tensor  # cache dtype [R, 1, 1, P * page_size], 0 or -inf


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Several consecutive tokens of one request; filled by `plan`."""

    begin: int  # first row in the step
    end: int
    pages: torch.Tensor  # int64 [P]
    kv_len: int
    mask: torch.Tensor | None  # cache dtype [n, kv_len], 0 or -inf; None: plain causal, no earlier tokens


class TorchReferenceAttention(AttentionBackend):
    """Gather pages, then torch's scaled dot-product attention."""

    def __init__(self, config: ModelConfig, kv_cache: KVCache) -> None:
        super().__init__(config, kv_cache)
        self._decode_groups: list[_DecodeGroup] = []
        self._chunks: list[_Chunk] = []
        self._slot_mapping = torch.empty(0, dtype=torch.int64)
        # Gathered pages of one layer, kept between calls: fresh memory of this size costs a page fault per
        # 4 KiB, which is more than the copy itself. A second one where pages must be converted, too.
        shape = (0, *kv_cache.pages(0).shape[1:])
        self._gathered = torch.empty(shape, dtype=kv_cache.storage_dtype, device=kv_cache.device)
        self._dequantised = torch.empty(shape, dtype=kv_cache.dtype, device=kv_cache.device)

    def plan(self, inputs: ForwardInputs) -> None:
        """See the base class."""
        check_step(inputs, self.kv_cache.page_size)
        starts, seq_lens = inputs.query_start_loc, inputs.seq_lens
        page_size = self.kv_cache.page_size
        table = inputs.block_table.long()
        self._slot_mapping = inputs.slot_mapping
        self._chunks = []
        by_length: dict[int, list[int]] = {}
        for index, kv_len in enumerate(seq_lens):
            begin, end = starts[index], starts[index + 1]
            num_pages = -(-kv_len // page_size)
            if end - begin == 1:
                # Lengths within a factor of two share a group: padding at most doubles the copy.
                by_length.setdefault(num_pages.bit_length(), []).append(index)
            else:
                self._chunks.append(self._plan_chunk(begin, end, kv_len, table[index, :num_pages]))
        all_rows = len(by_length) == 1 and not self._chunks
        self._decode_groups = [
            self._plan_decode(requests, inputs, table, all_rows) for requests in by_length.values()
        ]
        gathers = [group.pages for group in self._decode_groups] + [chunk.pages for chunk in self._chunks]
        most_pages = max((pages.shape[0] for pages in gathers), default=0)
        if self._gathered.shape[0] < most_pages:
            self._gathered = self._gathered.new_empty(most_pages, *self._gathered.shape[1:])
            if self.kv_cache.is_quantised:
                self._dequantised = self._dequantised.new_empty(self._gathered.shape)

    def _gather(self, layer_id: int, pages: torch.Tensor) -> torch.Tensor:
        """Copy pages side by side, in the compute type; valid until the next gather."""
        cache, gathered = self.kv_cache.pages(layer_id), self._gathered[: pages.shape[0]]
        if not self.kv_cache.is_quantised:
            return torch.index_select(cache, 0, pages, out=gathered)
        torch.index_select(cache.view(torch.uint8), 0, pages, out=gathered.view(torch.uint8))
        dequantised = self._dequantised[: pages.shape[0]]
        scales = self.kv_cache.key_scales[layer_id], self.kv_cache.value_scales[layer_id]
        dequantise_into(dequantised, gathered, *scales)
        return dequantised

    def _plan_chunk(self, begin: int, end: int, kv_len: int, pages: torch.Tensor) -> _Chunk:
        num_new = end - begin
        mask = None
        if num_new < kv_len:
            mask = torch.full(
                (num_new, kv_len), float("-inf"), dtype=self.kv_cache.dtype, device=pages.device
            )
            mask.triu_(diagonal=kv_len - num_new + 1)
        return _Chunk(begin, end, pages, kv_len, mask)

    def _plan_decode(
        self, requests: list[int], inputs: ForwardInputs, table: torch.Tensor, all_rows: bool
    ) -> _DecodeGroup:
        device, page_size = table.device, self.kv_cache.page_size
        kv_lens = torch.tensor([inputs.seq_lens[i] for i in requests], device=device)
        num_pages = -(-max(inputs.seq_lens[i] for i in requests) // page_size)
        positions = torch.arange(num_pages * page_size, device=device)
        mask = torch.zeros(len(requests), positions.shape[0], dtype=self.kv_cache.dtype, device=device)
        mask.masked_fill_(positions >= kv_lens[:, None], float("-inf"))
        rows = None
        if all_rows:
            pages = table[:, :num_pages]
        else:
            rows = torch.tensor([inputs.query_start_loc[i] for i in requests], device=device)
            pages = table[torch.tensor(requests, device=device), :num_pages]
        return _DecodeGroup(rows, pages.reshape(-1), len(requests), mask[:, None, None])

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer_id: int
    ) -> torch.Tensor:
        """See the base class."""
        self.kv_cache.append(layer_id, key, value, self._slot_mapping)
        if len(self._decode_groups) == 1 and self._decode_groups[0].rows is None:
            return self._decode(query, layer_id, self._decode_groups[0])
        output = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        for group in self._decode_groups:
            assert group.rows is not None
            output.index_copy_(0, group.rows, self._decode(query[group.rows], layer_id, group))
        for chunk in self._chunks:
            rows = slice(chunk.begin, chunk.end)
            output[rows] = self._attend_chunk(query[rows], layer_id, chunk)
        return output

    def _decode(self, query: torch.Tensor, layer_id: int, group: _DecodeGroup) -> torch.Tensor:
        """query `[R, num_heads, D]`; the heads of a KV group stand in the place of query positions."""
        kv_heads, head_dim = self.kv_cache.num_kv_heads, query.shape[-1]
        gathered = self._gather(layer_id, group.pages)
        gathered = gathered.view(group.num_requests, -1, 2 * kv_heads, head_dim).transpose(1, 2)
        output = scaled_dot_product_attention(
            query.view(group.num_requests, kv_heads, -1, head_dim),
            gathered[:, :kv_heads],
            gathered[:, kv_heads:],
            attn_mask=group.mask,
            scale=self.config.softmax_scale,
        )
        return output.reshape(group.num_requests, -1)

    def _attend_chunk(self, query: torch.Tensor, layer_id: int, chunk: _Chunk) -> torch.Tensor:
        """query `[n, num_heads, D]`; KV heads stand in the place of the batch, so keys are not repeated."""
        kv_heads, (num_new, num_heads, head_dim) = self.kv_cache.num_kv_heads, query.shape
        groups = num_heads // kv_heads
        gathered = self._gather(layer_id, chunk.pages).view(-1, 2 * kv_heads, head_dim)[: chunk.kv_len]
        by_head = gathered.transpose(0, 1).unsqueeze(1).expand(-1, groups, -1, -1)
        output = scaled_dot_product_attention(
            query.view(num_new, kv_heads, groups, head_dim).permute(1, 2, 0, 3),
            by_head[:kv_heads],
            by_head[kv_heads:],
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=self.config.softmax_scale,
        )
        return output.permute(2, 0, 1, 3).reshape(num_new, -1)
