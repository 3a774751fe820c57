"""The indexer of sparse attention as Triton kernels: scores of a few rows' tokens, then a row's highest.

The threshold that a row's choice lies above is found digit by digit, most significant first, from counts of
how many scores have each digit; no score moves, so equal ones keep the order of their tokens. Everything is
read from device tensors: any step can be captured.
"""

from __future__ import annotations

import torch
import triton.language as tl

from gpu_service.attention.mla.triton_decode import position_of
from gpu_service.attention.triton_kernels.shapes import MIN_ROWS
from gpu_service.ops.triton.jit import jit, jit_for_any, next_power_of_2
from gpu_service.ops.triton.row_tiles import num_row_tiles, request_of_tile

# Scores, float32, that are alive at a time, 64 MiB: rows beyond that are served one batch after another. No
# model's context is longer.
MAX_SCORES = 2**24
# Rows of one request that a program scores against the keys it has loaded once.
_BLOCK_ROWS = 8
# Bytes of an element -> keys of a program, and heads at a time; without tensor cores, registers hold few.
_BLOCKS = {2: (128, 64), 4: (32, MIN_ROWS)}
# Scores a program of the second kernel reads at a time.
_BLOCK_SCORES = 1024


@jit_for_any("first_row", "end_row", "num_requests", "table_stride", "score_stride")
def _score_kernel(  # type: ignore[no-untyped-def]
    query, head_weights, keys, scores, block_table, seq_lens, query_starts, first_row, end_row, num_requests,
    table_stride, score_stride, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile of a request's rows, block of tokens): the weighted sum of ReLU over all heads."""
    tile, first = tl.program_id(0), tl.program_id(1) * BLOCK_N
    request, first_tile = request_of_tile(tile, query_starts, num_requests, first_row, BLOCK_Q)
    start, stop = tl.load(query_starts + request), tl.load(query_starts + request + 1)
    # A row attends to the tokens before `row + beyond`.
    beyond = tl.load(seq_lens + request) - stop + 1
    begin = tl.maximum(start, first_row) + (tile - first_tile) * BLOCK_Q
    end = tl.minimum(begin + BLOCK_Q, tl.minimum(stop, end_row))
    if (begin < end) & (first < end - 1 + beyond):
        position, at = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
        seen, in_dim = position < end - 1 + beyond, at < HEAD_DIM
        page = tl.load(block_table + request * table_stride + position // PAGE_SIZE, mask=seen, other=0)
        slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        key = tl.load(keys + slot[:, None] * HEAD_DIM + at[None, :], mask=seen[:, None] & in_dim[None, :],
                      other=0.0)  # fmt: skip
        for row in range(begin, end):
            total = tl.zeros([BLOCK_N], tl.float32)
            for first_head in tl.static_range(0, NUM_HEADS, BLOCK_H):
                head = first_head + tl.arange(0, BLOCK_H)
                in_head, index = head < NUM_HEADS, tl.full([], NUM_HEADS, tl.int64) * row + head
                rows = tl.load(query + index[:, None] * HEAD_DIM + at[None, :],
                               mask=in_head[:, None] & in_dim[None, :], other=0.0)  # fmt: skip
                weight = tl.load(head_weights + index, mask=in_head, other=0.0)
                products = tl.dot(key, tl.trans(rows), input_precision=PRECISION)
                total += tl.sum(tl.maximum(products, 0.0) * weight[None, :], 1)
            of_row = scores + (tl.full([], 0, tl.int64) + (row - first_row)) * score_stride
            tl.store(of_row + position, total, mask=position < row + beyond)


@jit
def _ordered(scores, position, seen):  # type: ignore[no-untyped-def]
    """Scores as whole numbers in the same order; both zeros are the same one."""
    score = tl.load(scores + position, mask=seen, other=0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    return bits ^ tl.where((bits >> 31) == 1, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@jit
def _digit_counts(  # type: ignore[no-untyped-def]
    scores, length, prefix, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """How many scores that begin like `prefix` have each value of the 8 bits at SHIFT, `[256]`."""
    counts = tl.zeros([256], tl.int32)
    digits = tl.arange(0, 256)
    for first in range(0, length, BLOCK):
        position = first + tl.arange(0, BLOCK)
        seen = position < length
        key = _ordered(scores, position, seen)
        if SHIFT < 24:
            seen = seen & ((key >> (SHIFT + 8)) == (prefix >> (SHIFT + 8)))
        digit = tl.where(seen, (key >> SHIFT) & 255, 0).to(tl.int32)
        others = BLOCK - tl.sum(seen.to(tl.int32), 0)
        counts += tl.histogram(digit, 256) - tl.where(digits == 0, others, 0)
    return counts


@jit_for_any("first_row", "num_requests", "score_stride")
def _choose_kernel(  # type: ignore[no-untyped-def]
    scores, selection, seq_lens, query_starts, first_row, num_requests, score_stride,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row): positions ascending, then -1."""
    row = first_row + tl.program_id(0)
    _, length = position_of(row, query_starts, seq_lens, num_requests)
    chosen_at = selection + row.to(tl.int64) * TOP_K
    if length <= TOP_K:
        column = tl.arange(0, BLOCK_K)
        tl.store(chosen_at + column, tl.where(column < length, column, -1), mask=column < TOP_K)
    else:
        of_row = scores + tl.program_id(0).to(tl.int64) * score_stride
        digits = tl.arange(0, 256)
        prefix = tl.full([], 0, tl.uint32)
        # How many of those that equal the threshold so far are still to be chosen.
        room = tl.full([], TOP_K, tl.int32)
        for step in tl.static_range(4):
            counts = _digit_counts(of_row, length, prefix, 24 - 8 * step, BLOCK)
            at_least = tl.cumsum(counts, 0, reverse=True)
            above = at_least - counts
            here = (above < room) & (room <= at_least)
            digit = tl.sum(tl.where(here, digits, 0), 0)
            room -= tl.sum(tl.where(here, above, 0), 0)
            prefix = prefix | (digit.to(tl.uint32) << (24 - 8 * step))
        num_chosen, num_level = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
        for first in range(0, length, BLOCK):
            position = first + tl.arange(0, BLOCK)
            seen = position < length
            key = _ordered(of_row, position, seen)
            level = (seen & (key == prefix)).to(tl.int32)
            is_early = num_level + tl.cumsum(level, 0) <= room
            chosen = ((seen & (key > prefix)) | ((level == 1) & is_early)).to(tl.int32)
            column = num_chosen + tl.cumsum(chosen, 0) - 1
            tl.store(chosen_at + column, position, mask=chosen == 1)
            num_chosen += tl.sum(chosen, 0)
            num_level += tl.sum(level, 0)


def choose_tokens(
    query: torch.Tensor,
    head_weights: torch.Tensor,
    keys: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    longest: int,
    top_k: int,
    scratch: torch.Tensor,
) -> torch.Tensor:
    """`index_scores` and `select_tokens` of `selection.py` for every row of a step: int32 `[T, top_k]`.

    query, head_weights as in `MlaAttentionBackend.select`; keys `[num_pages, page_size, head_dim]`; no
    sequence is longer than `longest`; scratch float32, of at least `longest` elements; the rest int32 as in
    `ForwardInputs`.
    """
    num_rows, num_heads, head_dim = query.shape
    selection = torch.empty(num_rows, top_k, dtype=torch.int32, device=query.device)
    batch, (block_keys, block_heads) = scratch.shape[0] // longest, _BLOCKS[query.dtype.itemsize]
    query, head_weights = query.contiguous(), head_weights.contiguous()
    for first_row in range(0, num_rows, batch):
        rows = min(batch, num_rows - first_row)
        tiles = num_row_tiles(rows, seq_lens.shape[0], _BLOCK_ROWS)
        _score_kernel[(tiles, -(-longest // block_keys))](
            query, head_weights, keys, scratch, block_table, seq_lens, query_starts, first_row,
            first_row + rows, seq_lens.shape[0], block_table.stride(0), longest,
            NUM_HEADS=num_heads, HEAD_DIM=head_dim, PAGE_SIZE=keys.shape[1], BLOCK_Q=_BLOCK_ROWS,
            BLOCK_H=min(block_heads, max(MIN_ROWS, next_power_of_2(num_heads))),
            BLOCK_D=max(MIN_ROWS, next_power_of_2(head_dim)), BLOCK_N=block_keys,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        )  # fmt: skip
        _choose_kernel[(rows,)](
            scratch, selection, seq_lens, query_starts, first_row, seq_lens.shape[0], longest,
            TOP_K=top_k, BLOCK_K=next_power_of_2(top_k), BLOCK=_BLOCK_SCORES,
        )  # fmt: skip
    return selection
