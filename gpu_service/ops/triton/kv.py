"""Writing new keys and values into their slots of the paged cache, in one launch."""

from __future__ import annotations

import torch
import triton.language as tl

from gpu_service.ops.kv import FP8_MAX
from gpu_service.ops.triton.e4m3 import as_loadable, encode_e4m3
from gpu_service.ops.triton.jit import jit, jit_for_any, next_power_of_2, num_warps


@jit
def stored(
    values: tl.tensor, scale: float, dtype: tl.constexpr, SCALED: tl.constexpr, MAX: tl.constexpr
) -> tl.tensor:
    """Keys or values as slots of a dtype hold them; `scale` may be a tensor."""
    if SCALED:
        # Conversion to fp8 need not saturate, and an overflow would be read back as NaN; a real one stays,
        # and what is infinite already becomes one.
        values = values.to(tl.float32) / scale
        finite = tl.abs(values) < float("inf")
        values = tl.where(finite, tl.minimum(tl.maximum(values, -MAX), MAX), float("nan"))
        values = encode_e4m3(values) if dtype == tl.uint8 else values.to(dtype)
    return values


@jit
def append_kv_kernel(
    slots_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    num_heads: int,
    head_dim: int,
    slot_stride: int,
    key_stride: int,
    key_head_stride: int,
    value_stride: int,
    value_head_stride: int,
    key_scale: float,
    value_scale: float,
    SCALED: tl.constexpr,
    MAX: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program t stores all heads of token t; a slot holds its keys, then its values."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    element = tl.arange(0, BLOCK)
    width = num_heads * head_dim
    mask = element < width
    head, column = element // head_dim, element % head_dim
    key = tl.load(key_ptr + token * key_stride + head * key_head_stride + column, mask=mask)
    value = tl.load(value_ptr + token * value_stride + head * value_head_stride + column, mask=mask)
    dtype: tl.constexpr = slots_ptr.dtype.element_ty
    row = slots_ptr + slot * slot_stride + element
    tl.store(row, stored(key, key_scale, dtype, SCALED, MAX), mask=mask)
    tl.store(row + width, stored(value, value_scale, dtype, SCALED, MAX), mask=mask)


def append_kv(
    kv_slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    tokens, num_heads, head_dim = key.shape
    if key.stride(2) != 1 or value.stride(2) != 1:
        raise ValueError(f"keys and values need contiguous heads, got {key.stride()} and {value.stride()}")
    block = next_power_of_2(num_heads * head_dim)
    if tokens:
        append_kv_kernel[(tokens,)](
            as_loadable(kv_slots),
            key,
            value,
            slot_mapping,
            num_heads,
            head_dim,
            kv_slots.stride(0),
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            key_scale,
            value_scale,
            SCALED=kv_slots.dtype != key.dtype,
            MAX=FP8_MAX,
            BLOCK=block,
            num_warps=num_warps(block),
        )


@jit
def request_of_row(row, query_starts, num_requests):  # type: ignore[no-untyped-def]
    """Returns the request that a row belongs to, by bisection."""
    low, high = 0, num_requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) <= row:
            low = middle + 1
        else:
            high = middle
    return low - 1


@jit_for_any("num_requests", "table_stride")
def pool_index_keys_kernel(  # type: ignore[no-untyped-def]
    slots, offsets, positions, slot_mapping, block_table, query_starts, num_requests, table_stride,
    POOL: tl.constexpr, SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row): nothing, unless its token is the last of a pool."""
    row = tl.program_id(0)
    last = tl.load(positions + row)
    if (last + 1) % POOL == 0:
        request = request_of_row(row, query_starts, num_requests)
        place, at = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK)
        inside = (place < POOL)[:, None] & (at < SIZE)[None, :]
        token = tl.maximum(last - POOL + 1 + place, 0)
        page = tl.load(block_table + request * table_stride + token // PAGE_SIZE, mask=place < POOL, other=0)
        slot = page.to(tl.int64) * PAGE_SIZE + token % PAGE_SIZE
        of_token = slots + slot[:, None] * (2 * SIZE) + at[None, :]
        logits = tl.load(of_token + SIZE, mask=inside, other=0.0).to(tl.float32)
        logits += tl.load(offsets + place[:, None] * SIZE + at[None, :], mask=inside, other=0.0)
        logits = tl.where((place < POOL)[:, None], logits, float("-inf"))
        weights = tl.exp(logits - tl.max(logits, 0)[None, :])
        key = tl.load(of_token, mask=inside, other=0.0).to(tl.float32)
        pooled = tl.sum(weights * key, 0) / tl.sum(weights, 0)
        target = slots + tl.load(slot_mapping + row) * (2 * SIZE) + at
        tl.store(target, pooled.to(slots.dtype.element_ty), mask=at < SIZE)


def pool_index_keys(
    slots: torch.Tensor,
    offsets: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    query_starts: torch.Tensor,
    page_size: int,
) -> None:
    pool, size = offsets.shape
    if positions.shape[0]:
        pool_index_keys_kernel[(positions.shape[0],)](
            slots, offsets, positions, slot_mapping, block_table, query_starts, block_table.shape[0],
            block_table.stride(0), POOL=pool, SIZE=size, PAGE_SIZE=page_size,
            BLOCK_P=next_power_of_2(pool), BLOCK=next_power_of_2(size),
        )  # fmt: skip


@jit
def _mean_of_pool(of_token, at, inside, pool, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Mean key over a pool's tokens at some elements, rounded as it would be stored."""
    keys = tl.load(of_token[:, None] + at[None, :], mask=inside, other=0.0).to(tl.float32)
    return (tl.sum(keys, 0) / pool).to(dtype).to(tl.float32)


@jit_for_any("num_requests", "table_stride")
def mean_index_keys_kernel(  # type: ignore[no-untyped-def]
    slots, weight, positions, slot_mapping, block_table, query_starts, eps, num_requests, table_stride,
    POOL: tl.constexpr, SIZE: tl.constexpr, PAIRS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Program (row): nothing, unless its token is the last of a pool."""
    row, ROW = tl.program_id(0), SIZE + 2 * PAIRS
    dtype: tl.constexpr = slots.dtype.element_ty
    last = tl.load(positions + row)
    if (last + 1) % POOL == 0:
        request = request_of_row(row, query_starts, num_requests)
        place, at, pair = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK), tl.arange(0, BLOCK_R)
        held = place < POOL
        token = tl.maximum(last - POOL + 1 + place, 0)
        page = tl.load(block_table + request * table_stride + token // PAGE_SIZE, mask=held, other=0)
        of_token = slots + (page.to(tl.int64) * PAGE_SIZE + token % PAGE_SIZE) * ROW
        begin = last - POOL + 1
        first_page = tl.load(block_table + request * table_stride + begin // PAGE_SIZE).to(tl.int64)
        rotation = slots + (first_page * PAGE_SIZE + begin % PAGE_SIZE) * ROW + SIZE + pair
        is_pair, whole = pair < PAIRS, at < SIZE
        key = _mean_of_pool(of_token, at, held[:, None] & whole[None, :], POOL, dtype)
        first = _mean_of_pool(of_token, pair, held[:, None] & is_pair[None, :], POOL, dtype)
        second = _mean_of_pool(of_token, PAIRS + pair, held[:, None] & is_pair[None, :], POOL, dtype)
        cos = tl.load(rotation, mask=is_pair, other=0.0).to(tl.float32)
        sin = tl.load(rotation + PAIRS, mask=is_pair, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(key * key, 0) / SIZE + eps)
        key = (key * scale * tl.load(weight + at, mask=whole, other=0.0)).to(dtype)
        first = (first * scale * tl.load(weight + pair, mask=is_pair, other=0.0)).to(dtype).to(tl.float32)
        second *= scale * tl.load(weight + PAIRS + pair, mask=is_pair, other=0.0)
        second = second.to(dtype).to(tl.float32)
        # The last token's row is read by all threads before any of them writes it.
        tl.debug_barrier()
        target = slots + tl.load(slot_mapping + row) * ROW
        tl.store(target + at, key, mask=whole & (at >= 2 * PAIRS))
        tl.store(target + pair, (first * cos - second * sin).to(dtype), mask=is_pair)
        tl.store(target + PAIRS + pair, (second * cos + first * sin).to(dtype), mask=is_pair)


def mean_index_keys(
    slots: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    pool: int,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    query_starts: torch.Tensor,
    page_size: int,
) -> None:
    size = weight.shape[0]
    pairs = (slots.shape[1] - size) // 2
    if positions.shape[0]:
        mean_index_keys_kernel[(positions.shape[0],)](
            slots, weight, positions, slot_mapping, block_table, query_starts, eps, block_table.shape[0],
            block_table.stride(0), POOL=pool, SIZE=size, PAIRS=pairs, PAGE_SIZE=page_size,
            BLOCK_P=next_power_of_2(pool), BLOCK=next_power_of_2(size), BLOCK_R=next_power_of_2(pairs),
        )  # fmt: skip
