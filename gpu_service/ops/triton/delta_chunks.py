"""The gated delta rule over chunks of several tokens, for all requests of a mixed step at once.

Two launches. `prepare_kernel` computes what a chunk's tokens do to one another, all chunks side by side;
`scan_kernel` carries each state from chunk to chunk. With G the sum of a chunk's log decays, S the state
before it, and as in section 3.3 of the source of `ops.delta_rule` the inverse T of

    I + strictly lower part of (beta_i exp(G_i - G_j) k_i . k_j)

the first makes V = T (beta v), W = T (beta exp(G) k), P = causal part of (exp(G_i - G_j) q_i . k_j), and
the second changes = V - W S, outputs = exp(G) q S + P changes, and of the next chunk
S = exp(G_last) S + (exp(G_last - G) k)^T changes.

Products take the rows' own dtype (float32: exactly) and sum in float32, where states stay. Queries and keys
enter them as they come: their lengths are factors of rows and columns of the products.
"""

from __future__ import annotations

import triton.language as tl

from gpu_service.ops.triton.jit import jit, jit_for_any
from gpu_service.ops.triton.linear_attention import softplus
from gpu_service.ops.triton.row_tiles import request_of_tile


@jit
def _unit_lower_inverse(  # type: ignore[no-untyped-def]
    strict, CHUNK: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr
):
    """(I + strict)^-1, strict `[CHUNK, CHUNK]` being strictly lower triangular; CHUNK = 2^LEVELS.

    Of blocks twice as large at each level: the inverse of [[A, 0], [B, C]] has -C^-1 B A^-1 below A^-1.
    Unlike powers of `strict`, inverses of blocks stay small, because each token's step is a contraction.
    """
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    pairs = tl.where((row >> 1) == (column >> 1), strict, 0.0)
    inverse = tl.where(row == column, 1.0, 0.0) - pairs
    for level in tl.static_range(1, LEVELS):
        within = (row >> (level + 1)) == (column >> (level + 1))
        across = within & ((row >> level) != (column >> level))
        below = tl.dot(inverse, tl.where(across, strict, 0.0), input_precision=PRECISION)
        inverse -= tl.dot(below, inverse, input_precision=PRECISION)
    return inverse


@jit
def _inverse_length(rows):  # type: ignore[no-untyped-def]
    rows = rows.to(tl.float32)
    return tl.rsqrt(tl.sum(rows * rows, 1) + 1e-6)


@jit
def _cumulated_decay(at_step, held, a_log, dt_bias):  # type: ignore[no-untyped-def]
    """The sum of log decays up to each row; rows that are not held do not decay."""
    step = tl.load(at_step, mask=held, other=0.0).to(tl.float32) + dt_bias
    return tl.cumsum(tl.where(held, -tl.exp(a_log) * softplus(step), 0.0), 0)


