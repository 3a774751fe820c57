"""Compressed attention as Triton kernels, in the order of a layer.

A program of the first makes the entry that one row ends, and does nothing for all other rows; of the second,
it leaves some of a request's latest rows for the next step; of the third, it serves a block of heads of one
row, over the window's keys and then the entries, each read once as key and as value. Choosing entries is the
indexer's of latent attention (`mla/triton_kernels.py`). Everything is read from device tensors: any step can
be captured.
"""

from __future__ import annotations

import torch
import triton.language as tl

from gpu_service.attention.compressed.base import Compression
from gpu_service.attention.mla.triton_kernels import position_of
from gpu_service.attention.triton_kernels import LOG2_E
from gpu_service.attention.triton_tiles import MIN_ROWS, Tile, with_smaller
from gpu_service.core.step import ForwardInputs
from gpu_service.ops.triton.jit import jit, jit_for_any, launch_fitting, next_power_of_2

# Tokens of an entry that a program reads at a time.
_BLOCK_TOKENS = 8
# Rows that a program leaves for the next step.
_BLOCK_LATEST = 4


@jit
def _joined(  # type: ignore[no-untyped-def]
    rows, recent, start, slot, token, first, ROW: tl.constexpr, KEPT: tl.constexpr, row_stride
):
    """Returns pointers to the rows of tokens of one request: of the step, or of those kept before `first`."""
    kept = recent + (slot * KEPT + (token - first + KEPT)) * ROW
    return tl.where(token >= first, rows + (start + token - first).to(tl.int64) * row_stride, kept)


