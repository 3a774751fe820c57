"""Attention over pages as Triton kernels: `decode` for single tokens, `prefill` for chunks.

Decode: T. Dao, D. Haziza, F. Massa, G. Sizov, "Flash-Decoding for long-context inference" (2023): keys are
divided over several programs, every split keeps a running maximum, sum and weighted values of its keys; a
second kernel combines them by their log-sum-exp. Scores are kept in base 2, where a GPU's exponential is
cheapest.

Prefill: T. Dao, "FlashAttention-2" (2023). The query heads of a KV head are packed into the rows of a tile,
so that keys are read once for all of them. Which request a program serves is found on the device by
bisection: the host prepares nothing.
"""

from __future__ import annotations

import torch
import triton.language as tl

from gpu_service.attention.base import PLAIN, AttentionLayer
from gpu_service.attention.triton_tiles import MIN_ROWS, Tile, decode_tile, prefill_tile, with_smaller
from gpu_service.ops.triton.e4m3 import as_loadable, widened
from gpu_service.ops.triton.jit import jit, jit_for_any, launch_fitting, next_power_of_2
from gpu_service.ops.triton.linear_attention_chunks import num_row_tiles, request_of_tile

# Fewer keys than this are not worth a program of their own.
MIN_SPLIT = 256
LOG2_E = 1.4426950408889634


