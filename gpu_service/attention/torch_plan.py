"""What of the cache a step reads, and what it must not see: once for each window that layers have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpu_service.engine.step import ForwardInputs


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Requests of similar length that compute one token each; filled by `plan_step`."""

    rows: torch.Tensor | None  # int64 [R], their rows in the step; None: all rows, in order
    pages: torch.Tensor  # int64 [R * P], each request's pages, padded with the dummy page
    num_requests: int
    mask: torch.Tensor  # cache dtype [R, 1, 1, P * page_size], 0 or -inf


@dataclass(frozen=True, slots=True)
class Chunk:
    """Several consecutive tokens of one request; filled by `plan_step`."""

    begin: int  # first row in the step
    end: int
    pages: torch.Tensor  # int64 [P]
    kv_len: int  # keys read, from the first page's first on
    mask: torch.Tensor | None  # cache dtype [n, kv_len], 0 or -inf; None: plain causal, no earlier tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step's reads; filled by `plan_step`."""

    decode_groups: Sequence[DecodeGroup]
    chunks: Sequence[Chunk]

    @property
    def most_pages(self) -> int:
        """Of the gathers, which follow one another: the largest's pages."""
        gathers = [group.pages for group in self.decode_groups] + [chunk.pages for chunk in self.chunks]
        return max((pages.shape[0] for pages in gathers), default=0)


def plan_step(
    inputs: ForwardInputs, table: torch.Tensor, page_size: int, dtype: torch.dtype, window: int | None
) -> StepPlan:
    """`table`: the step's block table as int64; pages that lie before the window are not read at all."""
    starts, chunks = inputs.query_start_loc, []
    by_length: dict[int, list[int]] = {}
    for index, kv_len in enumerate(inputs.seq_lens):
        begin, end = starts[index], starts[index + 1]
        if end - begin == 1:
            num_pages = -(-kv_len // page_size) - _first_page(kv_len, 1, page_size, window)
            # Lengths within a factor of two share a group: padding at most doubles the copy.
            by_length.setdefault(num_pages.bit_length(), []).append(index)
        else:
            chunks.append(_plan_chunk(begin, end, kv_len, table[index], page_size, dtype, window))
    all_rows = len(by_length) == 1 and not chunks
    groups = [
        _plan_decode(requests, inputs, table, page_size, dtype, window, all_rows)
        for requests in by_length.values()
    ]
    return StepPlan(groups, chunks)


def _first_page(kv_len: int, num_new: int, page_size: int, window: int | None) -> int:
    """Of the pages that the first of the new tokens sees."""
    return 0 if window is None else max(0, kv_len - num_new + 1 - window) // page_size


def _plan_chunk(
    begin: int,
    end: int,
    kv_len: int,
    row: torch.Tensor,
    page_size: int,
    dtype: torch.dtype,
    window: int | None,
) -> Chunk:
    num_new = end - begin
    first_page = _first_page(kv_len, num_new, page_size, window)
    pages = row[first_page : -(-kv_len // page_size)]
    kv_len -= first_page * page_size
    mask = None
    if num_new < kv_len or (window is not None and window < kv_len):
        future = kv_len - num_new + 1
        mask = torch.full((num_new, kv_len), float("-inf"), dtype=dtype, device=row.device)
        mask.triu_(diagonal=future)
        if window is not None:
            past = torch.full_like(mask, float("-inf")).tril_(diagonal=future - 1 - window)
            mask += past
    return Chunk(begin, end, pages, kv_len, mask)


def _plan_decode(
    requests: list[int],
    inputs: ForwardInputs,
    table: torch.Tensor,
    page_size: int,
    dtype: torch.dtype,
    window: int | None,
    all_rows: bool,
) -> DecodeGroup:
    device, lengths = table.device, [inputs.seq_lens[i] for i in requests]
    first_pages = [_first_page(length, 1, page_size, window) for length in lengths]
    num_pages = max(
        -(-length // page_size) - first for length, first in zip(lengths, first_pages, strict=True)
    )
    kv_lens = torch.tensor(lengths, device=device)[:, None]
    positions = torch.arange(num_pages * page_size, device=device)
    own = table if all_rows else table[torch.tensor(requests, device=device)]
    if window is None:
        pages = own[:, :num_pages]
        hidden = positions >= kv_lens
    else:
        first = torch.tensor(first_pages, device=device)[:, None]
        # Behind a request's last page its own pages are repeated; the mask hides them.
        columns = (first + torch.arange(num_pages, device=device)).clamp_(max=own.shape[1] - 1)
        pages = own.gather(1, columns)
        positions = positions + first * page_size
        hidden = (positions >= kv_lens) | (positions < kv_lens - window)
    mask = torch.zeros(len(requests), num_pages * page_size, dtype=dtype, device=device)
    mask.masked_fill_(hidden, float("-inf"))
    rows = None if all_rows else torch.tensor([inputs.query_start_loc[i] for i in requests], device=device)
    return DecodeGroup(rows, pages.reshape(-1), len(requests), mask[:, None, None])
