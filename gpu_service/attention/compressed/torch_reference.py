"""Compressed attention in plain torch: the reference of the kernels, and what a machine without GPU runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from gpu_service.attention.compressed.base import (
    CompressedAttentionBackend,
    CompressedDimensions,
    Compression,
    slots_of,
)
from gpu_service.attention.mla.torch_reference import index_scores, select_tokens
from gpu_service.cache.kv_cache import CompressedCache
from gpu_service.core.step import ForwardInputs
from gpu_service.ops.norm import rms_norm
from gpu_service.ops.rope import RopeTable, apply_rope
from moebius.models.layers.compressed import EntryBlocks

# Rows that attend together: of the window, they share as many keys more.
_ROWS = 128


def compressed_entries(gathered: torch.Tensor, seen: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The weighted sums of tokens' rows, float32 `[E, size]`, without norm and rotation.

    gathered `[E, width, row]`, oldest first; seen bool `[E, width]`, False before a request's first token;
    offsets as in `Compression`, of which `width` is one or two times the rate.
    """
    rate, row = offsets.shape
    values, logits = gathered[..., :row].float(), gathered[..., row:].float()
    width = gathered.shape[1]
    logits = logits + offsets.repeat(width // rate, 1)
    if width > rate:
        # Of the tokens of the entry before, the first half of their elements is meant.
        size = row // 2
        values, logits = (
            torch.cat((part[:, :rate, :size], part[:, rate:, size:]), dim=1) for part in (values, logits)
        )
    weights = logits.masked_fill(~seen[..., None], float("-inf")).softmax(1)
    return torch.einsum("etd,etd->ed", weights, values)


def chosen_blocks(scores: torch.Tensor, lengths: torch.Tensor, blocks: EntryBlocks) -> torch.Tensor:
    """Returns which entries lie in the blocks whose best entries have the highest scores, bool `[T, E]`.

    scores float32 `[T, E]`, of which row t chooses among the first `lengths[t]`; the block of the last of
    these is always chosen. Source: `select_candidate_blocks` of DeepSeek-V4.1.
    """
    width, size = scores.shape[1], blocks.size
    entry = torch.arange(width, device=scores.device)
    seen = scores.masked_fill(entry >= lengths[:, None], float("-inf"))
    best = functional.pad(seen, (0, -width % size), value=float("-inf")).view(len(seen), -1, size).amax(-1)
    number = torch.arange(best.shape[1], device=scores.device)
    best = best.masked_fill(number == (lengths[:, None] - 1) // size, float("inf"))
    top = best.topk(min(blocks.top_blocks, best.shape[1]), dim=-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, top.indices, top.values > float("-inf"))
    return kept.repeat_interleave(size, dim=1)[:, :width]


@dataclass(frozen=True, slots=True)
class _Span:
    """The rows of one request; filled by `plan`."""

    rows: slice
    first: int  # Position of the first of them.
    length: int  # Tokens up to the last of them.
    pages: torch.Tensor  # int64 [P]
    read: torch.Tensor  # int64 [], slots of the latest rows
    write: torch.Tensor

    def ends(self, rate: int, first_entry: int = 0) -> torch.Tensor:
        """Returns the last tokens of the entries up to the last row of the step, int64 `[E]`."""
        entries = torch.arange(first_entry, self.length // rate, device=self.pages.device)
        return entries * rate + rate - 1

    def latest(self, recent: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Returns the request's rows of the step after those before it; the last ones are left for the next
        step.
        """
        joined = torch.cat((recent[self.read], rows[self.rows]))
        recent[self.write] = joined[joined.shape[0] - recent.shape[1] :]
        return joined


class TorchCompressedAttention(CompressedAttentionBackend):
    """Request by request."""

    def __init__(self, dimensions: CompressedDimensions, cache: CompressedCache) -> None:
        super().__init__(dimensions, cache)
        self._spans: list[_Span] = []
        # Of each span, the entries of the chosen blocks, bool `[rows, E]`; filled by `select`.
        self._within: dict[int, torch.Tensor] = {}

    def plan(self, inputs: ForwardInputs) -> None:
        inputs.check(self.cache.page_size)
        self._inputs = inputs
        self.selects = self._may_select(max(inputs.seq_lens, default=0))
        starts, table = inputs.query_start_loc, inputs.block_table.long()
        reads, writes = slots_of(inputs)
        self._spans = [
            _Span(slice(begin, end), length - end + begin, length, table[i], reads[i], writes[i])
            for i, (begin, end, length) in enumerate(
                zip(starts[:-1], starts[1:], inputs.seq_lens, strict=True)
            )
        ]

    def compress(
        self, rows: torch.Tensor, recent: torch.Tensor, pages: torch.Tensor, how: Compression
    ) -> None:
        rate, kept = how.rate, recent.shape[1]
        for span in self._spans:
            joined = span.latest(recent, rows)
            last = span.ends(rate, span.first // rate)
            if not last.numel():
                continue
            tokens = last[:, None] - torch.arange(how.width - 1, -1, -1, device=rows.device)
            gathered = joined[(tokens - span.first + kept).clamp(min=0)]
            entries = compressed_entries(gathered, tokens >= 0, how.offsets).to(pages.dtype)
            entries = rms_norm(entries, how.norm_weight, how.eps)
            at = last - span.first + span.rows.start
            table = RopeTable(how.table.cos[at], how.table.sin[at], how.table.interleaved)
            rotary_dim = table.cos.shape[-1]
            apply_rope(entries[:, None, how.size - rotary_dim :], table)
            pages.flatten(0, 1)[self._places(span, last, rate)] = entries

    def _places(self, span: _Span, last: torch.Tensor, rate: int) -> torch.Tensor:
        """Returns where entries lie that end with tokens int64 `[E]`, counted over all pages."""
        page_size = self.cache.page_size
        places = -(-page_size // rate)
        return span.pages[last // page_size] * places + last % page_size // rate

    def _gathered(self, span: _Span, pages: torch.Tensor, rate: int) -> torch.Tensor:
        """Returns all entries up to the last row of the step, `[E, size]`."""
        last = span.ends(rate)
        return pages.flatten(0, 1)[self._places(span, last, rate)]

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        window: torch.Tensor,
        layer_id: int,
        sinks: torch.Tensor,
        selection: torch.Tensor | None,
    ) -> torch.Tensor:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        rate, earlier = self.cache.rates[layer_id], window.shape[1]
        for span in self._spans:
            joined = span.latest(window, keys)
            entries = joined[:0]
            if rate:
                entries = self._gathered(span, self.cache.pages(layer_id), rate)
            for begin in range(span.rows.start, span.rows.stop, _ROWS):
                rows = slice(begin, min(begin + _ROWS, span.rows.stop))
                first = begin - span.rows.start
                near = joined[first : first + rows.stop - begin + earlier]
                visible = self._visible(span, rows, earlier, entries.shape[0], rate, selection)
                output[rows] = self._attended(query[rows], torch.cat((near, entries)), visible, sinks)
        return output

    def _visible(
        self,
        span: _Span,
        rows: slice,
        earlier: int,
        num_entries: int,
        rate: int,
        selection: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns which keys each of some rows sees, bool `[n, n + earlier + num_entries]`."""
        device = span.pages.device
        row = torch.arange(rows.stop - rows.start, device=device)[:, None]
        position = row + span.first + rows.start - span.rows.start
        key = torch.arange(row.shape[0] + earlier, device=device)
        # Key k is the token `k - earlier` places after the first row.
        near: torch.Tensor = (key >= row) & (key <= row + earlier) & (key >= row + earlier - position)
        if not num_entries:
            return near
        entry = torch.arange(num_entries, device=device)
        if selection is None:
            return torch.cat((near, entry < (position + 1) // rate), dim=1)
        # -1 is the column after the last, which is dropped.
        chosen = torch.zeros(row.shape[0], num_entries + 1, dtype=torch.bool, device=device)
        chosen.scatter_(1, selection[rows].long() % (num_entries + 1), True)
        return torch.cat((near, chosen[:, :num_entries]), dim=1)

    def _attended(
        self, query: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor, sinks: torch.Tensor
    ) -> torch.Tensor:
        exact = keys.float()
        scores = (query.float() @ exact.T) * self.dimensions.softmax_scale
        scores = scores.masked_fill(~visible[:, None], float("-inf"))
        sink = sinks.float()[None, :, None].expand(query.shape[0], -1, 1)
        weights = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
        attended: torch.Tensor = weights @ exact
        return attended.to(query.dtype)

    def select(
        self,
        query: torch.Tensor,
        head_weights: torch.Tensor,
        layer_id: int,
        blocks: EntryBlocks | None = None,
    ) -> torch.Tensor:
        sizes, rate = self.dimensions, self.cache.rates[layer_id]
        selection = torch.empty(query.shape[0], sizes.top_k, dtype=torch.int32, device=query.device)
        for number, span in enumerate(self._spans):
            keys = self._gathered(span, self.cache.index_pages(layer_id), rate)
            scores = index_scores(query[span.rows], head_weights[span.rows], keys)
            lengths = torch.arange(span.first + 1, span.length + 1, device=query.device) // rate
            if blocks is not None:
                if blocks.chosen_here:
                    self._within[number] = chosen_blocks(scores, lengths, blocks)
                else:
                    scores = scores.masked_fill(~self._within[number], float("-inf"))
            selection[span.rows] = select_tokens(scores, lengths, sizes.top_k)
        return selection
