"""Kimi Delta Attention: decode and mixed steps of the delta rule whose decays are of elements.

A product of two tokens is a sum over elements each weighed by its own decay, `k_i[d] k_j[d] exp(G_i[d] -
G_j[d])`. Split into a factor of each token, one of them would leave float32's range; so chunks are short, and
`prepare_kernel` sums their pairs one earlier token at a time. What follows are GEMMs, as in
`linear_attention_chunks`: with the decays inside, V = T (beta v), W = T (beta exp(G) k) and P of a chunk,
and of its rows exp(G) q and exp(G_last - G) k, which `scan_kernel` carries each state along with.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from gpu_service.device.limits import device_limits
from gpu_service.ops.kimi_delta import CHUNK
from gpu_service.ops.linear_attention import Sequences
from gpu_service.ops.triton.jit import jit, jit_for_any, launch_fitting, next_power_of_2
from gpu_service.ops.triton.linear_attention import softplus, unit
from gpu_service.ops.triton.linear_attention_chunks import (
    MAX_HEAD_DIM,
    MIN_BLOCK,
    num_row_tiles,
    request_of_tile,
    unit_lower_inverse,
)

# Columns of a head's state that a program of the update has.
_COLUMNS = 32


@jit
def _log_decay(x, a_log, bound, HAS_BOUND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the log decay of each element: `-exp(a_log) softplus(x)`, or `bound *
    sigmoid(exp(a_log) x)`.
    """
    # Chosen while compiling.
    return bound * tl.sigmoid(tl.exp(a_log) * x) if HAS_BOUND else -tl.exp(a_log) * softplus(x)


@jit_for_any("a_stride", "b_stride")
def kimi_delta_update_kernel(  # type: ignore[no-untyped-def]
    qkv, a, b, a_log, dt_bias, bound, states, reads, writes, starts, output, qkv_stride, a_stride, b_stride,
    NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_BOUND: tl.constexpr,
):  # fmt: skip
    """Program (request, head, block of columns): columns of a state go their ways apart.

    HAS_STARTS: the request's first row is in `starts`, and requests with more than one are left out.
    """
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = request
    if HAS_STARTS:
        token = tl.load(starts + request).to(tl.int64)
        if tl.load(starts + request + 1) - token > 1:
            return
    at_key, at_value = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key, in_value = at_key < KEY_DIM, at_value < VALUE_DIM
    of_head = head * KEY_DIM + at_key
    row = qkv + token * qkv_stride
    query = unit(row + of_head, in_key) * SCALE
    key = unit(row + NUM_HEADS * KEY_DIM + of_head, in_key)
    at_column = row + 2 * NUM_HEADS * KEY_DIM + head * VALUE_DIM + at_value
    value = tl.load(at_column, mask=in_value, other=0.0).to(tl.float32)
    step = tl.load(a + token * a_stride + of_head, mask=in_key, other=0.0).to(tl.float32)
    step += tl.load(dt_bias + of_head, mask=in_key, other=0.0)
    decay = tl.exp(_log_decay(step, tl.load(a_log + head), bound, HAS_BOUND))
    beta = tl.sigmoid(tl.load(b + token * b_stride + head).to(tl.float32))
    at_state = (head * KEY_DIM + at_key[:, None]) * VALUE_DIM + at_value[None, :]
    slot_size: tl.constexpr = NUM_HEADS * KEY_DIM * VALUE_DIM
    held = in_key[:, None] & in_value[None, :]
    state = tl.load(states + tl.load(reads + request) * slot_size + at_state, mask=held, other=0.0)
    state *= decay[:, None]
    change = beta * (value - tl.sum(key[:, None] * state, 0))
    state += key[:, None] * change[None, :]
    tl.store(states + tl.load(writes + request) * slot_size + at_state, state, mask=held)
    result = tl.sum(query[:, None] * state, 0).to(output.dtype.element_ty)
    tl.store(output + (token * NUM_HEADS + head) * VALUE_DIM + at_value, result, mask=in_value)


