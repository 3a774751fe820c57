"""Rows that are not finite, one program per row."""

from __future__ import annotations

import torch
import triton.language as tl

from gpu_service.ops.triton.jit import jit_for_any, next_power_of_2, num_warps


@jit_for_any("layer")
def note_overflow_kernel(
    first_ptr: tl.tensor,
    total_ptr: tl.tensor,
    update_ptr: tl.tensor,
    total_stride: int,
    update_stride: int,
    size: int,
    layer: int,
    HAS_UPDATE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Nothing is written for rows that are finite, or were not before."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    values = tl.load(total_ptr + row * total_stride + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        values += tl.load(update_ptr + row * update_stride + column, mask=mask, other=0.0).to(tl.float32)
    rounded = values.to(total_ptr.dtype.element_ty).to(tl.float32)
    # NaN compares false.
    finite = tl.min(tl.where(tl.abs(rounded) < float("inf"), 1, 0), axis=0)
    before = tl.load(first_ptr + row)
    tl.store(first_ptr + row, layer, mask=(finite == 0) & (layer < before))


def note_overflow(first: torch.Tensor, total: torch.Tensor, update: torch.Tensor | None, layer: int) -> None:
    rows, size = total.shape
    block = next_power_of_2(size)
    if rows:
        note_overflow_kernel[(rows,)](
            first,
            total,
            total if update is None else update,
            total.stride(0),
            0 if update is None else update.stride(0),
            size,
            layer,
            HAS_UPDATE=update is not None,
            BLOCK=block,
            num_warps=num_warps(block),
        )
