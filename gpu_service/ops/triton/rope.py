"""Rotary embedding: the step's table; rotation in place, or with the norm before and the cache's write after.

The two elements of pair j are `j * step` and `j * step + distance`: (1, rotary_dim / 2) for half-split
pairs, (2, 1) for interleaved ones. A thread owns both, so that rotating in place is safe.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from gpu_service.ops.kv import FP8_MAX
from gpu_service.ops.rope import RopeTable, pair_positions
from gpu_service.ops.triton.e4m3 import as_loadable
from gpu_service.ops.triton.jit import jit, next_power_of_2, overlap, wait_for_previous
from gpu_service.ops.triton.kv import stored

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
    """Returns the number of heads of one token that share a program."""
    return _HEADS_PER_PROGRAM if tokens >= _MANY_TOKENS else 1


def apply_rope(heads: torch.Tensor, table: RopeTable) -> torch.Tensor:
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


@jit
def _weighted(
    values: tl.tensor,
    scale: tl.tensor,
    is_query: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    mask: tl.tensor,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Computes `values * scale * weight` in float32, rounded like the reference; the weight is the head's
    kind's.
    """
    q = tl.load(q_weight, mask=mask, other=0.0)
    k = tl.load(k_weight, mask=mask, other=0.0)
    weight = tl.where(is_query, q, k)
    return ((values * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype).to(tl.float32)


@jit
def _element(
    row: tl.tensor, value_row: tl.tensor, at: tl.tensor, mask: tl.tensor, is_value: tl.tensor,
    STORES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Returns float32 elements of heads: of queries and keys from one tensor, of values from another."""
    element = tl.load(row + at, mask=mask & ~is_value, other=0.0).to(tl.float32)
    if STORES:
        element += tl.load(value_row + at, mask=mask & is_value, other=0.0).to(tl.float32)
    return element


@jit
def rotate_kernel(
    heads_ptr: tl.tensor, q_weight_ptr: tl.tensor, k_weight_ptr: tl.tensor, cos_ptr: tl.tensor,
    sin_ptr: tl.tensor, query_ptr: tl.tensor, key_ptr: tl.tensor, value_ptr: tl.tensor,
    slots_ptr: tl.tensor, slot_mapping_ptr: tl.tensor, num_q: int, num_k: int, num_pairs: int,
    head_dim: int, row_stride: int, head_stride: int, value_stride: int, value_head_stride: int,
    slot_stride: int, eps: float, key_scale: float, value_scale: float, NORMS: tl.constexpr,
    STORES: tl.constexpr, SCALED: tl.constexpr, MAX: tl.constexpr, STEP: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_REST: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """Program (t, g) norms (NORMS) and rotates `HEADS` heads of token t into contiguous queries and keys.

    STORES: keys also go to the token's slot, and after them values, which are a token's last heads here.
    """
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    is_query, is_value = head < num_q, head >= num_q + num_k
    is_key = ~is_query & ~is_value
    held = head < num_q + (1 + STORES) * num_k
    pair, rest = tl.arange(0, BLOCK)[None, :], 2 * num_pairs + tl.arange(0, BLOCK_REST)[None, :]
    in_pairs, in_rest = pair < num_pairs, rest < head_dim
    first = pair * STEP
    second = first + (num_pairs if STEP == 1 else 1)
    row = heads_ptr + token * row_stride + head * head_stride
    value_row = value_ptr + token * value_stride + (head - num_q - num_k) * value_head_stride
    a = _element(row, value_row, first, held & in_pairs, is_value, STORES)
    b = _element(row, value_row, second, held & in_pairs, is_value, STORES)
    c = _element(row, value_row, rest, held & in_rest, is_value, STORES)
    value_a, value_b, value_c = a, b, c
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    if NORMS:
        squares = tl.sum(a * a + b * b, axis=1, keep_dims=True) + tl.sum(c * c, axis=1, keep_dims=True)
        scale = 1.0 / tl.sqrt(squares / head_dim + eps)
        a = _weighted(a, scale, is_query, q_weight_ptr + first, k_weight_ptr + first, in_pairs, dtype)
        b = _weighted(b, scale, is_query, q_weight_ptr + second, k_weight_ptr + second, in_pairs, dtype)
        c = _weighted(c, scale, is_query, q_weight_ptr + rest, k_weight_ptr + rest, in_rest, dtype)
    table = token * 2 * num_pairs
    cos = tl.load(cos_ptr + table + first, mask=in_pairs, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table + second, mask=in_pairs, other=0.0).to(tl.float32)
    rotated_a, rotated_b, c = (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype), c.to(dtype)
    query = query_ptr + (token * num_q + head) * head_dim
    tl.store(query + first, rotated_a, mask=is_query & in_pairs)
    tl.store(query + second, rotated_b, mask=is_query & in_pairs)
    tl.store(query + rest, c, mask=is_query & in_rest)
    key = key_ptr + (token * num_k + head - num_q) * head_dim
    tl.store(key + first, rotated_a, mask=is_key & in_pairs)
    tl.store(key + second, rotated_b, mask=is_key & in_pairs)
    tl.store(key + rest, c, mask=is_key & in_rest)
    if STORES:
        is_kept = held & ~is_query
        slot = slots_ptr + tl.load(slot_mapping_ptr + token) * slot_stride + (head - num_q) * head_dim
        scale = tl.where(is_value, value_scale, key_scale)
        stored_as: tl.constexpr = slots_ptr.dtype.element_ty
        a = tl.where(is_value, value_a.to(dtype), rotated_a)
        b = tl.where(is_value, value_b.to(dtype), rotated_b)
        c = tl.where(is_value, value_c.to(dtype), c)
        tl.store(slot + first, stored(a, scale, stored_as, SCALED, MAX), mask=is_kept & in_pairs)
        tl.store(slot + second, stored(b, scale, stored_as, SCALED, MAX), mask=is_kept & in_pairs)
        tl.store(slot + rest, stored(c, scale, stored_as, SCALED, MAX), mask=is_kept & in_rest)


def qk_norm_rope(
    heads: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    num_heads: int,
    table: RopeTable,
) -> tuple[torch.Tensor, torch.Tensor]:
    if heads.stride(2) != 1:
        raise ValueError(f"qk-norm and rotary embedding need contiguous heads, got strides {heads.stride()}")
    return _rotate(heads, q_weight, k_weight, eps, num_heads, table)


def can_rotate_and_append(heads: torch.Tensor, *arguments: Any) -> bool:
    """Returns whether heads are dense."""
    value: torch.Tensor = arguments[5]
    return heads.stride(2) == value.stride(2) == 1


def rotate_and_append(
    heads: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    num_heads: int,
    table: RopeTable,
    value: torch.Tensor,
    kv_slots: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    target = value, kv_slots, slot_mapping, key_scale, value_scale
    return _rotate(heads, q_weight, k_weight, eps, num_heads, table, target)


def _rotate(
    heads: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    num_heads: int,
    table: RopeTable,
    target: tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, float] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`target`: values, slots, the tokens' slots, scales of keys and values; None: nothing is stored."""
    tokens, total, head_dim = heads.shape
    num_keys = total - num_heads
    query = torch.empty(tokens, num_heads, head_dim, dtype=heads.dtype, device=heads.device)
    key = torch.empty(tokens, num_keys, head_dim, dtype=heads.dtype, device=heads.device)
    value, slots, mapping, *scales = (heads, heads, heads, 1.0, 1.0) if target is None else target
    num_pairs, per_program = table.cos.shape[-1] // 2, heads_per_program(tokens)
    programs = -(-(total if target is None else total + num_keys) // per_program)
    if tokens:
        rotate_kernel[(tokens, programs)](
            heads,
            heads if q_weight is None else q_weight,
            heads if k_weight is None else k_weight,
            table.cos,
            table.sin,
            query,
            key,
            value,
            as_loadable(slots),
            mapping,
            num_heads,
            num_keys,
            num_pairs,
            head_dim,
            *heads.stride()[:2],
            *value.stride()[:2],
            slots.stride(0),
            eps,
            *scales,
            NORMS=q_weight is not None,
            STORES=target is not None,
            SCALED=slots.dtype != heads.dtype,
            MAX=FP8_MAX,
            STEP=2 if table.interleaved else 1,
            HEADS=per_program,
            BLOCK=next_power_of_2(num_pairs),
            BLOCK_REST=next_power_of_2(head_dim - 2 * num_pairs),
            num_warps=1,
            **overlap(heads.device),
        )
    return query, key
