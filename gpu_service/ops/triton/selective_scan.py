"""Mamba's recurrence: a program carries the states of some channels over a request's tokens, in registers.

Channels go their ways apart from one another, and only the states of a token wait for those of the one
before it: what it reads does not.
"""

from __future__ import annotations

import torch
import triton.language as tl

from gpu_service.ops.linear_attention import Sequences
from gpu_service.ops.triton.jit import jit, next_power_of_2
from gpu_service.ops.triton.linear_attention import softplus

# Channels of a program, one warp: with 16 states each, 16 registers in each of 32 threads.
_CHANNELS = 32


@jit
def _token(  # type: ignore[no-untyped-def]
    state, x, dt, b, c, gate, a, skip, output, row, channel, at_state, in_channel, in_state,
    x_stride, dt_stride, b_stride, c_stride, gate_stride, NUM_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Returns the state [BLOCK_C, BLOCK_S] after a row, whose output is stored."""
    values = tl.load(x + row * x_stride + channel, mask=in_channel, other=0.0).to(tl.float32)
    step = tl.load(dt + row * dt_stride + channel, mask=in_channel, other=0.0).to(tl.float32)
    gates = tl.load(gate + row * gate_stride + channel, mask=in_channel, other=0.0).to(tl.float32)
    write = tl.load(b + row * b_stride + at_state, mask=in_state, other=0.0).to(tl.float32)
    read = tl.load(c + row * c_stride + at_state, mask=in_state, other=0.0).to(tl.float32)
    step = softplus(step)
    state = state * tl.exp(step[:, None] * a) + write[None, :] * (step * values)[:, None]
    result = (tl.sum(state * read[None, :], axis=1) + skip * values) * gates * tl.sigmoid(gates)
    at_output = output + row * NUM_CHANNELS + channel
    tl.store(at_output, result.to(output.dtype.element_ty), mask=in_channel)
    return state


@jit
def selective_scan_kernel(  # type: ignore[no-untyped-def]
    x, dt, b, c, gate, a_log, d, states, reads, writes, query_starts, output,
    x_stride, dt_stride, b_stride, c_stride, gate_stride,
    NUM_CHANNELS: tl.constexpr, STATE_DIM: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
    EXTENDS: tl.constexpr,
):  # fmt: skip
    """Program (block of channels, request). EXTENDS: of rows that `query_starts` gives, else of one row."""
    request = tl.program_id(1)
    at_state, channel = tl.arange(0, BLOCK_S), tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_state, in_channel = at_state < STATE_DIM, channel < NUM_CHANNELS
    tile = channel[:, None] * STATE_DIM + at_state[None, :]
    mask = in_channel[:, None] & in_state[None, :]
    slot_size: tl.constexpr = NUM_CHANNELS * STATE_DIM
    state = tl.load(states + tl.load(reads + request) * slot_size + tile, mask=mask, other=0.0)
    a = -tl.exp(tl.load(a_log + tile, mask=mask, other=0.0))
    skip = tl.load(d + channel, mask=in_channel, other=0.0)
    if EXTENDS:
        start, end = tl.load(query_starts + request), tl.load(query_starts + request + 1)
        for number in range(start, end):
            state = _token(
                state, x, dt, b, c, gate, a, skip, output, tl.full([], 0, tl.int64) + number, channel,
                at_state, in_channel, in_state, x_stride, dt_stride, b_stride, c_stride, gate_stride,
                NUM_CHANNELS,
            )  # fmt: skip
    else:
        state = _token(
            state, x, dt, b, c, gate, a, skip, output, request.to(tl.int64), channel, at_state, in_channel,
            in_state, x_stride, dt_stride, b_stride, c_stride, gate_stride, NUM_CHANNELS,
        )  # fmt: skip
    tl.store(states + tl.load(writes + request) * slot_size + tile, state, mask=mask)


def _scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gate: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    starts: torch.Tensor | None,
) -> torch.Tensor:
    channels, state_dim = a_log.shape
    output, requests = torch.empty(x.shape, dtype=x.dtype, device=x.device), reads.shape[0]
    if requests:
        block = min(_CHANNELS, next_power_of_2(channels))
        selective_scan_kernel[(-(-channels // block), requests)](
            x, dt, b, c, gate, a_log, d, states, reads, writes, reads if starts is None else starts, output,
            x.stride(0), dt.stride(0), b.stride(0), c.stride(0), gate.stride(0), NUM_CHANNELS=channels,
            STATE_DIM=state_dim, BLOCK_C=block, BLOCK_S=next_power_of_2(state_dim),
            EXTENDS=starts is not None, num_warps=1,
        )  # fmt: skip
    return output


def selective_scan_update(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gate: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
) -> torch.Tensor:
    return _scan(x, dt, b, c, gate, a_log, d, states, reads, writes, None)


def selective_scan_extend(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gate: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    return _scan(x, dt, b, c, gate, a_log, d, states, reads, writes, sequences.starts)
