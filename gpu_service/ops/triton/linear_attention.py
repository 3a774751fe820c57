"""One token of linear attention: convolution, recurrence, gated norm; a launch each, slots as tensors.

So they can be captured in a graph: which slots a replay reads and writes is read from the device.
"""

from __future__ import annotations

import torch
import triton.language as tl

from gpu_service.ops.triton.jit import jit, next_power_of_2
from gpu_service.ops.triton.norm import rounded_norm

_CHANNELS = 256
# Columns of a head's state that a program has: with 128 rows, 32 registers in each of 128 threads.
_COLUMNS = 32


@jit
def causal_conv_update_kernel(
    rows_ptr: tl.tensor,
    states_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    reads_ptr: tl.tensor,
    writes_ptr: tl.tensor,
    output_ptr: tl.tensor,
    row_stride: int,
    channels: int,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATES: tl.constexpr,
) -> None:
    """Program (r, c) makes block c of request r: the sum, and the shifted inputs in the slot it writes."""
    request = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < channels
    before = states_ptr + tl.load(reads_ptr + request) * (WIDTH - 1) * channels + channel
    after = states_ptr + tl.load(writes_ptr + request) * (WIDTH - 1) * channels + channel
    newest = tl.load(rows_ptr + request * row_stride + channel, mask=mask, other=0.0)
    tap = tl.load(weight_ptr + channel * WIDTH + WIDTH - 1, mask=mask, other=0.0).to(tl.float32)
    total = newest.to(tl.float32) * tap
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    for position in tl.static_range(WIDTH - 1):
        value = tl.load(before + position * channels, mask=mask, other=0.0)
        tap = tl.load(weight_ptr + channel * WIDTH + position, mask=mask, other=0.0).to(tl.float32)
        total += value.to(tl.float32) * tap
        if position > 0:
            tl.store(after + (position - 1) * channels, value, mask=mask)
    tl.store(after + (WIDTH - 2) * channels, newest, mask=mask)
    if ACTIVATES:
        total = total * tl.sigmoid(total)
    tl.store(output_ptr + request * channels + channel, total.to(output_ptr.dtype.element_ty), mask=mask)


@jit
def softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + exp(x)), exact also where exp(x) is lost next to 1."""
    small = tl.exp(tl.minimum(x, 20.0))
    total = 1.0 + small
    lost = total - 1.0
    return tl.where(
        x > 20.0, x, small * tl.where(lost == 0.0, 1.0, tl.log(total) / tl.where(lost == 0.0, 1.0, lost))
    )


@jit
def unit(pointer: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Returns a head's query or key, of length 1."""
    values = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    return values / tl.sqrt(tl.sum(values * values, axis=0) + 1e-6)


@jit
def gated_delta_update_kernel(
    qkv_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    a_log_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    states_ptr: tl.tensor,
    reads_ptr: tl.tensor,
    writes_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    output_ptr: tl.tensor,
    qkv_stride: int,
    a_stride: int,
    b_stride: int,
    key_size: int,
    num_heads: int,
    repeats: int,
    key_dim: int,
    value_dim: int,
    query_scale: float,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_STARTS: tl.constexpr,
) -> None:
    """Program (r, h, c) has some columns of head h's state: they go their ways apart from one another.

    HAS_STARTS: the request's first row is in `starts`, and requests with more than one are left out.
    """
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    token = request
    if HAS_STARTS:
        token = tl.load(starts_ptr + request).to(tl.int64)
        if tl.load(starts_ptr + request + 1) - token > 1:
            return
    row = tl.arange(0, BLOCK_K)
    column = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_rows, in_columns = row < key_dim, column < value_dim
    heads = qkv_ptr + token * qkv_stride
    key_head = heads + (head // repeats) * key_dim + row
    query = unit(key_head, in_rows) * query_scale
    key = unit(key_head + key_size, in_rows)
    value = tl.load(heads + 2 * key_size + head * value_dim + column, mask=in_columns, other=0.0).to(
        tl.float32
    )
    step = tl.load(a_ptr + token * a_stride + head).to(tl.float32) + tl.load(dt_bias_ptr + head)
    decay = tl.exp(-tl.exp(tl.load(a_log_ptr + head)) * softplus(step))
    beta = tl.sigmoid(tl.load(b_ptr + token * b_stride + head).to(tl.float32))
    tile = head * key_dim * value_dim + row[:, None] * value_dim + column[None, :]
    slot_size = num_heads * key_dim * value_dim
    mask = in_rows[:, None] & in_columns[None, :]
    state = (
        tl.load(states_ptr + tl.load(reads_ptr + request) * slot_size + tile, mask=mask, other=0.0) * decay
    )
    change = beta * (value - tl.sum(key[:, None] * state, axis=0))
    state += key[:, None] * change[None, :]
    tl.store(states_ptr + tl.load(writes_ptr + request) * slot_size + tile, state, mask=mask)
    output = tl.sum(query[:, None] * state, axis=0).to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + (token * num_heads + head) * value_dim + column, output, mask=in_columns)