@jit
def _summed(  # type: ignore[no-untyped-def]
    maximum, total, weighted, at_rows, at_offsets, element, held, ROW: tl.constexpr
):
    """Adds one more block of tokens to a sum with weights by softmax, element by element."""
    value = tl.load(at_rows + element, mask=held, other=0.0).to(tl.float32)
    logit = tl.load(at_rows + ROW // 2 + element, mask=held, other=0.0).to(tl.float32)
    logit += tl.load(at_offsets + element, mask=held, other=0.0)
    logit = tl.where(held, logit, float("-inf"))
    highest = tl.maximum(maximum, tl.max(logit, 0))
    weights = tl.exp(logit - highest[None, :])
    shrink = tl.exp(maximum - highest)
    total = total * shrink + tl.sum(weights, 0)
    return highest, total, weighted * shrink + tl.sum(weights * value, 0)


@jit_for_any("num_requests", "row_stride")
def _compress_kernel(  # type: ignore[no-untyped-def]
    rows, recent, pages, offsets, norm_weight, cos, sin, reads, slot_mapping, seq_lens, query_starts,
    num_requests, row_stride, eps, SIZE: tl.constexpr, ROW: tl.constexpr, KEPT: tl.constexpr,
    RATE: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PLACES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row): nothing, unless its token is the last of an entry. A thread has pairs of elements."""
    row = tl.program_id(0)
    request, length = position_of(row, query_starts, seq_lens, num_requests)
    if length % RATE == 0:
        start = tl.load(query_starts + request)
        first = length - 1 - (row - start)
        slot = tl.load(reads + request)
        pair = tl.arange(0, BLOCK)
        in_pair = 2 * pair < SIZE
        # No logit is as low; without any, nothing divides by zero or is subtracted from itself.
        lowest = tl.full([BLOCK], -1.0e30, tl.float32)
        zero = tl.zeros([BLOCK], tl.float32)
        even_top, even_total, even = lowest, zero, zero
        odd_top, odd_total, odd = lowest, zero, zero
        for begin in range(0, WIDTH, BLOCK_T):
            place = begin + tl.arange(0, BLOCK_T)
            token = length - WIDTH + place
            held = ((place < WIDTH) & (token >= 0))[:, None] & in_pair[None, :]
            # In the tokens of the entry before, the first half of the elements is meant.
            part = tl.where((place >= RATE) & (WIDTH > RATE), SIZE, 0)
            at_rows = _joined(rows, recent, start, slot, token, first, ROW, KEPT, row_stride) + part
            at_offsets = offsets + place % RATE * (ROW // 2) + part
            element = 2 * pair[None, :]
            even_top, even_total, even = _summed(
                even_top, even_total, even, at_rows[:, None], at_offsets[:, None], element, held, ROW
            )
            odd_top, odd_total, odd = _summed(
                odd_top, odd_total, odd, at_rows[:, None], at_offsets[:, None], element + 1, held, ROW
            )
        even = even / tl.where(in_pair, even_total, 1.0)
        odd = odd / tl.where(in_pair, odd_total, 1.0)
        scale = tl.rsqrt((tl.sum(even * even, 0) + tl.sum(odd * odd, 0)) / SIZE + eps)
        even = even * scale * tl.load(norm_weight + 2 * pair, mask=in_pair, other=0.0).to(tl.float32)
        odd = odd * scale * tl.load(norm_weight + 2 * pair + 1, mask=in_pair, other=0.0).to(tl.float32)
        # Each angle is there at both elements of its pair, the sine negative at the first.
        turning = 2 * pair - (SIZE - ROTARY)
        rotated = in_pair & (turning >= 0)
        angle = row.to(tl.int64) * ROTARY + turning + 1
        cosine = tl.load(cos + angle, mask=rotated, other=1.0).to(tl.float32)
        sine = tl.load(sin + angle, mask=rotated, other=0.0).to(tl.float32)
        where = tl.load(slot_mapping + row)
        target = pages + (where // PAGE_SIZE * PLACES + where % PAGE_SIZE // RATE) * SIZE + 2 * pair
        dtype: tl.constexpr = pages.dtype.element_ty
        tl.store(target, (even * cosine - odd * sine).to(dtype), mask=in_pair)
        tl.store(target + 1, (odd * cosine + even * sine).to(dtype), mask=in_pair)


@jit_for_any("row_stride")
def _keep_kernel(  # type: ignore[no-untyped-def]
    rows, recent, reads, writes, query_starts, row_stride, ROW: tl.constexpr, KEPT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (request, block of places): the latest rows, oldest first, into the slot that is written."""
    request = tl.program_id(0)
    start = tl.load(query_starts + request)
    count = tl.load(query_starts + request + 1) - start
    place = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    # Counted from the first row of the step, earlier ones being negative.
    token = count - KEPT + place
    source = _joined(rows, recent, start, tl.load(reads + request), token, 0, ROW, KEPT, row_stride)
    target = recent + (tl.load(writes + request) * KEPT + place) * ROW
    for begin in range(0, ROW, BLOCK):
        element = begin + tl.arange(0, BLOCK)[None, :]
        held = (place < KEPT)[:, None] & (element < ROW)
        tl.store(target[:, None] + element, tl.load(source[:, None] + element, mask=held), mask=held)


@jit
def _attended(  # type: ignore[no-untyped-def]
    query, key, seen, maximum, total, weighted, score_scale, PRECISION: tl.constexpr
):
    """Adds one more block of keys, which are values, to the sums of a block of heads."""
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    scores = tl.where(seen[None, :], scores * score_scale, float("-inf"))
    highest = tl.maximum(maximum, tl.max(scores, 1))
    shrink = tl.exp2(maximum - highest)
    weights = tl.exp2(scores - highest[:, None])
    total = total * shrink + tl.sum(weights, 1)
    products = tl.dot(weights.to(query.dtype), key, input_precision=PRECISION)
    return highest, total, weighted * shrink[:, None] + products


@jit_for_any("num_requests", "table_stride", "key_stride")
def _attend_kernel(  # type: ignore[no-untyped-def]
    query, keys, window, entries, sinks, output, selection, block_table, reads, seq_lens, query_starts,
    num_requests, table_stride, key_stride, score_scale, log2_e, NUM_HEADS: tl.constexpr, DIM: tl.constexpr,
    WINDOW: tl.constexpr, RATE: tl.constexpr, TOP_K: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PLACES: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (row, block of heads). RATE 0: the layer has no entries; TOP_K 0: all of them are seen."""
    row = tl.program_id(0)
    request, length = position_of(row, query_starts, seq_lens, num_requests)
    start, slot = tl.load(query_starts + request), tl.load(reads + request)
    first = length - 1 - (row - start)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    at = tl.arange(0, BLOCK_D)
    in_head, in_dim = head < NUM_HEADS, at < DIM
    held = in_head[:, None] & in_dim[None, :]
    own = (row.to(tl.int64) * NUM_HEADS + head[:, None]) * DIM + at[None, :]
    rows = tl.load(query + own, mask=held, other=0.0)
    # The sink is a key that has been seen, without a value.
    maximum = tl.load(sinks + head, mask=in_head, other=0.0).to(tl.float32) * log2_e
    total = tl.full([BLOCK_H], 1.0, tl.float32)
    weighted = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    oldest = tl.maximum(length - WINDOW, 0)
    for begin in range(oldest, length, BLOCK_N):
        token = begin + tl.arange(0, BLOCK_N)
        seen = token < length
        source = _joined(keys, window, start, slot, token, first, DIM, WINDOW - 1, key_stride)
        key = tl.load(source[:, None] + at[None, :], mask=seen[:, None] & in_dim[None, :], other=0.0)
        maximum, total, weighted = _attended(
            rows, key, seen, maximum, total, weighted, score_scale, PRECISION
        )
    if RATE > 0:
        count = length // RATE
        if TOP_K > 0:
            count = tl.minimum(count, TOP_K)
        for begin in range(0, count, BLOCK_N):
            entry = begin + tl.arange(0, BLOCK_N)
            seen = entry < count
            if TOP_K > 0:
                entry = tl.load(selection + row.to(tl.int64) * TOP_K + entry, mask=seen, other=-1)
                seen = entry >= 0
                entry = tl.maximum(entry, 0)
            last = entry * RATE + RATE - 1
            page = tl.load(block_table + request * table_stride + last // PAGE_SIZE, mask=seen, other=0)
            place = page.to(tl.int64) * PLACES + last % PAGE_SIZE // RATE
            source = entries + place * DIM
            key = tl.load(source[:, None] + at[None, :], mask=seen[:, None] & in_dim[None, :], other=0.0)
            maximum, total, weighted = _attended(
                rows, key, seen, maximum, total, weighted, score_scale, PRECISION
            )
    result = weighted / total[:, None]
    tl.store(output + own, result.to(output.dtype.element_ty), mask=held)


def keep_latest(rows: torch.Tensor, recent: torch.Tensor, inputs: ForwardInputs) -> None:
    """The latest rows of each request from the slots that are read and the step's `[T, row]` to those that
    are written, in `recent` `[slots, kept, row]`.
    """
    _, kept, width = recent.shape
    if not kept:
        return
    requests = inputs.seq_lens_tensor.shape[0]
    _keep_kernel[(requests, -(-kept // _BLOCK_LATEST))](
        rows, recent, inputs.state_reads, inputs.state_writes, inputs.query_start_loc_tensor, rows.stride(0),
        ROW=width, KEPT=kept, BLOCK_T=_BLOCK_LATEST, BLOCK=min(1024, next_power_of_2(width)),
    )  # fmt: skip


def compress_rows(
    rows: torch.Tensor,
    recent: torch.Tensor,
    pages: torch.Tensor,
    how: Compression,
    inputs: ForwardInputs,
    page_size: int,
) -> None:
    """Computes `CompressedAttentionBackend.compress`, without what is left for the next step."""
    rotary_dim, block = how.table.cos.shape[-1], next_power_of_2(-(-how.size // 2))
    _compress_kernel[(rows.shape[0],)](
        rows, recent, pages, how.offsets, how.norm_weight, how.table.cos, how.table.sin, inputs.state_reads,
        inputs.slot_mapping, inputs.seq_lens_tensor, inputs.query_start_loc_tensor,
        inputs.seq_lens_tensor.shape[0], rows.stride(0), how.eps,
        SIZE=how.size, ROW=recent.shape[2], KEPT=recent.shape[1], RATE=how.rate, WIDTH=how.width,
        ROTARY=rotary_dim, PAGE_SIZE=page_size, PLACES=pages.shape[1], BLOCK_T=_BLOCK_TOKENS, BLOCK=block,
    )  # fmt: skip


def compressed_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    window: torch.Tensor,
    entries: torch.Tensor | None,
    rate: int,
    sinks: torch.Tensor,
    selection: torch.Tensor | None,
    inputs: ForwardInputs,
    page_size: int,
    softmax_scale: float,
    tile: Tile,
) -> torch.Tensor:
    """Computes `CompressedAttentionBackend.attend`, without what is left for the next step; `tile` as
    `mla_tile`'s.

    entries `[num_pages, places, head_dim]`, None where the layer has none.
    """
    num_rows, num_heads, head_dim = query.shape
    query, output = query.contiguous(), torch.empty_like(query, memory_format=torch.contiguous_format)
    table, top_k = inputs.block_table, 0 if selection is None else selection.shape[1]
    pages = query if entries is None else entries

    def launch(tile: Tile) -> None:
        _attend_kernel[(num_rows, -(-num_heads // tile.rows))](
            query, keys, window, pages, sinks, output, table if selection is None else selection, table,
            inputs.state_reads, inputs.seq_lens_tensor, inputs.query_start_loc_tensor,
            inputs.seq_lens_tensor.shape[0], table.stride(0), keys.stride(0), softmax_scale * LOG2_E, LOG2_E,
            NUM_HEADS=num_heads, DIM=head_dim, WINDOW=window.shape[1] + 1, RATE=rate, TOP_K=top_k,
            PAGE_SIZE=page_size, PLACES=pages.shape[1], BLOCK_H=tile.rows,
            BLOCK_D=max(MIN_ROWS, next_power_of_2(head_dim)), BLOCK_N=tile.keys, PRECISION=tile.precision,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip

    variant = tile, head_dim, query.dtype, num_heads, rate, top_k, window.shape[1], page_size
    launch_fitting("compressed attention", variant, query.device, with_smaller(tile, MIN_ROWS), launch)
    return output
