"""Hashes of n-grams, one program for each token, and rows of their tables, one for each row."""

from __future__ import annotations

import torch
import triton.language as tl

from gpu_service.ops.triton.e4m3 import decode_e4m3
from gpu_service.ops.triton.jit import jit, jit_for_any, next_power_of_2
from gpu_service.ops.triton.kv import request_of_row


@jit
def _earlier(ids, state, row, start, places, KEPT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads the token `places` positions before a row, from the step or from its request's state."""
    at = row - places
    is_new = at >= start
    return tl.load(ids + at, mask=is_new, other=0) + tl.load(state + KEPT + at - start, mask=~is_new, other=0)


@jit_for_any("num_requests")
def ngram_rows_kernel(  # type: ignore[no-untyped-def]
    ids, positions, states, reads, writes, query_starts, factors, primes, offsets, output, num_requests,
    end_token_id, KEPT: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """Program (row); that of a request's last row leaves its latest tokens."""
    row, head = tl.program_id(0), tl.arange(0, BLOCK)
    request = request_of_row(row, query_starts, num_requests)
    start, end = tl.load(query_starts + request), tl.load(query_starts + request + 1)
    state = states + tl.load(reads + request) * KEPT
    position, token = tl.load(positions + row), tl.load(ids + row)
    mixed, ended = token * tl.load(factors), position < 0
    for order in tl.static_range(KEPT):
        before = _earlier(ids, state, row, start, order + 1, KEPT)
        ended = ended | (position < order + 1)
        if ENDS:
            ended = ended | (before == end_token_id)
        before = tl.where(ended, end_token_id, before)
        mixed = mixed ^ (before * tl.load(factors + order + 1))
        at = order * HEADS + head
        prime = tl.load(primes + at, mask=head < HEADS, other=1)
        found = mixed % prime + tl.load(offsets + at, mask=head < HEADS, other=0)
        tl.store(output + row.to(tl.int64) * (KEPT * HEADS) + at, found, mask=head < HEADS)
    if row == end - 1:
        kept = states + tl.load(writes + request) * KEPT
        for place in tl.static_range(KEPT):
            tl.store(kept + place, _earlier(ids, state, row, start, KEPT - 1 - place, KEPT))


def ngram_rows(
    ids: torch.Tensor,
    positions: torch.Tensor,
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    query_starts: torch.Tensor,
    factors: torch.Tensor,
    primes: torch.Tensor,
    offsets: torch.Tensor,
    end_token_id: int,
    ends: bool = True,
) -> torch.Tensor:
    tokens, kept, hashes = ids.shape[0], states.shape[1], primes.shape[0]
    output = torch.empty(tokens, hashes, dtype=torch.int64, device=ids.device)
    if tokens:
        ngram_rows_kernel[(tokens,)](
            ids, positions, states, reads, writes, query_starts, factors, primes, offsets, output,
            reads.shape[0], end_token_id, KEPT=kept, HEADS=hashes // kept,
            BLOCK=next_power_of_2(hashes // kept), ENDS=ends,
        )  # fmt: skip
    return output


@jit_for_any("num_rows")
def table_rows_kernel(  # type: ignore[no-untyped-def]
    rows, table, scale, output, num_rows, SIZE: tl.constexpr, IS_SCALED: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Program (row): the table may lie in the host's memory, of which nothing but the row is read. GROUP:
    columns that share a scale of the row; 0: all values share one.
    """
    at, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    row = tl.load(rows + at).to(tl.int64)
    is_held = (column < SIZE) & (row >= 0) & (row < num_rows)
    found = tl.load(table + row * SIZE + column, mask=is_held, other=0)
    if IS_SCALED:
        if GROUP > 0:
            code = tl.load(scale + row * (SIZE // GROUP) + column // GROUP, mask=is_held, other=127)
            found = decode_e4m3(found.to(tl.int32)) * tl.exp2(code.to(tl.float32) - 127.0)
        else:
            found = decode_e4m3(found.to(tl.int32)) * tl.load(scale)
    tl.store(output + at * SIZE + column, found.to(output.dtype.element_ty), mask=column < SIZE)


def table_rows(
    rows: torch.Tensor, table: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    size = table.shape[1]
    output = torch.empty(*rows.shape, size, dtype=dtype, device=rows.device)
    if rows.numel():
        # As bytes: devices without 8-bit floats decode them, too.
        stored = table if scale is None else table.view(torch.uint8)
        by_row = scale is not None and scale.dtype == torch.uint8
        group = size // scale.shape[1] if by_row and scale is not None else 0
        table_rows_kernel[(rows.numel(),)](
            rows.contiguous(), stored, rows if scale is None else scale, output, table.shape[0], SIZE=size,
            IS_SCALED=scale is not None, BLOCK=next_power_of_2(size), GROUP=group, num_warps=1,
        )  # fmt: skip
    return output
