"""Latent attention as Triton kernels: a program serves a block of heads of one row over a share of its keys.

A latent is read once and serves as key and as value, of 16 heads or of 64. Rows of chunks are served like
decodes, one by one: right for any mixture, fast for decodes; long prompts belong to `forward_non_absorbed` or
to FlashInfer. Of sparse attention a row's keys are those of its selection, in the same order and shares as if
there were no others.

The indexer of sparse attention: scores of a few rows' tokens, then a row's highest. The threshold that a
row's choice lies above is found digit by digit, most significant first, from counts of how many scores have
each digit; no score moves, so equal ones keep the order of their tokens. Everything is read from device
tensors: any step can be captured.
"""

from __future__ import annotations

import torch
import triton.language as tl

from gpu_service.attention.mla.base import IndexDimensions
from gpu_service.attention.triton_kernels import LOG2_E, MIN_SPLIT, empty_softmax, keys_per_split
from gpu_service.attention.triton_tiles import MIN_ROWS, WANTED_PROGRAMS_PER_SM, Tile, with_smaller
from gpu_service.ops.triton.e4m3 import as_loadable, widened
from gpu_service.ops.triton.jit import jit, jit_for_any, launch_fitting, next_power_of_2
from gpu_service.ops.triton.kv import request_of_row
from gpu_service.ops.triton.linear_attention_chunks import num_row_tiles, request_of_tile

# Heads of a program where there are rows enough.
_WIDE = 64


@jit
def position_of(row, query_starts, seq_lens, num_requests):  # type: ignore[no-untyped-def]
    """Returns the request that a row belongs to, by bisection, and how many tokens the row attends to."""
    request = request_of_row(row, query_starts, num_requests)
    return request, tl.load(seq_lens + request) - (tl.load(query_starts + request + 1) - 1 - row)