@jit
def gated_rms_norm_kernel(
    values_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    output_ptr: tl.tensor,
    num_heads: int,
    gate_stride: int,
    size: int,
    eps: float,
    BLOCK: tl.constexpr,
    SIGMOID: tl.constexpr,
) -> None:
    """A program takes one head of one row. SIGMOID: of the gate, and nothing is rounded before it."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    values = tl.load(values_ptr + program * size + column, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    gates = gate_ptr + (program // num_heads) * gate_stride + (program % num_heads) * size
    gate = tl.load(gates + column, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = output_ptr.dtype.element_ty
    if SIGMOID:
        scale = tl.rsqrt(tl.sum(values * values, axis=0) / size + eps)
        result = values * scale * weight.to(tl.float32) * tl.sigmoid(gate)
    else:
        normed = rounded_norm(values, weight, size, eps, dtype).to(tl.float32)
        result = normed * gate * tl.sigmoid(gate)
    tl.store(output_ptr + program * size + column, result.to(dtype), mask=mask)


def causal_conv_update(
    rows: torch.Tensor,
    states: torch.Tensor,
    weight: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    bias: torch.Tensor | None = None,
    activates: bool = True,
) -> torch.Tensor:
    requests, channels = rows.shape
    output = torch.empty_like(rows, memory_format=torch.contiguous_format)
    if requests:
        causal_conv_update_kernel[(requests, -(-channels // _CHANNELS))](
            rows,
            states,
            weight,
            weight if bias is None else bias,
            reads,
            writes,
            output,
            rows.stride(0),
            channels,
            WIDTH=weight.shape[1],
            BLOCK=_CHANNELS,
            HAS_BIAS=bias is not None,
            ACTIVATES=activates,
        )
    return output


def gated_delta_update(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
) -> torch.Tensor:
    output = torch.empty(qkv.shape[0], states.shape[1], states.shape[3], dtype=qkv.dtype, device=qkv.device)
    if qkv.shape[0]:
        launch_update(qkv, a, b, a_log, dt_bias, states, reads, writes, output)
    return output


def launch_update(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    output: torch.Tensor,
    starts: torch.Tensor | None = None,
) -> None:
    """The update into rows of `output`; starts int32 `[R + 1]`: of those requests only that have one row."""
    heads, key_dim, value_dim = states.shape[1:]
    key_size = (qkv.shape[1] - heads * value_dim) // 2
    columns = min(_COLUMNS, next_power_of_2(value_dim))
    gated_delta_update_kernel[(reads.shape[0], heads, -(-value_dim // columns))](
        qkv,
        a,
        b,
        a_log,
        dt_bias,
        states,
        reads,
        writes,
        reads if starts is None else starts,
        output,
        qkv.stride(0),
        a.stride(0),
        b.stride(0),
        key_size,
        heads,
        heads * key_dim // key_size,
        key_dim,
        value_dim,
        key_dim**-0.5,
        BLOCK_K=next_power_of_2(key_dim),
        BLOCK_V=columns,
        HAS_STARTS=starts is not None,
    )


def gated_rms_norm(
    values: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    return _gated_norm(values, gate, weight, eps, sigmoid=False)


def sigmoid_gated_rms_norm(
    values: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    return _gated_norm(values, gate, weight, eps, sigmoid=True)


def _gated_norm(
    values: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, sigmoid: bool
) -> torch.Tensor:
    tokens, heads, size = values.shape
    output = torch.empty(tokens, heads * size, dtype=values.dtype, device=values.device)
    if tokens:
        gated_rms_norm_kernel[(tokens * heads,)](
            values,
            gate,
            weight,
            output,
            heads,
            gate.stride(0),
            size,
            eps,
            BLOCK=next_power_of_2(size),
            SIGMOID=sigmoid,
            num_warps=1,
        )
    return output