@jit
def keys_per_split(length, num_splits, MINIMUM: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns a request's share of keys per split, in whole tiles: from its length on the device, so that a
    captured launch stays right while lengths grow.
    """
    share = tl.cdiv(tl.cdiv(length, num_splits), BLOCK_N) * BLOCK_N
    return tl.maximum(share, MINIMUM)


@jit
def first_visible(length, WINDOW: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the earliest key that the last of `length` tokens sees; no window and no chunk: 0."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    if CHUNK > 0:
        first = (length - 1) // CHUNK * CHUNK
    return first


@jit
def empty_softmax(  # type: ignore[no-untyped-def]
    sinks, head, holds, ROWS: tl.constexpr, HAS_SINKS: tl.constexpr, LOG2_E: tl.constexpr
):
    """Returns running maximum and sum `[ROWS]` before the first key; a sink is a key whose value is zero."""
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        maximum = tl.load(sinks + head, mask=holds, other=float("-inf")).to(tl.float32) * LOG2_E
        total = tl.where(holds, 1.0, 0.0)
    return maximum, total


# A finite stand-in for the maximum of no scores.
_LOWEST = tl.constexpr(-1.0e30)


@jit
def _add_values(scores, value, maximum, total, weighted, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """The running softmax with one more tile of keys, of which a row may see none."""
    highest = tl.maximum(tl.maximum(maximum, tl.max(scores, 1)), _LOWEST)
    shrink = tl.exp2(maximum - highest)
    weights = tl.exp2(scores - highest[:, None])
    products = tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
    return highest, total * shrink + tl.sum(weights, 1), weighted * shrink[:, None] + products


@jit
def _is_kept(  # type: ignore[no-untyped-def]
    kept, row, kv_head, position, seen, num_blocks, NUM_KV_HEADS: tl.constexpr, SPARSE: tl.constexpr
):
    """Returns whether rows and positions that are `seen` meet in a block that the row's KV head chose."""
    at = (row.to(tl.int64) * NUM_KV_HEADS + kv_head) * num_blocks + position // SPARSE
    return tl.load(kept + at, mask=seen, other=0) != 0


@jit_for_any("table_stride", "num_splits", "num_blocks")
def _split_kernel(  # type: ignore[no-untyped-def]
    query, cache, output, partial_output, partial_lse, sinks, kept, block_table, seq_lens, query_starts,
    query_row_stride, query_head_stride, table_stride, num_splits, num_blocks, score_scale, value_scale,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MINIMUM: tl.constexpr,
    SINGLE_SPLIT: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr, SPARSE: tl.constexpr, LOG2_E: tl.constexpr,
):  # fmt: skip
    """Program (request, KV head, split): all query heads of that KV head over the split's keys.

    SPARSE: tokens of a block that is read or left out as a whole, by `kept`; 0: all are read.
    """
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(query_starts + request)
    if tl.load(query_starts + request + 1) - row != 1:
        return
    length = tl.load(seq_lens + request)
    visible = first_visible(length, WINDOW, CHUNK)
    share = keys_per_split(length - visible, num_splits, MINIMUM, BLOCK_N)
    begin = visible + split * share
    end = tl.minimum(begin + share, length)
    if begin >= end:
        return
    member, dim = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + member
    in_head = dim < HEAD_DIM
    held = (member < GROUP)[:, None] & in_head[None, :]
    q = tl.load(query + row * query_row_stride + head[:, None] * query_head_stride + dim[None, :],
                mask=held, other=0.0)  # fmt: skip
    # The sink counts in the first split, whose log-sum-exp then tells the others.
    maximum, total = empty_softmax(sinks, head, (member < GROUP) & (split == 0), BLOCK_G, HAS_SINKS, LOG2_E)
    weighted = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for first in range(begin, end, BLOCK_N):
        position = first + tl.arange(0, BLOCK_N)
        seen = position < end
        if SPARSE > 0:
            seen = seen & _is_kept(kept, row, kv_head, position, seen, num_blocks, NUM_KV_HEADS, SPARSE)
        page = tl.load(block_table + request * table_stride + position // PAGE_SIZE, mask=seen, other=0)
        slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        at = cache + slot[:, None] * (2 * NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM + dim[None, :]
        wanted = seen[:, None] & in_head[None, :]
        key = widened(tl.load(at, mask=wanted, other=0.0), q.dtype)
        value = widened(tl.load(at + NUM_KV_HEADS * HEAD_DIM, mask=wanted, other=0.0), q.dtype)
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION) * score_scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        maximum, total, weighted = _add_values(scores, value, maximum, total, weighted, PRECISION)
    if SPARSE > 0:
        maximum = tl.where(total > 0, maximum, float("-inf"))
        total = tl.where(total > 0, total, 1.0)
    result = weighted / total[:, None] * value_scale
    num_heads = GROUP * NUM_KV_HEADS
    if SINGLE_SPLIT:
        at = output + (row * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(at, result.to(output.dtype.element_ty), mask=held)
    else:
        part = (request * num_heads + head) * num_splits + split
        tl.store(partial_output + part[:, None] * HEAD_DIM + dim[None, :], result, mask=held)
        tl.store(partial_lse + part, maximum + tl.log2(total), mask=member < GROUP)


@jit_for_any("num_splits")
def _combine_kernel(  # type: ignore[no-untyped-def]
    output, partial_output, partial_lse, seq_lens, query_starts, num_splits,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr, MINIMUM: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (request, head): the splits' results, weighted by how much of the softmax each holds."""
    request, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(query_starts + request)
    if tl.load(query_starts + request + 1) - row != 1:
        return
    length = tl.load(seq_lens + request)
    keys = length - first_visible(length, WINDOW, CHUNK)
    used = tl.cdiv(keys, keys_per_split(keys, num_splits, MINIMUM, BLOCK_N))
    dim = tl.arange(0, BLOCK_D)
    first = (request * NUM_HEADS + head) * num_splits
    maximum = float("-inf")
    total = 0.0
    weighted = tl.zeros([BLOCK_D], tl.float32)
    for begin in range(0, used, BLOCK_S):
        split = begin + tl.arange(0, BLOCK_S)
        lse = tl.load(partial_lse + first + split, mask=split < used, other=float("-inf"))
        highest = tl.maximum(tl.maximum(maximum, tl.max(lse, 0)), _LOWEST)
        shrink = tl.exp2(maximum - highest)
        weights = tl.exp2(lse - highest)
        part = tl.load(partial_output + (first + split)[:, None] * HEAD_DIM + dim[None, :],
                       mask=(split < used)[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)  # fmt: skip
        total = total * shrink + tl.sum(weights, 0)
        weighted = weighted * shrink + tl.sum(part * weights[:, None], 0)
        maximum = highest
    at = output + (row * NUM_HEADS + head) * HEAD_DIM + dim
    tl.store(at, (weighted / total).to(output.dtype.element_ty), mask=dim < HEAD_DIM)


def _blocks(layer: AttentionLayer) -> tuple[torch.Tensor | None, int, int]:
    """Returns the chosen blocks, a byte for each, how many a row has, and a block's tokens; 0: all
    are read.
    """
    kept = layer.kept_blocks
    return (None, 0, 0) if kept is None else (kept.view(torch.uint8), kept.shape[-1], layer.block_size)


def decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    output: torch.Tensor,
    partial: tuple[torch.Tensor, torch.Tensor] | None,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    score_scale: float,
    value_scale: float,
    tile: Tile | None = None,
    min_split: int = MIN_SPLIT,
    layer: AttentionLayer = PLAIN,
) -> None:
    """Writes the rows of requests that compute one token; leaves all others as they are.

    query `[T, num_heads, head_dim]`; cache `[num_pages, page_size, 2 * num_kv_heads, head_dim]`; output
    `[T, num_heads, head_dim]`, contiguous; partial: float32 `[R, num_heads, num_splits, head_dim]` and
    `[R, num_heads, num_splits]`, or None for one split; the rest int32 as in `ForwardInputs`. `score_scale`
    multiplies the products of queries and stored keys, `value_scale` the weighted stored values; neither
    touches the sinks.
    """
    num_heads, head_dim = query.shape[1:]
    page_size, num_kv_heads = cache.shape[1], cache.shape[2] // 2
    cache = as_loadable(cache)
    tile = tile or decode_tile(num_heads // num_kv_heads, head_dim, query.dtype)
    num_requests, num_splits = seq_lens.shape[0], partial[0].shape[2] if partial else 1
    partial_output, partial_lse = partial or (output, output)
    sinks, window, chunk = layer.sinks, layer.window or 0, layer.chunk or 0
    kept, num_blocks, block_size = _blocks(layer)

    def launch(tile: Tile) -> None:
        _split_kernel[(num_requests, num_kv_heads, num_splits)](
            query, cache, output, partial_output, partial_lse, query if sinks is None else sinks,
            query if kept is None else kept, block_table, seq_lens, query_starts,
            query.stride(0), query.stride(1), block_table.stride(0), num_splits, num_blocks,
            score_scale * LOG2_E, value_scale, GROUP=num_heads // num_kv_heads,
            NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, PAGE_SIZE=page_size,
            BLOCK_G=tile.rows, BLOCK_D=tile.width, BLOCK_N=tile.keys, MINIMUM=min_split,
            SINGLE_SPLIT=partial is None, PRECISION=tile.precision, WINDOW=window, CHUNK=chunk,
            HAS_SINKS=sinks is not None, SPARSE=block_size, LOG2_E=LOG2_E,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        if partial is not None:
            _combine_kernel[(num_requests, num_heads)](
                output, partial_output, partial_lse, seq_lens, query_starts, num_splits,
                NUM_HEADS=num_heads, HEAD_DIM=head_dim, BLOCK_D=tile.width, BLOCK_N=tile.keys, BLOCK_S=16,
                MINIMUM=min_split, WINDOW=window, CHUNK=chunk,
            )  # fmt: skip

    variant = (
        tile, cache.shape[1:], cache.dtype, query.dtype, num_heads, window, sinks is None, partial is None,
        block_size, chunk,
    )  # fmt: skip
    launch_fitting("decode", variant, query.device, with_smaller(tile, tile.rows), launch)


@jit
def _hide(scores, position, own, last, WINDOW: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns -inf for keys after the last position that a row sees, or before its window or chunk."""
    scores = tl.where(position <= last, scores, float("-inf"))
    if WINDOW > 0:
        scores = tl.where(position > own - WINDOW, scores, float("-inf"))
    if CHUNK > 0:
        scores = tl.where(position >= own // CHUNK * CHUNK, scores, float("-inf"))
    return scores


@jit_for_any("num_requests", "table_stride", "num_blocks")
def _prefill_kernel(  # type: ignore[no-untyped-def]
    query, cache, output, sinks, kept, visible_ends, block_table, seq_lens, query_starts, num_requests,
    query_row_stride, query_head_stride, table_stride, num_blocks, score_scale, value_scale,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, HAS_SINKS: tl.constexpr,
    SPARSE: tl.constexpr, SEES_AHEAD: tl.constexpr, LOG2_E: tl.constexpr,
):  # fmt: skip
    """Program (tile, KV head): BLOCK_Q consecutive queries of one request, all heads of that KV head."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    request, first_tile = request_of_tile(tile, query_starts, num_requests, 0, BLOCK_Q)
    start = tl.load(query_starts + request)
    num_new = tl.load(query_starts + request + 1) - start
    offset = (tile - first_tile) * BLOCK_Q
    if (offset >= num_new) | (num_new == 1):
        return
    earlier = tl.load(seq_lens + request) - num_new
    packed, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    local, head = offset + packed // GROUP, kv_head * GROUP + packed % GROUP
    in_head = dim < HEAD_DIM
    held = ((packed // GROUP < BLOCK_Q) & (local < num_new))[:, None] & in_head[None, :]
    row = start + local
    q = tl.load(query + row[:, None] * query_row_stride + head[:, None] * query_head_stride + dim[None, :],
                mask=held, other=0.0)  # fmt: skip
    own = earlier + local
    last = own
    end = earlier + tl.minimum(offset + BLOCK_Q, num_new)
    if SEES_AHEAD:
        last = tl.load(visible_ends + row, mask=(packed // GROUP < BLOCK_Q) & (local < num_new), other=1) - 1
        end = tl.max(last, 0) + 1
    maximum, total = empty_softmax(sinks, head, packed // GROUP < BLOCK_Q, BLOCK_M, HAS_SINKS, LOG2_E)
    weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    begin = first_visible(earlier + offset + 1, WINDOW, CHUNK)
    for first in range(begin, end, BLOCK_N):
        position = first + tl.arange(0, BLOCK_N)
        seen = position < end
        page = tl.load(block_table + request * table_stride + position // PAGE_SIZE, mask=seen, other=0)
        slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        at = cache + slot[:, None] * (2 * NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM + dim[None, :]
        if SPARSE > 0:
            asked = (local < num_new)[:, None] & seen[None, :]
            chosen = _is_kept(
                kept, row[:, None], kv_head, position[None, :], asked, num_blocks, NUM_KV_HEADS, SPARSE
            )
            # What no row chose is never read.
            seen = seen & (tl.max(chosen.to(tl.int32), 0) > 0)
        wanted = seen[:, None] & in_head[None, :]
        key = widened(tl.load(at, mask=wanted, other=0.0), q.dtype)
        value = widened(tl.load(at + NUM_KV_HEADS * HEAD_DIM, mask=wanted, other=0.0), q.dtype)
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION) * score_scale
        scores = _hide(scores, position[None, :], own[:, None], last[:, None], WINDOW, CHUNK)
        if SPARSE > 0:
            scores = tl.where(chosen, scores, float("-inf"))
        maximum, total, weighted = _add_values(scores, value, maximum, total, weighted, PRECISION)
    if SPARSE > 0:
        # Rows after a request's last have chosen nothing.
        total = tl.where(total > 0, total, 1.0)
    result = weighted / total[:, None] * value_scale
    at = output + (row * (GROUP * NUM_KV_HEADS) + head)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(at, result.to(output.dtype.element_ty), mask=held)


def prefill(
    query: torch.Tensor,
    cache: torch.Tensor,
    output: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    score_scale: float,
    value_scale: float,
    tile: Tile | None = None,
    layer: AttentionLayer = PLAIN,
    visible_ends: torch.Tensor | None = None,
) -> None:
    """Writes the rows of requests that compute two or more tokens; arguments as those of `decode`.

    visible_ends: int64 `[T]` as in `ForwardInputs`, for a layer that reads them; None: a row sees what is
    before it.
    """
    (num_rows, num_heads, head_dim), num_requests = query.shape, seq_lens.shape[0]
    page_size, num_kv_heads = cache.shape[1], cache.shape[2] // 2
    group = num_heads // num_kv_heads
    cache = as_loadable(cache)
    tile = tile or prefill_tile(group, head_dim, query.dtype, cache.dtype == torch.uint8)
    sinks = layer.sinks
    kept, num_blocks, block_size = _blocks(layer)

    def launch(tile: Tile) -> None:
        queries_per_tile = tile.rows // group
        _prefill_kernel[(num_row_tiles(num_rows, num_requests, queries_per_tile), num_kv_heads)](
            query, cache, output, query if sinks is None else sinks, query if kept is None else kept,
            query if visible_ends is None else visible_ends,
            block_table, seq_lens, query_starts, num_requests,
            query.stride(0), query.stride(1), block_table.stride(0), num_blocks,
            score_scale * LOG2_E, value_scale, GROUP=group, NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim, PAGE_SIZE=page_size,
            BLOCK_M=tile.rows, BLOCK_Q=queries_per_tile, BLOCK_D=tile.width, BLOCK_N=tile.keys,
            PRECISION=tile.precision, WINDOW=layer.window or 0, CHUNK=layer.chunk or 0,
            HAS_SINKS=sinks is not None, SPARSE=block_size, SEES_AHEAD=visible_ends is not None,
            LOG2_E=LOG2_E, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip

    options = layer.window, layer.chunk, sinks is None, block_size, visible_ends is None
    variant = tile, cache.shape[1:], cache.dtype, query.dtype, num_heads, *options
    tiles = with_smaller(tile, max(MIN_ROWS, next_power_of_2(group)))
    launch_fitting("prefill", variant, query.device, tiles, launch)