@jit
def _pairs(query, key, total, position, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Products of each row's query and key with each earlier row's key, `[CHUNK, CHUNK]` each."""
    seen, alike = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    for earlier in range(CHUNK):
        is_earlier = (position == earlier)[:, None]
        other = tl.sum(tl.where(is_earlier, key, 0.0), 0)
        before = tl.sum(tl.where(is_earlier, total, 0.0), 0)
        decayed = tl.exp(tl.minimum(total - before[None, :], 0.0)) * other[None, :]
        column = (position == earlier)[None, :]
        seen = tl.where(column, tl.sum(query * decayed, 1)[:, None], seen)
        alike = tl.where(column, tl.sum(key * decayed, 1)[:, None], alike)
    return seen, alike


@jit_for_any("num_requests", "a_stride", "b_stride")
def prepare_kernel(  # type: ignore[no-untyped-def]
    qkv, a, b, a_log, dt_bias, bound, query_starts, values, state_weights, products, queries, keys, decays,
    num_requests, qkv_stride, a_stride, b_stride, NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, SCALE: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, HAS_BOUND: tl.constexpr,
):  # fmt: skip
    """Program (head, chunk). Writes V to `values` `[T, H, VALUE_DIM]`; W to `state_weights`, exp(G) q to
    `queries` and exp(G_last - G) k to `keys`, `[T, H, KEY_DIM]` each; P to `products` `[T, H, CHUNK]`; and
    exp(G_last) to `decays` float32 `[chunks, H, KEY_DIM]`.
    """
    head, tile = tl.program_id(0), tl.program_id(1)
    request, first_tile = request_of_tile(tile, query_starts, num_requests, 0, CHUNK)
    start, end = tl.load(query_starts + request), tl.load(query_starts + request + 1)
    first = start + (tile - first_tile) * CHUNK
    if (end - start == 1) | (first >= end):
        return
    position, at_key, at_value = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    held, in_dim = position < end - first, at_key < KEY_DIM
    in_key = held[:, None] & in_dim[None, :]
    key_size: tl.constexpr = NUM_HEADS * KEY_DIM
    dtype: tl.constexpr = qkv.dtype.element_ty
    row, of_head = first.to(tl.int64), head * KEY_DIM + at_key
    at_query = qkv + row * qkv_stride + (position[:, None] * qkv_stride + of_head[None, :])
    query = tl.load(at_query, mask=in_key, other=0.0).to(tl.float32)
    query *= (tl.rsqrt(tl.sum(query * query, 1) + 1e-6) * SCALE)[:, None]
    key = tl.load(at_query + key_size, mask=in_key, other=0.0).to(tl.float32)
    key *= tl.rsqrt(tl.sum(key * key, 1) + 1e-6)[:, None]
    at_step = a + row * a_stride + (position[:, None] * a_stride + of_head[None, :])
    step = tl.load(at_step, mask=in_key, other=0.0).to(tl.float32)
    step += tl.load(dt_bias + of_head, mask=in_dim, other=0.0)[None, :]
    # Rows that are not held do not decay.
    total = tl.cumsum(tl.where(in_key, _log_decay(step, tl.load(a_log + head), bound, HAS_BOUND), 0.0), 0)
    raw_beta = tl.load(b + (row + position) * b_stride + head, mask=held, other=0.0)
    beta = tl.sigmoid(raw_beta.to(tl.float32))

    seen, alike = _pairs(query, key, total, position, CHUNK)
    row_head, by_head = row * NUM_HEADS + head, position[:, None] * NUM_HEADS
    seen = tl.where(position[:, None] >= position[None, :], seen, 0.0)
    at_product = products + row_head * CHUNK + (by_head * CHUNK + position[None, :])
    tl.store(at_product, seen.to(dtype), mask=held[:, None])
    strict = tl.where(position[:, None] > position[None, :], alike * beta[:, None], 0.0)
    inverse = unit_lower_inverse(strict, CHUNK, LEVELS, PRECISION) * beta[None, :]

    within = tl.exp(total)
    last = tl.min(total, 0)
    at_head = row_head * KEY_DIM + (by_head * KEY_DIM + at_key[None, :])
    tl.store(queries + at_head, (within * query).to(dtype), mask=in_key)
    tl.store(keys + at_head, (tl.exp(last[None, :] - total) * key).to(dtype), mask=in_key)
    known = tl.dot(inverse.to(dtype), (within * key).to(dtype), input_precision=PRECISION)
    tl.store(state_weights + at_head, known.to(dtype), mask=in_key)
    at_decay = decays + (tile.to(tl.int64) * NUM_HEADS + head) * KEY_DIM + at_key
    tl.store(at_decay, tl.exp(last), mask=in_dim)
    in_value = held[:, None] & (at_value < VALUE_DIM)[None, :]
    at_column = position[:, None] * qkv_stride + 2 * key_size + head * VALUE_DIM + at_value[None, :]
    value = tl.load(qkv + row * qkv_stride + at_column, mask=in_value, other=0.0)
    wanted = tl.dot(inverse.to(dtype), value, input_precision=PRECISION).to(dtype)
    tl.store(values + row_head * VALUE_DIM + (by_head * VALUE_DIM + at_value[None, :]), wanted, mask=in_value)


@jit
def scan_kernel(  # type: ignore[no-untyped-def]
    state_weights, products, queries, keys, decays, states, reads, writes, query_starts, values,
    NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (block of columns, head, request). The outputs take the place of V in `values`."""
    head, request = tl.program_id(1), tl.program_id(2)
    start, end = tl.load(query_starts + request), tl.load(query_starts + request + 1)
    if end - start == 1:
        return
    position, at_key = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    at_value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key, in_value = at_key < KEY_DIM, at_value < VALUE_DIM
    in_state = in_key[:, None] & in_value[None, :]
    at_state = (head * KEY_DIM + at_key[:, None]) * VALUE_DIM + at_value[None, :]
    slot_size: tl.constexpr = NUM_HEADS * KEY_DIM * VALUE_DIM
    state = tl.load(states + tl.load(reads + request) * slot_size + at_state, mask=in_state, other=0.0)
    dtype: tl.constexpr = values.dtype.element_ty
    by_head = (position * NUM_HEADS + head)[:, None]
    at_decay = decays + ((start // CHUNK + request).to(tl.int64) * NUM_HEADS + head) * KEY_DIM + at_key
    for first in range(start, end, CHUNK):
        row, held = tl.full([], 0, tl.int64) + first, position < end - first
        in_rows, in_outputs = held[:, None] & in_key[None, :], held[:, None] & in_value[None, :]
        at_row = row * NUM_HEADS * KEY_DIM + (by_head * KEY_DIM + at_key[None, :])
        query = tl.load(queries + at_row, mask=in_rows, other=0.0)
        key = tl.load(keys + at_row, mask=in_rows, other=0.0)
        weights = tl.load(state_weights + at_row, mask=in_rows, other=0.0)
        at_product = products + row * NUM_HEADS * CHUNK + (by_head * CHUNK + position[None, :])
        product = tl.load(at_product, mask=held[:, None], other=0.0)
        at_output = values + row * NUM_HEADS * VALUE_DIM + (by_head * VALUE_DIM + at_value[None, :])
        wanted = tl.load(at_output, mask=in_outputs, other=0.0).to(tl.float32)
        decay = tl.load(at_decay + (first - start) // CHUNK * (NUM_HEADS * KEY_DIM), mask=in_key, other=0.0)
        rounded = state.to(dtype)
        changes = (wanted - tl.dot(weights, rounded, input_precision=PRECISION)).to(dtype)
        output = tl.dot(query, rounded, input_precision=PRECISION)
        output += tl.dot(product, changes, input_precision=PRECISION)
        state = state * decay[:, None] + tl.dot(tl.trans(key), changes, input_precision=PRECISION)
        tl.store(at_output, output.to(dtype), mask=in_outputs)
    tl.store(states + tl.load(writes + request) * slot_size + at_state, state, mask=in_state)


def kimi_delta_update(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    bound: float | None,
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
) -> torch.Tensor:
    output = torch.empty(qkv.shape[0], states.shape[1], states.shape[3], dtype=qkv.dtype, device=qkv.device)
    if qkv.shape[0]:
        _launch_update((qkv, a, b, a_log, dt_bias), bound, states, (reads, writes), output)
    return output


def _launch_update(
    rows: tuple[torch.Tensor, ...],
    bound: float | None,
    states: torch.Tensor,
    slots: tuple[torch.Tensor, torch.Tensor],
    output: torch.Tensor,
    starts: torch.Tensor | None = None,
) -> None:
    """Into rows of `output`; starts int32 `[R + 1]`: of those requests only that have one row."""
    (qkv, a, b, _, _), (heads, key_dim, value_dim) = rows, states.shape[1:]
    columns = min(_COLUMNS, next_power_of_2(value_dim))
    kimi_delta_update_kernel[(slots[0].shape[0], heads, -(-value_dim // columns))](
        *rows, bound or 0.0, states, *slots, slots[0] if starts is None else starts, output, qkv.stride(0),
        a.stride(0), b.stride(0), NUM_HEADS=heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        SCALE=key_dim**-0.5, BLOCK_K=next_power_of_2(key_dim), BLOCK_V=columns,
        HAS_STARTS=starts is not None, HAS_BOUND=bound is not None,
    )  # fmt: skip


def supports_extend(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    bound: float | None,
    states: torch.Tensor,
    *_: object,
) -> bool:
    """Returns whether heads are so small that a program can hold what it needs of them."""
    return max(states.shape[2:]) <= MAX_HEAD_DIM


class _Tile(NamedTuple):
    """What a program of the scan holds of a state; filled by `_tiles`."""

    columns: int
    num_stages: int  # With 3, one chunk is read while another one is computed.
    num_warps: int


def _tiles(dtype: torch.dtype, multiplies_from_shared_memory: bool) -> tuple[_Tile, ...]:
    """Best first; chunks are so short that a program with few columns computes little between two loads."""
    if dtype == torch.float32:
        # No tensor cores: what a GEMM takes is in registers.
        return (_Tile(MIN_BLOCK, 1, 4),)
    narrow = _Tile(MIN_BLOCK, 1, 4)
    if not multiplies_from_shared_memory:
        return _Tile(32, 2, 4), _Tile(32, 1, 8), narrow
    return _Tile(32, 3, 4), _Tile(32, 2, 4), narrow


def kimi_delta_extend(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    bound: float | None,
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    """Computes `ops.kimi_delta.kimi_delta_extend`; single tokens are one launch of the update's kernel."""
    num_rows, (_, heads, _, value_dim) = qkv.shape[0], states.shape
    output = torch.empty(num_rows, heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    rows, slots = (qkv, a, b, a_log, dt_bias), (reads, writes)
    # Each leaves the other's requests out. Both are launched in any step, so that the first one compiles all.
    _launch_update(rows, bound, states, slots, output, sequences.starts)
    _launch_chunks(rows, bound, states, slots, output, sequences.starts)
    return output


def _launch_chunks(
    rows: tuple[torch.Tensor, ...],
    bound: float | None,
    states: torch.Tensor,
    slots: tuple[torch.Tensor, torch.Tensor],
    output: torch.Tensor,
    starts: torch.Tensor,
) -> None:
    (qkv, a, b, _, _), (heads, key_dim, value_dim) = rows, states.shape[1:]
    num_rows, num_requests, dtype, device = qkv.shape[0], slots[0].shape[0], qkv.dtype, qkv.device
    chunks = num_row_tiles(num_rows, num_requests, CHUNK)
    products = torch.empty(num_rows, heads, CHUNK, dtype=dtype, device=device)
    state_weights, queries, keys = torch.empty(3, num_rows, heads, key_dim, dtype=dtype, device=device)
    decays = torch.empty(chunks, heads, key_dim, dtype=torch.float32, device=device)
    sizes: dict[str, object] = {
        "NUM_HEADS": heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "CHUNK": CHUNK,
        "BLOCK_K": max(MIN_BLOCK, next_power_of_2(key_dim)),
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }
    prepare_kernel[(heads, chunks)](
        *rows, bound or 0.0, starts, output, state_weights, products, queries, keys, decays, num_requests,
        qkv.stride(0), a.stride(0), b.stride(0), SCALE=key_dim**-0.5, LEVELS=CHUNK.bit_length() - 1,
        BLOCK_V=max(MIN_BLOCK, next_power_of_2(value_dim)), HAS_BOUND=bound is not None, **sizes,
    )  # fmt: skip

    def scan(tile: _Tile) -> None:
        scan_kernel[(-(-value_dim // tile.columns), heads, num_requests)](
            state_weights, products, queries, keys, decays, states, *slots, starts, output,
            BLOCK_V=tile.columns, num_stages=tile.num_stages, num_warps=tile.num_warps, **sizes,
        )  # fmt: skip

    tiles = _tiles(dtype, device_limits(device).multiplies_from_shared_memory)
    launch_fitting("Kimi Delta Attention's scan", (dtype, *sizes.values()), device, tiles, scan)
