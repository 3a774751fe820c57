"""Mamba-2's recurrence: a token of each request in one launch, and chunks of all requests in another.

GEMMs of chunks are computed in tensor cores' float32 (float32 rows: exactly), states stay in float32. A
program carries some columns of a head's state from chunk to chunk: columns go their ways apart from one
another.
"""

from __future__ import annotations

import torch
import triton.language as tl

from gpu_service.ops.linear_attention import CHUNK, Sequences
from gpu_service.ops.triton.jit import jit, next_power_of_2, num_warps
from gpu_service.ops.triton.linear_attention import softplus
from gpu_service.ops.triton.linear_attention_chunks import MIN_BLOCK

# Columns of a head's state that a program has: with 128 rows, 32 registers in each of 128 threads.
_COLUMNS = 32


@jit
def state_space_update_kernel(  # type: ignore[no-untyped-def]
    xbc, dt, a_log, dt_bias, d, states, reads, writes, output, xbc_stride, dt_stride,
    GROUP_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, REPEATS: tl.constexpr, STATE_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (request, head, block of columns). GROUP_SIZE: columns of B, or of C, of all groups."""
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at_state, column = tl.arange(0, BLOCK_S), tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_state, in_column = at_state < STATE_DIM, column < HEAD_DIM
    row = xbc + request * xbc_stride
    x = tl.load(row + head * HEAD_DIM + column, mask=in_column, other=0.0).to(tl.float32)
    at_group = row + NUM_HEADS * HEAD_DIM + (head // REPEATS) * STATE_DIM + at_state
    write = tl.load(at_group, mask=in_state, other=0.0).to(tl.float32)
    read = tl.load(at_group + GROUP_SIZE, mask=in_state, other=0.0).to(tl.float32)
    step = softplus(tl.load(dt + request * dt_stride + head).to(tl.float32) + tl.load(dt_bias + head))
    decay = tl.exp(-tl.exp(tl.load(a_log + head)) * step)
    tile = (head * STATE_DIM + at_state[:, None]) * HEAD_DIM + column[None, :]
    slot_size: tl.constexpr = NUM_HEADS * STATE_DIM * HEAD_DIM
    mask = in_state[:, None] & in_column[None, :]
    state = tl.load(states + tl.load(reads + request) * slot_size + tile, mask=mask, other=0.0) * decay
    state += write[:, None] * (step * x)[None, :]
    tl.store(states + tl.load(writes + request) * slot_size + tile, state, mask=mask)
    result = tl.sum(read[:, None] * state, axis=0) + tl.load(d + head) * x
    at_output = output + (request * NUM_HEADS + head) * HEAD_DIM + column
    tl.store(at_output, result, mask=in_column)


@jit
def state_space_extend_kernel(  # type: ignore[no-untyped-def]
    xbc, dt, a_log, dt_bias, d, states, reads, writes, query_starts, output, xbc_stride, dt_stride,
    GROUP_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, REPEATS: tl.constexpr, STATE_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (block of columns, head, request)."""
    head, request = tl.program_id(1), tl.program_id(2)
    start, end = tl.load(query_starts + request), tl.load(query_starts + request + 1)
    position, at_state = tl.arange(0, CHUNK), tl.arange(0, BLOCK_S)
    column = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_state, in_column = at_state < STATE_DIM, column < HEAD_DIM
    tile = (head * STATE_DIM + at_state[:, None]) * HEAD_DIM + column[None, :]
    slot_size: tl.constexpr = NUM_HEADS * STATE_DIM * HEAD_DIM
    mask = in_state[:, None] & in_column[None, :]
    state = tl.load(states + tl.load(reads + request) * slot_size + tile, mask=mask, other=0.0)
    a, bias, skip = -tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head), tl.load(d + head)
    causal = position[:, None] >= position[None, :]
    at_x = position[:, None] * xbc_stride + head * HEAD_DIM + column[None, :]
    at_group = NUM_HEADS * HEAD_DIM + (head // REPEATS) * STATE_DIM + at_state
    at_write = position[:, None] * xbc_stride + at_group[None, :]
    for first in range(start, end, CHUNK):
        row, held = tl.full([], 0, tl.int64) + first, position < end - first
        rows = xbc + row * xbc_stride
        in_rows, in_outputs = held[:, None] & in_state[None, :], held[:, None] & in_column[None, :]
        x = tl.load(rows + at_x, mask=in_outputs, other=0.0).to(tl.float32)
        write = tl.load(rows + at_write, mask=in_rows, other=0.0).to(tl.float32)
        read = tl.load(rows + at_write + GROUP_SIZE, mask=in_rows, other=0.0).to(tl.float32)
        raw = tl.load(dt + row * dt_stride + position * dt_stride + head, mask=held, other=0.0)
        # Rows that are not held neither decay nor write.
        step = tl.where(held, softplus(raw.to(tl.float32) + bias), 0.0)
        total = tl.cumsum(step * a, 0)
        last = tl.min(total, 0)
        value = x * step[:, None]
        seen = tl.dot(read, tl.trans(write), input_precision=PRECISION)
        seen *= tl.exp(tl.where(causal, total[:, None] - total[None, :], float("-inf")))
        result = tl.dot(read, state, input_precision=PRECISION) * tl.exp(total)[:, None]
        result += tl.dot(seen, value, input_precision=PRECISION) + skip * x
        reached = value * tl.exp(last - total)[:, None]
        state = state * tl.exp(last) + tl.dot(tl.trans(write), reached, input_precision=PRECISION)
        at_output = ((row + position) * NUM_HEADS + head)[:, None] * HEAD_DIM + column[None, :]
        tl.store(output + at_output, result, mask=in_outputs)
    tl.store(states + tl.load(writes + request) * slot_size + tile, state, mask=mask)


@jit
def gated_group_rms_norm_kernel(  # type: ignore[no-untyped-def]
    values, gate, weight, output, gate_stride, num_groups, size, eps, BLOCK: tl.constexpr
):  # fmt: skip
    """A program takes one group of one row."""
    program, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    row, group = program // num_groups, program % num_groups
    mask, inside = column < size, group * size + column
    gates = tl.load(gate + row * gate_stride + inside, mask=mask, other=0.0).to(tl.float32)
    gated = tl.load(values + program * size + column, mask=mask, other=0.0).to(tl.float32)
    gated *= gates * tl.sigmoid(gates)
    scale = 1.0 / tl.sqrt(tl.sum(gated * gated, axis=0) / size + eps)
    normed = gated * scale * tl.load(weight + inside, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + program * size + column, normed.to(output.dtype.element_ty), mask=mask)


def gated_group_rms_norm(
    values: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, num_groups: int, eps: float
) -> torch.Tensor:
    (tokens, columns), output = values.shape, torch.empty_like(values, dtype=weight.dtype)
    if tokens:
        block = next_power_of_2(columns // num_groups)
        gated_group_rms_norm_kernel[(tokens * num_groups,)](
            values, gate, weight, output, gate.stride(0), num_groups, columns // num_groups, eps,
            BLOCK=block, num_warps=num_warps(block),
        )  # fmt: skip
    return output


def _sizes(xbc: torch.Tensor, states: torch.Tensor) -> dict[str, int]:
    heads, state_dim, head_dim = states.shape[1:]
    group_size = (xbc.shape[1] - heads * head_dim) // 2
    return {
        "GROUP_SIZE": group_size,
        "NUM_HEADS": heads,
        "REPEATS": heads * state_dim // group_size,
        "STATE_DIM": state_dim,
        "HEAD_DIM": head_dim,
    }


def state_space_update(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
) -> torch.Tensor:
    requests, (heads, state_dim, head_dim) = xbc.shape[0], states.shape[1:]
    output = torch.empty(requests, heads, head_dim, dtype=torch.float32, device=xbc.device)
    columns = min(_COLUMNS, next_power_of_2(head_dim))
    if requests:
        state_space_update_kernel[(requests, heads, -(-head_dim // columns))](
            xbc, dt, a_log, dt_bias, d, states, reads, writes, output, xbc.stride(0), dt.stride(0),
            **_sizes(xbc, states), BLOCK_S=next_power_of_2(state_dim), BLOCK_D=columns,
        )  # fmt: skip
    return output


def state_space_extend(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    # TF32 has as many digits as float16, so that each GEMM would add as much as the rows' own rounding.
    (_, heads, state_dim, head_dim), is_exact = states.shape, xbc.dtype != torch.bfloat16
    output = torch.empty(xbc.shape[0], heads, head_dim, dtype=torch.float32, device=xbc.device)
    # Without tensor cores, what a GEMM takes is in registers, and as many instructions as sums.
    columns = MIN_BLOCK if is_exact else max(MIN_BLOCK, min(_COLUMNS, next_power_of_2(head_dim)))
    state_space_extend_kernel[(-(-head_dim // columns), heads, reads.shape[0])](
        xbc, dt, a_log, dt_bias, d, states, reads, writes, sequences.starts, output, xbc.stride(0),
        dt.stride(0), **_sizes(xbc, states), CHUNK=MIN_BLOCK if is_exact else CHUNK,
        BLOCK_S=max(MIN_BLOCK, next_power_of_2(state_dim)), BLOCK_D=columns,
        # Tiles of 128 states leave four warps too few registers.
        PRECISION="ieee" if is_exact else "tf32", num_warps=8 if state_dim > 64 and not is_exact else 4,
    )  # fmt: skip
    return output
