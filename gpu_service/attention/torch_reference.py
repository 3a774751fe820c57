"""Paged attention in plain torch: the reference of every other backend, and what a machine without GPU runs.

Requests that compute one token share padded, masked calls of torch's attention (one per class of similar
length); each prefill chunk gets its own. Keys are gathered by whole pages, because long contiguous rows copy
fastest. What is gathered is planned once for each window or chunk that layers have (`GatherPlan`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from gpu_service.attention.base import AttentionBackend, AttentionLayer
from gpu_service.cache.fp8 import dequantise_into
from gpu_service.cache.kv_cache import KVCache
from gpu_service.core.step import ForwardInputs
from gpu_service.ops.linear import widened
from moebius.models.layers.layer import Layers


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Requests of similar length that compute one token each; filled by `plan_gathers`."""

    rows: torch.Tensor | None  # int64 [R], their rows in the step; None: all rows, in order
    pages: torch.Tensor  # int64 [R * P], each request's pages, padded with the dummy page
    num_requests: int
    mask: torch.Tensor  # cache dtype [R, 1, 1, P * page_size], 0 or -inf


@dataclass(frozen=True, slots=True)
class QueryChunk:
    """Several consecutive tokens of one request; filled by `plan_gathers`."""

    begin: int  # first row in the step
    end: int
    pages: torch.Tensor  # int64 [P]
    kv_len: int  # keys read, from the first page's first on
    mask: torch.Tensor | None  # cache dtype [n, kv_len], 0 or -inf; None: plain causal, no earlier tokens


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """A step's reads; filled by `plan_gathers`."""

    decode_groups: Sequence[DecodeGroup]
    chunks: Sequence[QueryChunk]

    @property
    def most_pages(self) -> int:
        """The pages of the largest gather; gathers follow one another."""
        gathers = [group.pages for group in self.decode_groups] + [chunk.pages for chunk in self.chunks]
        return max((pages.shape[0] for pages in gathers), default=0)


