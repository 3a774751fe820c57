"""Gated residual streams: a program for a stream's norm, or for some columns of all streams of a token."""

from __future__ import annotations

import torch
import triton.language as tl

from gpu_service.ops.triton.jit import jit, next_power_of_2, num_warps
from gpu_service.ops.triton.norm import rounded_norm

_COLUMNS = 1024


@jit
def norm_streams_kernel(  # type: ignore[no-untyped-def]
    streams, weight, output, size, eps, NUM: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (token and stream)."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = column < size
    values = tl.load(streams + row * size + column, mask=mask, other=0.0).to(tl.float32)
    own = tl.load(weight + (row % NUM) * size + column, mask=mask, other=0.0)
    tl.store(output + row * size + column,
             rounded_norm(values, own, size, eps, output.dtype.element_ty), mask=mask)  # fmt: skip


@jit
def mix_gated_kernel(  # type: ignore[no-untyped-def]
    mix, normed, output, size, NUM: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (token, block of columns)."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    total = tl.zeros([BLOCK], tl.float32)
    for stream in tl.static_range(NUM):
        at = (token * NUM + stream) * size + column
        weight = tl.sigmoid(tl.load(mix + at, mask=mask, other=0.0).to(tl.float32))
        total += weight * tl.load(normed + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + token * size + column, (total / NUM).to(output.dtype.element_ty), mask=mask)


@jit
def inject_kernel(  # type: ignore[no-untyped-def]
    update, streams, inject, size, update_stride, inject_stride, NUM: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (token, block of columns)."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    added = tl.load(update + token * update_stride + column, mask=mask, other=0.0).to(tl.float32)
    for stream in tl.static_range(NUM):
        weight = 2 * tl.sigmoid(tl.load(inject + token * inject_stride + stream).to(tl.float32) / NUM)
        at = streams + (token * NUM + stream) * size + column
        total = tl.load(at, mask=mask, other=0.0).to(tl.float32) + weight * added
        tl.store(at, total.to(streams.dtype.element_ty), mask=mask)


@jit
def gate_values_kernel(  # type: ignore[no-untyped-def]
    keys, streams, values, key_weight, query_weight, output, size, key_stride, value_stride, eps, score_scale,
    NUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (token and stream)."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask, stream = column < size, (row % NUM) * size + column
    at_key = keys + (row // NUM) * key_stride + stream
    key = tl.load(at_key, mask=mask, other=0.0).to(tl.float32)
    query = tl.load(streams + row * size + column, mask=mask, other=0.0).to(tl.float32)
    key = (
        key / tl.sqrt(tl.sum(key * key, 0) / size + eps) * tl.load(key_weight + stream, mask=mask, other=0.0)
    )
    query = query / tl.sqrt(tl.sum(query * query, 0) / size + eps)
    query *= tl.load(query_weight + stream, mask=mask, other=0.0)
    score = tl.sum(key * query, 0) * score_scale
    root = tl.sqrt(tl.maximum(tl.abs(score), 1e-6))
    gate = tl.sigmoid(tl.where(score > 0, root, tl.where(score < 0, -root, 0.0)))
    value = tl.load(values + (row // NUM) * value_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + row * size + column, (gate * value).to(output.dtype.element_ty), mask=mask)


def norm_streams(streams: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    tokens, num, size = streams.shape
    output, block = torch.empty_like(streams), next_power_of_2(size)
    if tokens:
        norm_streams_kernel[(tokens * num,)](
            streams, weight, output, size, eps, NUM=num, BLOCK=block, num_warps=num_warps(block)
        )
    return output


def mix_gated_streams(mix: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    tokens, num, size = normed.shape
    output = torch.empty(tokens, size, dtype=normed.dtype, device=normed.device)
    if tokens:
        grid = (tokens, -(-size // _COLUMNS))
        mix_gated_kernel[grid](mix, normed, output, size, NUM=num, BLOCK=_COLUMNS)
    return output


def inject_update(update: torch.Tensor, streams: torch.Tensor, inject: torch.Tensor) -> torch.Tensor:
    tokens, num, size = streams.shape
    if tokens:
        inject_kernel[(tokens, -(-size // _COLUMNS))](
            update, streams, inject, size, update.stride(0), inject.stride(0), NUM=num, BLOCK=_COLUMNS
        )
    return streams


def gate_values(
    keys: torch.Tensor,
    streams: torch.Tensor,
    values: torch.Tensor,
    key_weight: torch.Tensor,
    query_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    tokens, num, size = streams.shape
    output, block = torch.empty_like(streams), next_power_of_2(size)
    # Both are parts of one product's columns.
    assert keys.stride()[1:] == (size, 1)
    if tokens:
        gate_values_kernel[(tokens * num,)](
            keys, streams, values, key_weight, query_weight, output, size, keys.stride(0), values.stride(0),
            eps, size**-0.5, NUM=num, BLOCK=block, num_warps=num_warps(block),
        )  # fmt: skip
    return output