@jit
def _chosen(selection, row, column, seen, TOP_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the tokens in those columns of the row's selection, and where there are any."""
    # 64 bits: rows times TOP_K can be more than 32 hold.
    position = tl.load(selection + row.to(tl.int64) * TOP_K + column, mask=seen, other=-1)
    return tl.maximum(position, 0), position >= 0


@jit_for_any("num_requests", "table_stride", "num_splits")
def _mla_kernel(  # type: ignore[no-untyped-def]
    q_latent, q_rope, cache, output, partial_output, partial_lse, selection, sinks, block_table, seq_lens,
    query_starts, num_requests, table_stride, num_splits, score_scale, value_scale,
    NUM_HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    MINIMUM: tl.constexpr, SINGLE_SPLIT: tl.constexpr, PRECISION: tl.constexpr, TOP_K: tl.constexpr,
    HAS_SINKS: tl.constexpr, LOG2_E: tl.constexpr,
):  # fmt: skip
    """Program (row, block of heads, split); queries are contiguous. TOP_K 0: there is no selection."""
    row, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request, length = position_of(row, query_starts, seq_lens, num_requests)
    if TOP_K > 0:
        length = tl.minimum(length, TOP_K)
    share = keys_per_split(length, num_splits, MINIMUM, BLOCK_N)
    begin = split * share
    end = tl.minimum(begin + share, length)
    head = block * BLOCK_H + tl.arange(0, BLOCK_H)
    at_latent, at_rope, in_head = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R), head < NUM_HEADS
    in_latent, in_rope = at_latent < LATENT, at_rope < ROPE
    first_query = row * NUM_HEADS + head[:, None]
    held = in_head[:, None] & in_latent[None, :]
    query = tl.load(q_latent + first_query * LATENT + at_latent[None, :], mask=held, other=0.0)
    rotated_query = tl.load(q_rope + first_query * ROPE + at_rope[None, :],
                            mask=in_head[:, None] & in_rope[None, :], other=0.0)  # fmt: skip
    # The sink counts in the first split, whose log-sum-exp then tells the others.
    maximum, total = empty_softmax(sinks, head, in_head & (split == 0), BLOCK_H, HAS_SINKS, LOG2_E)
    weighted = tl.zeros([BLOCK_H, BLOCK_L], tl.float32)
    for first in range(begin, end, BLOCK_N):
        position = first + tl.arange(0, BLOCK_N)
        seen = position < end
        if TOP_K > 0:
            position, seen = _chosen(selection, row, position, seen, TOP_K)
        page = tl.load(block_table + request * table_stride + position // PAGE_SIZE, mask=seen, other=0)
        slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        at = cache + slot[:, None] * (LATENT + ROPE)
        latent = tl.load(at + at_latent[None, :], mask=seen[:, None] & in_latent[None, :], other=0.0)
        rotated = tl.load(at + LATENT + at_rope[None, :], mask=seen[:, None] & in_rope[None, :], other=0.0)
        latent, rotated = widened(latent, query.dtype), widened(rotated, query.dtype)
        scores = tl.dot(query, tl.trans(latent), input_precision=PRECISION)
        scores += tl.dot(rotated_query, tl.trans(rotated), input_precision=PRECISION)
        scores = tl.where(seen[None, :], scores * score_scale, float("-inf"))
        highest = tl.maximum(maximum, tl.max(scores, 1))
        # A selection may end before the last split begins.
        base = highest if TOP_K == 0 else tl.where(highest == float("-inf"), 0.0, highest)
        shrink, maximum = tl.exp2(maximum - base), highest
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        products = tl.dot(weights.to(query.dtype), latent, input_precision=PRECISION)
        weighted = weighted * shrink[:, None] + products
    if SINGLE_SPLIT:
        result = weighted / total[:, None] * value_scale
        at_output = output + first_query * LATENT + at_latent[None, :]
        tl.store(at_output, result.to(output.dtype.element_ty), mask=held)
    else:
        # A split without keys counts for nothing: its weight is 2 to the minus infinity.
        total = tl.where(total == 0.0, 1.0, total)
        result = weighted / total[:, None] * value_scale
        part = (row * NUM_HEADS + head) * num_splits + split
        tl.store(partial_output + part[:, None] * LATENT + at_latent[None, :], result, mask=held)
        tl.store(partial_lse + part, maximum + tl.log2(total), mask=in_head)


@jit_for_any("num_splits")
def _mla_combine_kernel(  # type: ignore[no-untyped-def]
    output, partial_output, partial_lse, num_splits,
    LATENT: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Program (row and head): the splits' results by how much of the softmax each holds."""
    row = tl.program_id(0)
    split, dim = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_L)
    lse = tl.load(partial_lse + row * num_splits + split, mask=split < num_splits, other=float("-inf"))
    highest = tl.max(lse, 0)
    total = tl.sum(tl.exp2(lse - highest), 0)
    weighted = tl.zeros([BLOCK_L], tl.float32)
    for index in range(num_splits):
        part = row * num_splits + index
        weight = tl.exp2(tl.load(partial_lse + part) - highest)
        value = tl.load(partial_output + part * LATENT + dim, mask=dim < LATENT, other=0.0)
        weighted += weight * value
    result = (weighted / total).to(output.dtype.element_ty)
    tl.store(output + row * LATENT + dim, result, mask=dim < LATENT)


def mla_tile(dtype: torch.dtype, num_rows: int, num_heads: int, num_sms: int) -> Tile:
    """Returns the tile for latents of 512 elements: heads of one row, which read a latent once for all of
    them, and keys.

    16 heads and 32 keys, or 16 where there are no tensor cores. 64 heads, as many rows as Hopper's widest
    products have, where so few programs fill the device and no row's keys have to be divided.
    """
    if dtype == torch.float32:
        return Tile(MIN_ROWS, 16, 512, 8, "ieee")
    wide = num_heads >= _WIDE and num_rows * -(-num_heads // _WIDE) >= WANTED_PROGRAMS_PER_SM * num_sms
    return Tile(_WIDE if wide else MIN_ROWS, 32, 512, 8, "tf32")


def mla_attention(
    query_latent: torch.Tensor,
    query_rope: torch.Tensor,
    pages: torch.Tensor,
    partial: tuple[torch.Tensor, torch.Tensor] | None,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    score_scale: float,
    value_scale: float,
    tile: Tile,
    min_split: int = MIN_SPLIT,
    selection: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes absorbed attention of every row; returns `[T, num_heads, latent_dim]`.

    query_latent, query_rope as in `MlaAttentionBackend.forward`; pages `[num_pages, page_size, latent_dim +
    rope_dim]`; partial: float32 `[T, num_heads, num_splits, latent_dim]` and `[T, num_heads, num_splits]`,
    or None for one split; tile: from `mla_tile`, or the next smaller one that fits on the device; selection
    and sinks as in `MlaAttentionBackend`, contiguous; the rest int32 as in `ForwardInputs`.
    """
    num_rows, num_heads, latent_dim = query_latent.shape
    rope_dim, page_size = query_rope.shape[2], pages.shape[1]
    num_splits = partial[0].shape[2] if partial else 1
    pages, top_k = as_loadable(pages), 0 if selection is None else selection.shape[1]
    output = torch.empty_like(query_latent, memory_format=torch.contiguous_format)
    partial_output, partial_lse = partial or (output, output)

    def launch(tile: Tile) -> None:
        _mla_kernel[(num_rows, -(-num_heads // tile.rows), num_splits)](
            query_latent.contiguous(), query_rope.contiguous(), pages, output, partial_output, partial_lse,
            block_table if selection is None else selection, query_latent if sinks is None else sinks,
            block_table, seq_lens, query_starts, seq_lens.shape[0], block_table.stride(0), num_splits,
            score_scale * LOG2_E, value_scale,
            NUM_HEADS=num_heads, LATENT=latent_dim, ROPE=rope_dim, PAGE_SIZE=page_size, BLOCK_H=tile.rows,
            BLOCK_L=max(16, next_power_of_2(latent_dim)), BLOCK_R=max(16, next_power_of_2(rope_dim)),
            BLOCK_N=tile.keys, MINIMUM=min_split, SINGLE_SPLIT=partial is None, PRECISION=tile.precision,
            TOP_K=top_k, HAS_SINKS=sinks is not None, LOG2_E=LOG2_E,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip

    options = num_heads, partial is None, top_k, sinks is None
    variant = tile, pages.shape[1:], pages.dtype, query_latent.dtype, options
    launch_fitting("latent attention", variant, pages.device, with_smaller(tile, MIN_ROWS), launch)
    if partial is not None:
        _mla_combine_kernel[(num_rows * num_heads,)](
            output, partial_output, partial_lse, num_splits,
            LATENT=latent_dim, BLOCK_L=next_power_of_2(latent_dim), BLOCK_S=next_power_of_2(num_splits),
        )  # fmt: skip
    return output


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
    table_stride, score_stride, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROW: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PLACES: tl.constexpr, STEP: tl.constexpr, POOL: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile of a request's rows, block of pools): the weighted sum of ReLU over all heads.

    A page has PLACES for keys, one for each STEP tokens.
    """
    tile, first = tl.program_id(0), tl.program_id(1) * BLOCK_N
    request, first_tile = request_of_tile(tile, query_starts, num_requests, first_row, BLOCK_Q)
    start, stop = tl.load(query_starts + request), tl.load(query_starts + request + 1)
    # A row attends to the tokens before `row + beyond`.
    beyond = tl.load(seq_lens + request) - stop + 1
    begin = tl.maximum(start, first_row) + (tile - first_tile) * BLOCK_Q
    end = tl.minimum(begin + BLOCK_Q, tl.minimum(stop, end_row))
    if (begin < end) & (first < (end - 1 + beyond) // POOL):
        position, at = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
        seen, in_dim = position < (end - 1 + beyond) // POOL, at < HEAD_DIM
        # The key of a pool is with its last token.
        last = position * POOL + POOL - 1
        page = tl.load(block_table + request * table_stride + last // PAGE_SIZE, mask=seen, other=0)
        slot = page.to(tl.int64) * PLACES + last % PAGE_SIZE // STEP
        key = tl.load(keys + slot[:, None] * ROW + at[None, :], mask=seen[:, None] & in_dim[None, :],
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
            tl.store(of_row + position, total, mask=position < (row + beyond) // POOL)


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
    """Returns how many scores that begin like `prefix` have each value of the 8 bits at SHIFT, `[256]`."""
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
    TOP_K: tl.constexpr, POOL: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row): writes the pools that the row chooses, ascending, then -1."""
    row = first_row + tl.program_id(0)
    _, length = position_of(row, query_starts, seq_lens, num_requests)
    length = length // POOL
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


@jit_for_any("num_requests")
def _expand_kernel(  # type: ignore[no-untyped-def]
    pools, selection, seq_lens, query_starts, num_requests, TOP_K: tl.constexpr, POOL: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row): the tokens of its pools, then those after the last whole pool, then -1."""
    row = tl.program_id(0)
    _, length = position_of(row, query_starts, seq_lens, num_requests)
    chosen = tl.minimum(length // POOL, TOP_K) * POOL
    for first in range(0, WIDTH, BLOCK):
        column = first + tl.arange(0, BLOCK)
        of_pool = pools + row.to(tl.int64) * TOP_K + column // POOL
        inside = tl.load(of_pool, mask=column < chosen, other=0) * POOL + column % POOL
        after = length // POOL * POOL + column - chosen
        token = tl.where(column < chosen, inside, tl.where(after < length, after, -1))
        tl.store(selection + row.to(tl.int64) * WIDTH + column, token, mask=column < WIDTH)


def choose_pools(
    query: torch.Tensor,
    head_weights: torch.Tensor,
    keys: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    longest: int,
    pool: int,
    top_k: int,
    page_size: int,
    scratch: torch.Tensor,
) -> torch.Tensor:
    """`index_scores` and `select_tokens` of `torch_reference.py` for every row of a step: int32 `[T, top_k]`.

    A row chooses among the pools of POOL tokens that end up to it. keys `[num_pages, places, row]`, a key
    being the first elements of a row: with a place for each of the `page_size` tokens of a page, that of a
    pool is in its last token's; with fewer places, pools have theirs alone. The rest as in `choose_tokens`.
    """
    num_rows, num_heads, head_dim = query.shape
    longest, places = max(1, longest // pool), keys.shape[1]
    chosen = torch.empty(num_rows, top_k, dtype=torch.int32, device=query.device)
    batch, (block_keys, block_heads) = scratch.shape[0] // longest, _BLOCKS[query.dtype.itemsize]
    query, head_weights = query.contiguous(), head_weights.contiguous()
    for first_row in range(0, num_rows, batch):
        rows = min(batch, num_rows - first_row)
        tiles = num_row_tiles(rows, seq_lens.shape[0], _BLOCK_ROWS)
        _score_kernel[(tiles, -(-longest // block_keys))](
            query, head_weights, keys, scratch, block_table, seq_lens, query_starts, first_row,
            first_row + rows, seq_lens.shape[0], block_table.stride(0), longest,
            NUM_HEADS=num_heads, HEAD_DIM=head_dim, ROW=keys.shape[2], PAGE_SIZE=page_size, PLACES=places,
            STEP=1 if places == page_size else pool, POOL=pool, BLOCK_Q=_BLOCK_ROWS,
            BLOCK_H=min(block_heads, max(MIN_ROWS, next_power_of_2(num_heads))),
            BLOCK_D=max(MIN_ROWS, next_power_of_2(head_dim)), BLOCK_N=block_keys,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        )  # fmt: skip
        _choose_kernel[(rows,)](
            scratch, chosen, seq_lens, query_starts, first_row, seq_lens.shape[0], longest,
            TOP_K=top_k, POOL=pool, BLOCK_K=next_power_of_2(top_k), BLOCK=_BLOCK_SCORES,
        )  # fmt: skip
    return chosen


def choose_tokens(
    query: torch.Tensor,
    head_weights: torch.Tensor,
    keys: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    longest: int,
    index: IndexDimensions,
    scratch: torch.Tensor,
) -> torch.Tensor:
    """`choose_pools`, then `expand_pools` of `torch_reference.py`.

    query, head_weights as in `MlaAttentionBackend.select`; keys `[num_pages, page_size, row]`, a key being
    the first `index.head_dim` elements of a row; no sequence is longer than `longest`; scratch float32, of
    at least `longest` elements; the rest int32 as in `ForwardInputs`. Returns int32 `[T, index.selected]`.
    """
    num_rows, pool, top_k = query.shape[0], index.pool, index.top_k // index.pool
    where = block_table, seq_lens, query_starts, longest, pool, top_k, keys.shape[1], scratch
    chosen = choose_pools(query, head_weights, keys, *where)
    if pool == 1:
        return chosen
    selection = torch.empty(num_rows, index.selected, dtype=torch.int32, device=query.device)
    _expand_kernel[(num_rows,)](
        chosen, selection, seq_lens, query_starts, seq_lens.shape[0], TOP_K=top_k, POOL=pool,
        WIDTH=index.selected, BLOCK=_BLOCK_SCORES,
    )  # fmt: skip
    return selection
