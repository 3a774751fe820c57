"""Rotary embedding: the step's table, and rotation in place.

The two elements of pair j are `j * step` and `j * step + distance`: (1, rotary_dim / 2) for half-split
pairs, (2, 1) for interleaved ones. A thread owns both, so that rotating in place is safe.
"""

from __future__ import annotations

import torch
import triton.language as tl

from gpu_service.ops.rope import RopeTable, pair_positions
from gpu_service.ops.triton.jit import jit, next_power_of_2

# Heads a program takes once there are enough tokens to fill the device with one head a program.
_HEADS_PER_PROGRAM = 4
_MANY_TOKENS = 64


@jit
def rope_table_kernel(
    positions_ptr: tl.tensor,
    frequencies_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    num_pairs: int,
    token_stride: int,
    pair_stride: int,
    attention_factor: float,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One token per program; every angle at both elements of its pair, the sine negative at the first.

    Pairs that share a position are a `pair_stride` of 0 apart.
    """
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    mask = pair < num_pairs
    at = positions_ptr + token * token_stride + pair * pair_stride
    position = tl.load(at, mask=mask, other=0).to(tl.float32)
    angle = position * tl.load(frequencies_ptr + pair, mask=mask, other=0.0)
    cos, sin = tl.cos(angle) * attention_factor, tl.sin(angle) * attention_factor
    first = token * 2 * num_pairs + pair * STEP
    second = first + (num_pairs if STEP == 1 else 1)
    dtype: tl.constexpr = cos_ptr.dtype.element_ty
    tl.store(cos_ptr + first, cos.to(dtype), mask=mask)
    tl.store(cos_ptr + second, cos.to(dtype), mask=mask)
    tl.store(sin_ptr + first, (-sin).to(dtype), mask=mask)
    tl.store(sin_ptr + second, sin.to(dtype), mask=mask)


@jit
def apply_rope_kernel(
    heads_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    num_heads: int,
    num_pairs: int,
    row_stride: int,
    head_stride: int,
    STEP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (t, g) rotates `HEADS` heads of token t in place."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    mask = (head < num_heads) & (pair < num_pairs)
    first = pair * STEP
    second = first + (num_pairs if STEP == 1 else 1)
    table = token * 2 * num_pairs
    cos = tl.load(cos_ptr + table + first, mask=pair < num_pairs, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table + second, mask=pair < num_pairs, other=0.0).to(tl.float32)
    row = heads_ptr + token * row_stride + head * head_stride
    a = tl.load(row + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(row + second, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = heads_ptr.dtype.element_ty
    tl.store(row + first, (a * cos - b * sin).to(dtype), mask=mask)
    tl.store(row + second, (b * cos + a * sin).to(dtype), mask=mask)


def rope_table(
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    dtype: torch.dtype,
    interleaved: bool,
    attention_factor: float = 1.0,
) -> RopeTable:
    """See `ops.rope.rope_table`."""
    tokens, num_pairs = positions.shape[0], frequencies.shape[0]
    by_pair = pair_positions(positions).expand(-1, num_pairs)
    cos = torch.empty(tokens, 1, 2 * num_pairs, dtype=dtype, device=positions.device)
    sin = torch.empty_like(cos)
    if tokens:
        rope_table_kernel[(tokens,)](
            by_pair,
            frequencies,
            cos,
            sin,
            num_pairs,
            by_pair.stride(0),
            by_pair.stride(1),
            attention_factor,
            STEP=2 if interleaved else 1,
            BLOCK=next_power_of_2(num_pairs),
            num_warps=1,
        )
    return RopeTable(cos, sin, interleaved)


def heads_per_program(tokens: int) -> int:
    """Heads of one token that share a program."""
    return _HEADS_PER_PROGRAM if tokens >= _MANY_TOKENS else 1


def apply_rope(heads: torch.Tensor, table: RopeTable) -> torch.Tensor:
    """See `ops.rope.apply_rope`."""
    tokens, num_heads, _ = heads.shape
    if heads.stride(2) != 1:
        raise ValueError(f"rotary embedding needs contiguous heads, got strides {heads.stride()}")
    num_pairs, per_program = table.cos.shape[-1] // 2, heads_per_program(tokens)
    if tokens and num_heads:
        apply_rope_kernel[(tokens, -(-num_heads // per_program))](
            heads,
            table.cos,
            table.sin,
            num_heads,
            num_pairs,
            heads.stride(0),
            heads.stride(1),
            STEP=2 if table.interleaved else 1,
            HEADS=per_program,
            BLOCK=next_power_of_2(num_pairs),
            num_warps=1,
        )
    return heads
