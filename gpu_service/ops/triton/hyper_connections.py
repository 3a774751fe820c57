"""Hyper-connections: one program turns a token's projection into weights and collapses its streams."""

from __future__ import annotations

import torch
import triton.language as tl

from gpu_service.ops.hyper_connections import Collapsed, project_streams
from gpu_service.ops.triton.jit import jit, next_power_of_2

_COLUMNS = 1024


@jit
def collapse_kernel(  # type: ignore[no-untyped-def]
    streams, mixed, base, scale, given, output, post_output, comb_output, pre_output, norm_eps, eps,
    magnitude, size, NUM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, ITERATIONS: tl.constexpr,
    LAGS: tl.constexpr,
):  # fmt: skip
    """Program (token). Streams that fill up a block of them weigh nothing. ITERATIONS 0: there is no comb.
    LAGS: the streams are collapsed with weights that are given.
    """
    token, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_N)
    held = at < NUM
    rows = streams + token * NUM * size
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, NUM * size, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(rows + column, mask=column < NUM * size, other=0.0).to(tl.float32)
        squares += value * value
    length = tl.rsqrt(tl.sum(squares, 0) / (NUM * size) + norm_eps)

    of_token = mixed + token * (2 * NUM if ITERATIONS == 0 else (2 + NUM) * NUM)
    pre = tl.load(of_token + at, mask=held, other=0.0) * length * tl.load(scale)
    pre = tl.sigmoid(pre + tl.load(base + at, mask=held, other=0.0)) + eps
    if LAGS:
        tl.store(pre_output + token * NUM + at, pre, mask=held)
        pre = tl.load(given + token * NUM + at, mask=held, other=0.0)
    post = tl.load(of_token + NUM + at, mask=held, other=0.0) * length * tl.load(scale + 1)
    post = magnitude * tl.sigmoid(post + tl.load(base + NUM + at, mask=held, other=0.0))
    if ITERATIONS == 0:
        post += eps
    tl.store(post_output + token * NUM + at, post, mask=held)
    if ITERATIONS > 0:
        cell, is_cell = at[:, None] * NUM + at[None, :], held[:, None] & held[None, :]
        comb = tl.load(of_token + 2 * NUM + cell, mask=is_cell, other=0.0) * length * tl.load(scale + 2)
        comb += tl.load(base + 2 * NUM + cell, mask=is_cell, other=0.0)
        comb = tl.where(is_cell, comb, float("-inf"))
        comb = tl.exp(comb - tl.max(tl.where(is_cell, comb, -1e30), 1)[:, None])
        comb = tl.where(is_cell, comb / tl.maximum(tl.sum(comb, 1), 1e-30)[:, None] + eps, 0.0)
        comb = comb / (tl.sum(comb, 0)[None, :] + eps)
        for _ in range(ITERATIONS - 1):
            comb = comb / (tl.sum(comb, 1)[:, None] + eps)
            comb = comb / (tl.sum(comb, 0)[None, :] + eps)
        tl.store(comb_output + token * NUM * NUM + cell, comb, mask=is_cell)

    for first in range(0, size, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = held[:, None] & (column < size)[None, :]
        tile = tl.load(rows + at[:, None] * size + column[None, :], mask=inside, other=0.0).to(tl.float32)
        result = tl.sum(tile * pre[:, None], 0).to(output.dtype.element_ty)
        tl.store(output + token * size + column, result, mask=column < size)


@jit
def mix_kernel(  # type: ignore[no-untyped-def]
    update, streams, post, comb, size, update_stride, NUM: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr, MIXES: tl.constexpr,
):  # fmt: skip
    """Program (token, block of columns). Without MIXES, streams keep what they have."""
    token, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_N)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held, inside = at < NUM, column < size
    rows = streams + token * NUM * size
    output = tl.load(update + token * update_stride + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(post + token * NUM + at, mask=held, other=0.0)[:, None] * output[None, :]
    at_stream, is_stream = rows + at[:, None] * size + column[None, :], held[:, None] & inside[None, :]
    if MIXES:
        for index in tl.static_range(NUM):
            weight = tl.load(comb + (token * NUM + index) * NUM + at, mask=held, other=0.0)
            value = tl.load(rows + index * size + column, mask=inside, other=0.0).to(tl.float32)
            total += weight[:, None] * value[None, :]
    else:
        total += tl.load(at_stream, mask=is_stream, other=0.0).to(tl.float32)
    # All streams' columns have been read: they may be written.
    tl.store(at_stream, total.to(streams.dtype.element_ty), mask=is_stream)


def collapse_streams(
    streams: torch.Tensor,
    projection: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
    magnitude: float = 2.0,
    given: torch.Tensor | None = None,
) -> Collapsed:
    tokens, num, size = streams.shape
    output = torch.empty(tokens, size, dtype=streams.dtype, device=streams.device)
    post = torch.empty(tokens, num, dtype=torch.float32, device=streams.device)
    mixes = num if iterations else 0
    comb = torch.empty(tokens, mixes, mixes, dtype=torch.float32, device=streams.device)
    pre = torch.empty(0, dtype=torch.float32, device=streams.device)
    if given is not None:
        pre = torch.empty_like(post)
    if tokens:
        mixed = project_streams(streams, projection)
        collapse_kernel[(tokens,)](
            streams, mixed, base, scale, given if given is not None else pre, output, post, comb, pre,
            norm_eps, eps, magnitude, size, NUM=num, BLOCK_N=next_power_of_2(num), BLOCK=_COLUMNS,
            ITERATIONS=iterations, LAGS=given is not None,
        )  # fmt: skip
    return Collapsed(output, post, comb, pre)


def mix_streams(
    update: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    tokens, num, size = streams.shape
    if tokens:
        mix_kernel[(tokens, -(-size // _COLUMNS))](
            update, streams, post, comb, size, update.stride(0), NUM=num, BLOCK_N=next_power_of_2(num),
            BLOCK=_COLUMNS, MIXES=comb.shape[1] > 0,
        )  # fmt: skip
    return streams
