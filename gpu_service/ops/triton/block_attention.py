"""Scores of blocks of tokens: keys are read once for several rows of a request and all of their heads.

A block's best token for each head, or, of a block's one key, all heads' positive products together.
"""

from __future__ import annotations

import torch
import triton.language as tl

from gpu_service.ops.triton.jit import jit, jit_for_any, next_power_of_2
from gpu_service.ops.triton.linear_attention_chunks import num_row_tiles, request_of_tile

# Rows of a tile, a query times its heads; keys of one product; blocks of tokens that one program scores.
_ROWS, _KEYS, _BLOCKS = 64, 64, 8
# What a matrix product needs at least.
_LEAST = 16


@jit
def _rows_of_tile(  # type: ignore[no-untyped-def]
    tile, packed, positions, query_starts, num_requests, first_row, num_rows, BLOCK_Q: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    """Returns a tile's request; of each packed line, EACH to a row: its row, whether that is there, its
    position.
    """
    request, first_tile = request_of_tile(tile, query_starts, num_requests, 0, BLOCK_Q)
    start = tl.load(query_starts + request)
    num_new = tl.load(query_starts + request + 1) - start
    local = (tile - first_tile) * BLOCK_Q + packed // EACH
    row = start + local - first_row
    held = (packed < BLOCK_Q * EACH) & (local < num_new) & (row >= 0) & (row < num_rows)
    return request, row, held, tl.load(positions + row, mask=held, other=-1)


@jit_for_any("num_requests", "first_row", "num_rows", "table_stride", "num_blocks")
def block_scores_kernel(  # type: ignore[no-untyped-def]
    query, pages, scores, positions, block_table, query_starts, num_requests, first_row, num_rows,
    table_stride, num_blocks, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile, group): BLOCK_Q consecutive rows of one request, all heads, BLOCKS blocks of tokens."""
    tile, first_block = tl.program_id(0), tl.program_id(1) * BLOCKS
    packed, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    request, row, held, own = _rows_of_tile(
        tile, packed, positions, query_starts, num_requests, first_row, num_rows, BLOCK_Q, NUM_HEADS
    )
    latest = tl.max(own, 0)
    if latest < first_block * BLOCK_SIZE:
        return
    line = row.to(tl.int64) * NUM_HEADS + packed % NUM_HEADS
    in_head = dim < HEAD_DIM
    q = tl.load(query + line[:, None] * HEAD_DIM + dim[None, :],
                mask=held[:, None] & in_head[None, :], other=0.0)  # fmt: skip
    last_block = tl.minimum(first_block + BLOCKS, latest // BLOCK_SIZE + 1)
    for block in range(first_block, last_block):
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        for first in range(0, BLOCK_SIZE, BLOCK_N):
            within = first + tl.arange(0, BLOCK_N)
            position = block * BLOCK_SIZE + within
            seen = (within < BLOCK_SIZE) & (position <= latest)
            page = tl.load(block_table + request * table_stride + position // PAGE_SIZE, mask=seen, other=0)
            slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
            key = tl.load(pages + slot[:, None] * HEAD_DIM + dim[None, :],
                          mask=seen[:, None] & in_head[None, :], other=0.0)  # fmt: skip
            product = tl.dot(q, tl.trans(key), input_precision=PRECISION)
            visible = seen[None, :] & (position[None, :] <= own[:, None])
            best = tl.maximum(best, tl.max(tl.where(visible, product, float("-inf")), 1))
        tl.store(scores + line * num_blocks + block, best, mask=held)


def block_scores(
    query: torch.Tensor,
    pages: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    query_starts: torch.Tensor,
    block_size: int,
    num_blocks: int,
    first_row: int,
    one_row_each: bool,
) -> torch.Tensor:
    query, (num_rows, heads, head_dim) = query.contiguous(), query.shape
    shape = num_rows, heads, num_blocks
    scores = torch.full(shape, float("-inf"), dtype=torch.float32, device=query.device)
    if not num_rows:
        return scores
    num_requests = query_starts.shape[0] - 1
    rows = 1 if one_row_each else max(1, _ROWS // heads)
    # Tiles of all rows of the step up to the last of these; those of other rows end at once.
    tiles = num_row_tiles(first_row + num_rows, num_requests, rows)
    block_scores_kernel[(tiles, -(-num_blocks // _BLOCKS))](
        query, pages, scores, positions, block_table, query_starts, num_requests, first_row, num_rows,
        block_table.stride(0), num_blocks, NUM_HEADS=heads, HEAD_DIM=head_dim, PAGE_SIZE=pages.shape[1],
        BLOCK_SIZE=block_size, BLOCK_M=max(_LEAST, next_power_of_2(rows * heads)), BLOCK_Q=rows,
        BLOCK_D=max(_LEAST, next_power_of_2(head_dim)),
        BLOCK_N=max(_LEAST, min(_KEYS, next_power_of_2(block_size))), BLOCKS=_BLOCKS,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
    )  # fmt: skip
    return scores


@jit_for_any("num_requests", "first_row", "num_rows", "table_stride", "num_blocks")
def mean_block_scores_kernel(  # type: ignore[no-untyped-def]
    query, pages, scores, positions, block_table, query_starts, num_requests, first_row, num_rows,
    table_stride, num_blocks, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROW_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr, TILE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile, group): BLOCK_Q consecutive rows of one request, all heads, BLOCK_N blocks of tokens."""
    tile, first_block = tl.program_id(0), tl.program_id(1) * BLOCK_N
    packed, dim = tl.arange(0, TILE), tl.arange(0, BLOCK_D)
    request, row, held, own = _rows_of_tile(
        tile, packed, positions, query_starts, num_requests, first_row, num_rows, BLOCK_Q, 1
    )
    block = first_block + tl.arange(0, BLOCK_N)
    position = (block + 1) * BLOCK_SIZE - 1
    latest = tl.max(own, 0)
    if latest < (first_block + 1) * BLOCK_SIZE - 1:
        return
    seen, in_head = (position <= latest) & (block < num_blocks), dim < HEAD_DIM
    page = tl.load(block_table + request * table_stride + position // PAGE_SIZE, mask=seen, other=0)
    slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
    key = tl.load(pages + slot[:, None] * ROW_DIM + dim[None, :],
                  mask=seen[:, None] & in_head[None, :], other=0.0)  # fmt: skip
    total = tl.zeros([TILE, BLOCK_N], tl.float32)
    for head in range(NUM_HEADS):
        line = row.to(tl.int64) * NUM_HEADS + head
        q = tl.load(query + line[:, None] * HEAD_DIM + dim[None, :],
                    mask=held[:, None] & in_head[None, :], other=0.0)  # fmt: skip
        total += tl.maximum(tl.dot(q, tl.trans(key), input_precision=PRECISION), 0.0)
    visible = held[:, None] & seen[None, :] & (position[None, :] <= own[:, None])
    at = scores + row.to(tl.int64)[:, None] * num_blocks + block[None, :]
    tl.store(at, total, mask=visible)


def mean_block_scores(
    query: torch.Tensor,
    pages: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    query_starts: torch.Tensor,
    block_size: int,
    num_blocks: int,
    first_row: int,
    one_row_each: bool,
) -> torch.Tensor:
    query, (num_rows, heads, head_dim) = query.contiguous(), query.shape
    shape = num_rows, 1, num_blocks
    scores = torch.full(shape, float("-inf"), dtype=torch.float32, device=query.device)
    if not num_rows:
        return scores
    num_requests, exact = query_starts.shape[0] - 1, query.dtype == torch.float32
    # Exact products of float32 need twice the registers.
    rows = 1 if one_row_each else _ROWS // (1 + exact)
    tiles = num_row_tiles(first_row + num_rows, num_requests, rows)
    mean_block_scores_kernel[(tiles, -(-num_blocks // _KEYS))](
        query, pages, scores, positions, block_table, query_starts, num_requests, first_row, num_rows,
        block_table.stride(0), num_blocks, NUM_HEADS=heads, HEAD_DIM=head_dim, ROW_DIM=pages.shape[2],
        PAGE_SIZE=pages.shape[1], BLOCK_SIZE=block_size, BLOCK_Q=rows, TILE=max(_LEAST, rows),
        BLOCK_D=max(_LEAST, next_power_of_2(head_dim)), BLOCK_N=_KEYS,
        PRECISION="ieee" if exact else "tf32",
    )  # fmt: skip
    return scores