@jit_for_any("num_requests", "num_rows")
def prepare_kernel(  # type: ignore[no-untyped-def]
    qkv, a, b, a_log, dt_bias, query_starts, values, state_weights, products, factors, num_requests,
    num_rows, qkv_stride, a_stride, b_stride, NUM_HEADS: tl.constexpr, REPEATS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SCALE: tl.constexpr, CHUNK: tl.constexpr,
    LEVELS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (value head, chunk). Writes V to `values` `[T, H, VALUE_DIM]`, W to `state_weights` `[T, H,
    KEY_DIM]`, P to `products` `[T, H, CHUNK]`, and to `factors` float32 `[3, H, T]` by what the second kernel
    weighs rows of q S, rows of changes before they reach the state, and the state.
    """
    head, tile = tl.program_id(0), tl.program_id(1)
    request, first_tile = request_of_tile(tile, query_starts, num_requests, 0, CHUNK)
    start, end = tl.load(query_starts + request), tl.load(query_starts + request + 1)
    first = start + (tile - first_tile) * CHUNK
    if (end - start == 1) | (first >= end):
        return
    position, at_key, at_value = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    held = position < end - first
    in_key = held[:, None] & (at_key < KEY_DIM)[None, :]
    key_size: tl.constexpr = NUM_HEADS // REPEATS * KEY_DIM
    dtype: tl.constexpr = qkv.dtype.element_ty
    # Where a chunk begins in 64 bits, the rest in 32, and what is needed early is done with early: registers
    # are what a program lacks.
    row, rows = first.to(tl.int64), qkv + first.to(tl.int64) * qkv_stride
    at_query = rows + (position[:, None] * qkv_stride + (head // REPEATS) * KEY_DIM + at_key[None, :])
    key = tl.load(at_query + key_size, mask=in_key, other=0.0)
    of_key = _inverse_length(key)
    at_step = a + row * a_stride + head + position * a_stride
    total = _cumulated_decay(at_step, held, tl.load(a_log + head), tl.load(dt_bias + head))
    raw_beta = tl.load(b + row * b_stride + head + position * b_stride, mask=held, other=0.0)
    beta = tl.sigmoid(raw_beta.to(tl.float32))
    causal = position[:, None] >= position[None, :]
    decay = tl.exp(tl.where(causal, total[:, None] - total[None, :], float("-inf"))) * of_key[None, :]
    row_head, by_head = row * NUM_HEADS + head, position[:, None] * NUM_HEADS
    query = tl.load(at_query, mask=in_key, other=0.0)
    of_query = _inverse_length(query) * SCALE
    seen = tl.dot(query, tl.trans(key), input_precision=PRECISION) * decay * of_query[:, None]
    at_product = products + row_head * CHUNK + (by_head * CHUNK + position[None, :])
    tl.store(at_product, seen.to(dtype), mask=held[:, None])
    alike = tl.dot(key, tl.trans(key), input_precision=PRECISION) * decay * (beta * of_key)[:, None]
    strict = tl.where(position[:, None] > position[None, :], alike, 0.0)
    inverse = _unit_lower_inverse(strict, CHUNK, LEVELS, PRECISION)

    by_key = inverse * (beta * tl.exp(total) * of_key)[None, :]
    known = tl.dot(by_key.to(dtype), key, input_precision=PRECISION).to(dtype)
    tl.store(state_weights + row_head * KEY_DIM + (by_head * KEY_DIM + at_key[None, :]), known, mask=in_key)
    in_value = held[:, None] & (at_value < VALUE_DIM)[None, :]
    at_head = position[:, None] * qkv_stride + 2 * key_size + head * VALUE_DIM + at_value[None, :]
    value = tl.load(rows + at_head, mask=in_value, other=0.0)
    wanted = tl.dot((inverse * beta[None, :]).to(dtype), value, input_precision=PRECISION).to(dtype)
    tl.store(values + row_head * VALUE_DIM + (by_head * VALUE_DIM + at_value[None, :]), wanted, mask=in_value)
    kind = NUM_HEADS * num_rows.to(tl.int64)
    at_factor = factors + head.to(tl.int64) * num_rows + row + position
    tl.store(at_factor, tl.exp(total) * of_query, mask=held)
    tl.store(at_factor + kind, tl.exp(tl.min(total, 0) - total) * of_key, mask=held)
    tl.store(at_factor + 2 * kind, tl.exp(total), mask=held)


@jit_for_any("num_rows")
def scan_kernel(  # type: ignore[no-untyped-def]
    qkv, state_weights, products, factors, states, reads, writes, query_starts, values, num_rows,
    qkv_stride, NUM_HEADS: tl.constexpr, REPEATS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (block of columns, value head, request): columns of a state go their ways apart.

    The outputs take the place of V in `values`.
    """
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
    of_query, kind = factors + head.to(tl.int64) * num_rows, NUM_HEADS * num_rows.to(tl.int64)
    dtype: tl.constexpr = qkv.dtype.element_ty
    at_query = position[:, None] * qkv_stride + (head // REPEATS) * KEY_DIM + at_key[None, :]
    by_head = (position * NUM_HEADS + head)[:, None]
    for first in range(start, end, CHUNK):
        row, held = tl.full([], 0, tl.int64) + first, position < end - first
        in_rows, in_outputs = held[:, None] & in_key[None, :], held[:, None] & in_value[None, :]
        query = tl.load(qkv + row * qkv_stride + at_query, mask=in_rows, other=0.0)
        at_key_row = qkv + row * qkv_stride + NUM_HEADS // REPEATS * KEY_DIM + at_query
        key = tl.load(at_key_row, mask=in_rows, other=0.0)
        at_weight = state_weights + row * NUM_HEADS * KEY_DIM + (by_head * KEY_DIM + at_key[None, :])
        weights = tl.load(at_weight, mask=in_rows, other=0.0)
        at_product = products + row * NUM_HEADS * CHUNK + (by_head * CHUNK + position[None, :])
        product = tl.load(at_product, mask=held[:, None], other=0.0)
        at_output = values + row * NUM_HEADS * VALUE_DIM + (by_head * VALUE_DIM + at_value[None, :])
        wanted = tl.load(at_output, mask=in_outputs, other=0.0).to(tl.float32)
        # All loads come first, so that products hide them.
        at_factor = of_query + row + position
        of_output = tl.load(at_factor, mask=held, other=0.0)[:, None]
        of_change = tl.load(at_factor + kind, mask=held, other=0.0)[:, None]
        decay = tl.load(of_query + 2 * kind + tl.minimum(first + CHUNK, end) - 1)
        rounded = state.to(dtype)
        changes = wanted - tl.dot(weights, rounded, input_precision=PRECISION)
        output = tl.dot(query, rounded, input_precision=PRECISION) * of_output
        output += tl.dot(product, changes.to(dtype), input_precision=PRECISION)
        reached = (changes * of_change).to(dtype)
        state = state * decay + tl.dot(tl.trans(key), reached, input_precision=PRECISION)
        tl.store(at_output, output.to(dtype), mask=in_outputs)
    tl.store(states + tl.load(writes + request) * slot_size + at_state, state, mask=in_state)
