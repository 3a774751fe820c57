"""Causal attention of chunks: several consecutive tokens of each request over its pages.

Source of the method: T. Dao, "FlashAttention-2" (2023). The query heads of a KV head are packed into the
rows of a tile, so that keys are read once for all of them. Which request a program serves is found on the
device by bisection: the host prepares nothing.
"""

from __future__ import annotations

import torch
import triton.language as tl

from gpu_service.attention.base import PLAIN, AttentionLayer
from gpu_service.attention.triton_kernels.decode import LOG2_E, empty_softmax, first_visible
from gpu_service.attention.triton_kernels.shapes import MIN_ROWS, Tile, prefill_tile, with_smaller
from gpu_service.ops.triton.e4m3 import as_loadable, widened
from gpu_service.ops.triton.fitting import launch_fitting
from gpu_service.ops.triton.jit import jit, jit_for_any, next_power_of_2
from gpu_service.ops.triton.row_tiles import num_row_tiles, request_of_tile

# A finite stand-in for the maximum of no scores.
_LOWEST = -1.0e30


@jit
def _hide(scores, position, own, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """-inf for keys behind a row's own position, or before its window."""
    scores = tl.where(position <= own, scores, float("-inf"))
    if WINDOW > 0:
        scores = tl.where(position > own - WINDOW, scores, float("-inf"))
    return scores


@jit_for_any("num_requests", "table_stride")
def _prefill_kernel(  # type: ignore[no-untyped-def]
    query, cache, output, sinks, block_table, seq_lens, query_starts, num_requests,
    query_row_stride, query_head_stride, table_stride, score_scale, value_scale,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, LOG2_E: tl.constexpr,
    LOWEST: tl.constexpr,
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
    end = earlier + tl.minimum(offset + BLOCK_Q, num_new)
    maximum, total = empty_softmax(sinks, head, packed // GROUP < BLOCK_Q, BLOCK_M, HAS_SINKS, LOG2_E)
    weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    begin = first_visible(earlier + offset + 1, WINDOW)
    for first in range(begin, end, BLOCK_N):
        position = first + tl.arange(0, BLOCK_N)
        seen = position < end
        page = tl.load(block_table + request * table_stride + position // PAGE_SIZE, mask=seen, other=0)
        slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        at = cache + slot[:, None] * (2 * NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM + dim[None, :]
        wanted = seen[:, None] & in_head[None, :]
        key = widened(tl.load(at, mask=wanted, other=0.0), q.dtype)
        value = widened(tl.load(at + NUM_KV_HEADS * HEAD_DIM, mask=wanted, other=0.0), q.dtype)
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION) * score_scale
        scores = _hide(scores, position[None, :], own[:, None], WINDOW)
        # With a window a row may see no key of its first tiles.
        highest = tl.maximum(tl.maximum(maximum, tl.max(scores, 1)), LOWEST)
        shrink = tl.exp2(maximum - highest)
        weights = tl.exp2(scores - highest[:, None])
        total = total * shrink + tl.sum(weights, 1)
        products = tl.dot(weights.to(q.dtype), value, input_precision=PRECISION)
        weighted = weighted * shrink[:, None] + products
        maximum = highest
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
) -> None:
    """Writes the rows of requests that compute two or more tokens; arguments as those of `decode`."""
    (num_rows, num_heads, head_dim), num_requests = query.shape, seq_lens.shape[0]
    page_size, num_kv_heads = cache.shape[1], cache.shape[2] // 2
    group = num_heads // num_kv_heads
    cache = as_loadable(cache)
    tile = tile or prefill_tile(group, head_dim, query.dtype, cache.dtype == torch.uint8)
    sinks = layer.sinks

    def launch(tile: Tile) -> None:
        queries_per_tile = tile.rows // group
        _prefill_kernel[(num_row_tiles(num_rows, num_requests, queries_per_tile), num_kv_heads)](
            query, cache, output, query if sinks is None else sinks,
            block_table, seq_lens, query_starts, num_requests,
            query.stride(0), query.stride(1), block_table.stride(0), score_scale * LOG2_E, value_scale,
            GROUP=group, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, PAGE_SIZE=page_size,
            BLOCK_M=tile.rows, BLOCK_Q=queries_per_tile, BLOCK_D=tile.width, BLOCK_N=tile.keys,
            PRECISION=tile.precision, WINDOW=layer.window or 0, HAS_SINKS=sinks is not None, LOG2_E=LOG2_E,
            LOWEST=_LOWEST, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip

    variant = tile, cache.shape[1:], cache.dtype, query.dtype, num_heads, layer.window, sinks is None
    tiles = with_smaller(tile, max(MIN_ROWS, next_power_of_2(group)))
    launch_fitting("prefill", variant, query.device, tiles, launch)
