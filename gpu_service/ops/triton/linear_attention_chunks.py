"""Linear attention of a mixed step: convolution and delta rule, all requests' rows in the same launches.

Rows are cut into tiles none of which holds rows of two requests; nothing is prepared on the host. Of the
delta rule, single tokens take one launch, chunks of several tokens two more: `prepare_kernel` computes what a
chunk's tokens do to one another, all chunks side by side; `scan_kernel` carries each state from chunk to
chunk. With G the sum of a chunk's log decays, S the state before it, and as in section 3.3 of the source of
`ops.linear_attention` the inverse T of

    I + strictly lower part of (beta_i exp(G_i - G_j) k_i . k_j)

the first makes V = T (beta v), W = T (beta exp(G) k), P = causal part of (exp(G_i - G_j) q_i . k_j), and
the second changes = V - W S, outputs = exp(G) q S + P changes, and of the next chunk
S = exp(G_last) S + (exp(G_last - G) k)^T changes.

GEMMs take the rows' own dtype (float32, and float16 as float32: exactly) and sum in float32, where states
stay. Queries and keys enter them as they come: their lengths are factors of rows and columns of the results.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from gpu_service.device.limits import DeviceLimits, device_limits
from gpu_service.ops.linear_attention import CHUNK, Sequences
from gpu_service.ops.triton.jit import jit, jit_for_any, launch_fitting, next_power_of_2
from gpu_service.ops.triton.linear_attention import launch_update, softplus


@jit
def request_of_tile(tile, query_starts, num_requests, first_row, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Finds a tile's request among the rows from `first_row` on, and where in these rows its tiles begin.

    Returns the last request whose first tile is not after `tile`, by bisection, and that first tile. Request
    r owns tiles from start // ROWS + r on: at least as many as it needs, because rounding down loses less
    than one tile per request. The rows of R requests are in rows // ROWS + R tiles, some of them empty.
    """
    low, high = 0, num_requests
    while low < high:
        middle = (low + high) // 2
        if tl.maximum(tl.load(query_starts + middle) - first_row, 0) // ROWS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    request = low - 1
    start = tl.maximum(tl.load(query_starts + request) - first_row, 0)
    return request, start // ROWS + request


def num_row_tiles(num_rows: int, num_requests: int, rows: int) -> int:
    """Returns the number of tiles that these rows take, the empty ones included."""
    return num_rows // rows + num_requests


# Rows and channels of a program; a row is read by `width` programs' rows, out of the cache but once.
_ROWS, _CHANNELS = 16, 128


@jit_for_any("num_requests")
def causal_conv_extend_kernel(  # type: ignore[no-untyped-def]
    rows, states, weight, bias, reads, writes, query_starts, output, num_requests, row_stride, channels,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATES: tl.constexpr,
):  # fmt: skip
    """Program (block of channels, tile of a request's rows). Who has a request's last rows, or where there
    are fewer of them than a state holds its first one, writes that part of the state.
    """
    tile, channel = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request, first_tile = request_of_tile(tile, query_starts, num_requests, 0, ROWS)
    start = tl.load(query_starts + request)
    length = tl.load(query_starts + request + 1) - start
    first = (tile - first_tile) * ROWS
    if first >= length:
        return
    inside = channel < channels
    local = first + tl.arange(0, ROWS)
    held = (local < length)[:, None] & inside[None, :]
    before = states + tl.load(reads + request) * (WIDTH - 1) * channels + channel
    after = states + tl.load(writes + request) * (WIDTH - 1) * channels + channel
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    for position in tl.static_range(WIDTH):
        source = local + (position - WIDTH + 1)
        earlier = (source < 0)[:, None]
        at_row = rows + (start + source).to(tl.int64)[:, None] * row_stride + channel[None, :]
        value = tl.load(at_row, mask=held & (source >= 0)[:, None], other=0.0).to(tl.float32)
        at_state = before[None, :] + (source + WIDTH - 1)[:, None] * channels
        value += tl.load(at_state, mask=held & earlier, other=0.0).to(tl.float32)
        tap = tl.load(weight + channel * WIDTH + position, mask=inside, other=0.0).to(tl.float32)
        total += value * tap[None, :]
        if position == WIDTH - 1:
            # The newest inputs, where they are in the state: the last row's at its end.
            place = local - length + WIDTH - 1
            newest = value.to(states.dtype.element_ty)
            tl.store(after[None, :] + place[:, None] * channels, newest, mask=held & (place >= 0)[:, None])
    if ACTIVATES:
        total = total * tl.sigmoid(total)
    result = total.to(output.dtype.element_ty)
    at_output = output + (start + local).to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(at_output, result, mask=held)
    if first == 0:
        for index in tl.static_range(WIDTH - 1):
            kept = inside & (index + length < WIDTH - 1)
            shifted = tl.load(before + (index + length) * channels, mask=kept, other=0.0)
            tl.store(after + index * channels, shifted, mask=kept)