def plan_gathers(
    inputs: ForwardInputs,
    table: torch.Tensor,
    page_size: int,
    dtype: torch.dtype,
    window: int | None,
    chunk: int | None = None,
) -> GatherPlan:
    """`table`: the step's block table as int64; pages before the window or chunk are not read at all."""
    seen = FirstSeen(window, chunk)
    starts, chunks = inputs.query_start_loc, []
    by_length: dict[int, list[int]] = {}
    for index, kv_len in enumerate(inputs.seq_lens):
        begin, end = starts[index], starts[index + 1]
        if end - begin == 1:
            num_pages = -(-kv_len // page_size) - seen(kv_len - 1) // page_size
            # Lengths within a factor of two share a group: padding at most doubles the copy.
            by_length.setdefault(num_pages.bit_length(), []).append(index)
        else:
            ahead = None if window is None or inputs.visible_ends is None else inputs.visible_ends[begin:end]
            chunks.append(_plan_chunk(begin, end, kv_len, table[index], page_size, dtype, seen, ahead))
    all_rows = len(by_length) == 1 and not chunks
    groups = [
        _plan_decode(requests, inputs, table, page_size, dtype, seen, all_rows)
        for requests in by_length.values()
    ]
    return GatherPlan(groups, chunks)


@dataclass(frozen=True, slots=True)
class FirstSeen:
    """The earliest position that a query sees, by its own."""

    window: int | None
    chunk: int | None

    @property
    def is_first(self) -> bool:
        """Returns whether every query sees the first position."""
        return self.window is None and self.chunk is None

    def __call__(self, position: int) -> int:
        """Returns the first position that one query sees."""
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0 if self.window is None else max(0, position + 1 - self.window)

    def of_rows(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns the first positions that several queries see, int64."""
        if self.chunk is not None:
            return positions // self.chunk * self.chunk
        return positions * 0 if self.window is None else (positions + 1 - self.window).clamp_(min=0)


def _plan_chunk(
    begin: int,
    end: int,
    kv_len: int,
    row: torch.Tensor,
    page_size: int,
    dtype: torch.dtype,
    seen: FirstSeen,
    visible_ends: torch.Tensor | None,
) -> QueryChunk:
    num_new = end - begin
    first_page = seen(kv_len - num_new) // page_size
    pages = row[first_page : -(-kv_len // page_size)]
    own = range(kv_len - num_new, kv_len)
    kv_len -= first_page * page_size
    mask = None
    if num_new < kv_len or seen(own.stop - 1) or visible_ends is not None:
        mask = torch.full((num_new, kv_len), float("-inf"), dtype=dtype, device=row.device)
        mask.triu_(diagonal=kv_len - num_new + 1)
        positions = torch.arange(own.start, own.stop, device=row.device)[:, None]
        keys = torch.arange(kv_len, device=row.device) + first_page * page_size
        if visible_ends is not None:
            mask.zero_().masked_fill_(keys >= visible_ends[:, None], float("-inf"))
        if not seen.is_first:
            mask.masked_fill_(keys < seen.of_rows(positions), float("-inf"))
    return QueryChunk(begin, end, pages, kv_len, mask)


def _plan_decode(
    requests: list[int],
    inputs: ForwardInputs,
    table: torch.Tensor,
    page_size: int,
    dtype: torch.dtype,
    seen: FirstSeen,
    all_rows: bool,
) -> DecodeGroup:
    device, lengths = table.device, [inputs.seq_lens[i] for i in requests]
    first_pages = [seen(length - 1) // page_size for length in lengths]
    num_pages = max(
        -(-length // page_size) - first for length, first in zip(lengths, first_pages, strict=True)
    )
    kv_lens = torch.tensor(lengths, device=device)[:, None]
    positions = torch.arange(num_pages * page_size, device=device)
    own = table if all_rows else table[torch.tensor(requests, device=device)]
    if seen.is_first:
        pages = own[:, :num_pages]
        hidden = positions >= kv_lens
    else:
        first = torch.tensor(first_pages, device=device)[:, None]
        # After a request's last page its own pages are repeated; the mask hides them.
        columns = (first + torch.arange(num_pages, device=device)).clamp_(max=own.shape[1] - 1)
        pages = own.gather(1, columns)
        positions = positions + first * page_size
        hidden = (positions >= kv_lens) | (positions < seen.of_rows(kv_lens - 1))
    mask = torch.zeros(len(requests), num_pages * page_size, dtype=dtype, device=device)
    mask.masked_fill_(hidden, float("-inf"))
    rows = None if all_rows else torch.tensor([inputs.query_start_loc[i] for i in requests], device=device)
    return DecodeGroup(rows, pages.reshape(-1), len(requests), mask[:, None, None])


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes `softmax(scale * query key^T + mask) value`; a sink adds its exponential to the softmax's sum.

    query `[B, N, L, head_dim]`; key, value `[B, N, S, head_dim]`; mask of query's dtype, 0 or -inf,
    broadcastable to `[B, N, L, S]`, or None: causal from the first key on; sinks broadcastable to
    `[B, N, L]`, any float type. Returns `[B, N, L, head_dim]`.
    """
    if query.device.type == "cuda":
        # Of strided keys torch 2.11's memory-efficient kernel gives the last of 64 n + 1 rows wrongly.
        key, value = key.contiguous(), value.contiguous()
    if sinks is None:
        q, k, v, added = widened(query, key, value, mask)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=added, is_causal=mask is None, scale=scale)
        return attended.to(query.dtype)
    fused = attend_with_lse if query.device.type == "cpu" else attend_with_lse_unfused
    output, lse = fused(query, key, value, mask, scale)
    # Of exp(lse) + exp(sink) the keys hold this share, and the sink's value is nothing.
    return output * torch.sigmoid(lse - sinks.float()).unsqueeze(-1).to(output.dtype)


def attend_with_lse(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what `attend` computes without sinks, and float32 `[B, N, L]`: the scores' log-sum-exp.

    CPU only.
    """
    q, k, v, added = widened(query, key, value, mask)
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, mask is None, attn_mask=added, scale=scale
    )
    return output.to(query.dtype), lse


def attend_with_lse_unfused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the same on any device, with all scores in memory."""
    q, k, v = widened(query, key, value)
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if mask is None:
        length, num_keys = scores.shape[-2:]
        mask = torch.full((length, num_keys), float("-inf"), device=query.device).triu_(1)
    scores = scores + mask
    return (scores.softmax(-1).to(v.dtype) @ v).to(value.dtype), scores.logsumexp(-1)


def block_mask(layer: AttentionLayer, num_keys: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns a layer's `kept_blocks` by token: 0 or -inf `[n, num_kv_heads, num_keys]`."""
    kept = layer.kept_blocks
    assert kept is not None, "asked only where rows have chosen"
    block = torch.arange(num_keys, device=kept.device) // layer.block_size
    # Keys after the longest sequence are hidden otherwise.
    seen = kept[..., block.clamp(max=kept.shape[-1] - 1)]
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, float("-inf"))


class TorchReferenceAttention(AttentionBackend):
    """Gather pages, then torch's scaled dot-product attention."""

    def __init__(self, layers: Layers, kv_cache: KVCache) -> None:
        super().__init__(layers, kv_cache)
        self._table = torch.empty(0, dtype=torch.int64)
        # By window and chunk.
        self._plans: dict[tuple[int | None, int | None], GatherPlan] = {}
        # Gathered pages of one layer, kept between calls: fresh memory of this size costs a page fault per
        # 4 KiB, which is more than the copy itself. A second one where pages must be converted, too.
        # Elements of a page in the layer that has most.
        self._page_elements = max(kv_cache.pages(i)[0].numel() for i in range(kv_cache.num_layers))
        self._gathered = torch.empty(0, dtype=kv_cache.storage_dtype, device=kv_cache.device)
        self._dequantised = torch.empty(0, dtype=kv_cache.dtype, device=kv_cache.device)

    def plan(self, inputs: ForwardInputs) -> None:
        inputs.check(self.kv_cache.page_size)
        self._inputs, self._table = inputs, inputs.block_table.long()
        self._max_length = max(inputs.seq_lens, default=1)
        self._plans = {}

    def _plan_of(self, window: int | None, chunk: int | None) -> GatherPlan:
        """The step's plan for layers of this window or chunk, made when the first of them asks."""
        plan = self._plans.get((window, chunk))
        if plan is None:
            cache = self.kv_cache
            sizes = cache.page_size, cache.dtype, window, chunk
            plan = plan_gathers(self._planned, self._table, *sizes)
            self._plans[window, chunk] = plan
            if self._gathered.shape[0] < plan.most_pages * self._page_elements:
                self._gathered = self._gathered.new_empty(plan.most_pages * self._page_elements)
                if cache.is_quantised:
                    self._dequantised = self._dequantised.new_empty(self._gathered.shape)
        return plan

    def _gather(self, layer_id: int, pages: torch.Tensor) -> torch.Tensor:
        """Copy pages side by side, in the compute type; valid until the next gather."""
        cache = self.kv_cache.pages(layer_id)
        shape = (pages.shape[0], *cache.shape[1:])
        gathered = self._gathered[: math.prod(shape)].view(shape)
        if not self.kv_cache.is_quantised:
            return torch.index_select(cache, 0, pages, out=gathered)
        torch.index_select(cache.view(torch.uint8), 0, pages, out=gathered.view(torch.uint8))
        dequantised = self._dequantised[: math.prod(shape)].view(shape)
        scales = self.kv_cache.key_scales[layer_id], self.kv_cache.value_scales[layer_id]
        dequantise_into(dequantised, gathered, *scales)
        return dequantised

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_id: int,
        layer: AttentionLayer,
    ) -> torch.Tensor:
        plan, kept = self._plan_of(layer.window, layer.chunk), layer.kept_blocks
        if len(plan.decode_groups) == 1 and plan.decode_groups[0].rows is None:
            return self._decode(query, layer_id, plan.decode_groups[0], layer)
        output = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        for group in plan.decode_groups:
            assert group.rows is not None
            own = layer if kept is None else layer._replace(kept_blocks=kept[group.rows])
            output.index_copy_(0, group.rows, self._decode(query[group.rows], layer_id, group, own))
        for chunk in plan.chunks:
            rows = slice(chunk.begin, chunk.end)
            own = layer if kept is None else layer._replace(kept_blocks=kept[rows])
            output[rows] = self._attend_chunk(query[rows], layer_id, chunk, own)
        return output

    def _decode(
        self, query: torch.Tensor, layer_id: int, group: DecodeGroup, layer: AttentionLayer
    ) -> torch.Tensor:
        """Attends with query `[R, num_heads, D]`; the heads of a KV group stand in the place of query
        positions.
        """
        kv_heads, head_dim = self.kv_cache.kv_heads(layer_id), query.shape[-1]
        gathered = self._gather(layer_id, group.pages)
        gathered = gathered.view(group.num_requests, -1, 2 * kv_heads, head_dim).transpose(1, 2)
        mask, sinks = group.mask, layer.sinks
        if layer.kept_blocks is not None:
            mask = mask + block_mask(layer, mask.shape[-1], mask.dtype)[:, :, None]
        output = attend(
            query.view(group.num_requests, kv_heads, -1, head_dim),
            gathered[:, :kv_heads],
            gathered[:, kv_heads:],
            mask,
            self.mixers[layer_id].scale,
            None if sinks is None else sinks.view(kv_heads, -1),
        )
        return output.reshape(group.num_requests, -1)

    def _attend_chunk(
        self, query: torch.Tensor, layer_id: int, chunk: QueryChunk, layer: AttentionLayer
    ) -> torch.Tensor:
        """Attends with query `[n, num_heads, D]`; KV heads stand in the place of the batch, so keys are not
        repeated.
        """
        kv_heads, (num_new, num_heads, head_dim) = self.kv_cache.kv_heads(layer_id), query.shape
        groups = num_heads // kv_heads
        gathered = self._gather(layer_id, chunk.pages).view(-1, 2 * kv_heads, head_dim)[: chunk.kv_len]
        by_head = gathered.transpose(0, 1).unsqueeze(1).expand(-1, groups, -1, -1)
        mask, sinks = chunk.mask, layer.sinks
        if layer.kept_blocks is not None:
            blocks = block_mask(layer, chunk.kv_len, query.dtype).transpose(0, 1)[:, None]
            causal = torch.full_like(blocks[0, 0], float("-inf")).triu_(1) if mask is None else mask
            mask = blocks + causal
        output = attend(
            query.view(num_new, kv_heads, groups, head_dim).permute(1, 2, 0, 3),
            by_head[:kv_heads],
            by_head[kv_heads:],
            mask,
            self.mixers[layer_id].scale,
            None if sinks is None else sinks.view(kv_heads, groups, 1),
        )
        return output.permute(2, 0, 1, 3).reshape(num_new, -1)