def causal_conv_extend(
    rows: torch.Tensor,
    states: torch.Tensor,
    weight: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    sequences: Sequences,
    bias: torch.Tensor | None = None,
    activates: bool = True,
) -> torch.Tensor:
    (num_rows, channels), num_requests = rows.shape, reads.shape[0]
    output = torch.empty_like(rows, memory_format=torch.contiguous_format)
    causal_conv_extend_kernel[(-(-channels // _CHANNELS), num_row_tiles(num_rows, num_requests, _ROWS))](
        rows, states, weight, weight if bias is None else bias, reads, writes, sequences.starts, output,
        num_requests, rows.stride(0), channels, WIDTH=weight.shape[1], ROWS=_ROWS, BLOCK=_CHANNELS,
        HAS_BIAS=bias is not None, ACTIVATES=activates,
    )  # fmt: skip
    return output


@jit
def unit_lower_inverse(  # type: ignore[no-untyped-def]
    strict, CHUNK: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr
):
    """Returns (I + strict)^-1, strict `[CHUNK, CHUNK]` being strictly lower triangular; CHUNK = 2^LEVELS.

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
    """Returns the sum of log decays up to each row; rows that are not held do not decay."""
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
    inverse = unit_lower_inverse(strict, CHUNK, LEVELS, PRECISION)

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
        # All loads come first, so that GEMMs hide them.
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


# What a program of the first kernel holds of a head; no model's heads are larger.
MAX_HEAD_DIM = 128
# One request alone should fill the device, however many columns of a state its programs carry then.
_WANTED_PROGRAMS, _MAX_COLUMNS, _FEW_COLUMNS = 128, 64, 32
# A GEMM on tensor cores has at least this many of everything.
MIN_BLOCK = 16


def supports_extend(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    *_: object,
) -> bool:
    """Returns whether heads are so small that a program can hold what it needs of them."""
    return max(states.shape[2:]) <= MAX_HEAD_DIM


class _Tile(NamedTuple):
    """What a program holds at a time; powers of two. Filled by `_tiles`."""

    chunk: int
    columns: int  # Of a state, carried along a request by one program.
    # Of the scan: with 3, one chunk is read while another one is computed.
    num_stages: int
    num_warps: int


def _tiles(dtype: torch.dtype, value_heads: int, value_dim: int, limits: DeviceLimits) -> tuple[_Tile, ...]:
    """Returns tiles for a type of rows and the sizes of a model, best first: it takes one variant of each
    kernel.
    """
    if dtype == torch.float32:
        # No tensor cores: what a GEMM takes is in registers, and as many instructions as sums.
        return (_Tile(MIN_BLOCK, MIN_BLOCK, 1, 4),)
    fitting = next_power_of_2(value_heads * value_dim // _WANTED_PROGRAMS)
    fitting = max(MIN_BLOCK, min(fitting, _MAX_COLUMNS, next_power_of_2(value_dim)))
    few = min(fitting, _FEW_COLUMNS)
    smaller = (_Tile(CHUNK, few, 3, 8), _Tile(CHUNK, few, 2, 8), _Tile(CHUNK, few, 1, 8))
    if not limits.multiplies_from_shared_memory:
        # Both operands of a GEMM pass through registers: more columns would not stay in them.
        return *smaller, _Tile(CHUNK, MIN_BLOCK, 1, 4)
    return _Tile(CHUNK, fitting, 3, 4), _Tile(CHUNK, fitting, 2, 4), *smaller


def gated_delta_extend(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    """Computes `ops.linear_attention.gated_delta_extend`; single tokens are one launch of the update's
    kernel.
    """
    num_rows, (_, heads, _, value_dim), dtype = qkv.shape[0], states.shape, qkv.dtype
    if dtype == torch.float16:
        # Rounded to float16 or TF32 between its GEMMs, a chunk would be some times less exact than its rows.
        qkv = qkv.float()
    output = torch.empty(num_rows, heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    # Each leaves the other's requests out. Both are launched in any step, so that the first one compiles all.
    launch_update(qkv, a, b, a_log, dt_bias, states, reads, writes, output, sequences.starts)
    _launch_chunks(qkv, (a, b, a_log, dt_bias), states, reads, writes, output, sequences.starts)
    return output.to(dtype)


def _launch_chunks(
    qkv: torch.Tensor,
    gates: tuple[torch.Tensor, ...],
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    output: torch.Tensor,
    starts: torch.Tensor,
) -> None:
    num_rows, num_requests, (heads, key_dim, value_dim) = qkv.shape[0], reads.shape[0], states.shape[1:]
    tiles = _tiles(qkv.dtype, heads, value_dim, device_limits(qkv.device))
    (chunk,) = {tile.chunk for tile in tiles}
    state_weights = torch.empty(num_rows, heads, key_dim, dtype=qkv.dtype, device=qkv.device)
    products = torch.empty(num_rows, heads, chunk, dtype=qkv.dtype, device=qkv.device)
    factors = torch.empty(3, heads, num_rows, dtype=torch.float32, device=qkv.device)
    a, b, a_log, dt_bias = gates
    sizes: dict[str, object] = {
        "NUM_HEADS": heads,
        "REPEATS": 2 * heads * key_dim // (qkv.shape[1] - heads * value_dim),
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "CHUNK": chunk,
        "BLOCK_K": max(MIN_BLOCK, next_power_of_2(key_dim)),
        "PRECISION": "ieee" if qkv.dtype == torch.float32 else "tf32",
    }
    prepare_kernel[(heads, num_row_tiles(num_rows, num_requests, chunk))](
        qkv, a, b, a_log, dt_bias, starts, output, state_weights, products, factors, num_requests, num_rows,
        qkv.stride(0), a.stride(0), b.stride(0), SCALE=key_dim**-0.5, LEVELS=chunk.bit_length() - 1,
        BLOCK_V=max(MIN_BLOCK, next_power_of_2(value_dim)), **sizes,
    )  # fmt: skip

    def scan(tile: _Tile) -> None:
        scan_kernel[(-(-value_dim // tile.columns), heads, num_requests)](
            qkv, state_weights, products, factors, states, reads, writes, starts, output, num_rows,
            qkv.stride(0), BLOCK_V=tile.columns, num_stages=tile.num_stages, num_warps=tile.num_warps,
            **sizes,
        )  # fmt: skip

    launch_fitting("scan", (qkv.dtype, *sizes.values()), qkv.device, tiles, scan)
