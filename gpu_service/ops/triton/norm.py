"""Root-mean-square norms, one program per row."""

from __future__ import annotations

import torch
import triton.language as tl

from gpu_service.ops.triton.jit import jit, next_power_of_2, num_warps, overlap, wait_for_previous


@jit
def rounded_norm(
    values: tl.tensor, weight: tl.tensor, size: int, eps: float, dtype: tl.constexpr
) -> tl.tensor:
    """Float32 in, the stored dtype out; rounded before and after the weight, as the reference does."""
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / size + eps)
    return ((values * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


@jit
def rms_norm_kernel(
    values_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    output_ptr: tl.tensor,
    num_heads: int,
    row_stride: int,
    head_stride: int,
    size: int,
    eps: float,
    BLOCK: tl.constexpr,
) -> None:
    """values `[T, num_heads, size]` with two free strides, output contiguous; a program takes one row."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    start = values_ptr + (program // num_heads) * row_stride + (program % num_heads) * head_stride
    values = tl.load(start + column, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    normalized = rounded_norm(values, weight, size, eps, output_ptr.dtype.element_ty)
    tl.store(output_ptr + program * size + column, normalized, mask=mask)


@jit
def fused_add_rms_norm_kernel(
    update_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    output_ptr: tl.tensor,
    update_stride: int,
    residual_stride: int,
    output_stride: int,
    size: int,
    eps: float,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """The sum replaces the residual; its norm may replace the update, which a program reads before."""
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    residual_row = residual_ptr + row * residual_stride + column
    update_row = update_ptr + row * update_stride + column
    update = tl.load(update_row, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_row, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    total = (update + residual).to(dtype)
    tl.store(residual_row, total, mask=mask)
    normalized = rounded_norm(total.to(tl.float32), weight, size, eps, dtype)
    tl.store(output_ptr + row * output_stride + column, normalized, mask=mask)


def rms_norm(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    size = hidden_states.shape[-1]
    values = hidden_states
    if values.dim() != 3 or values.stride(2) != 1:
        values = hidden_states.reshape(-1, 1, size).contiguous()
    output = torch.empty(hidden_states.shape, dtype=hidden_states.dtype, device=hidden_states.device)
    rows, num_heads, _ = values.shape
    block = next_power_of_2(size)
    if rows * num_heads:
        rms_norm_kernel[(rows * num_heads,)](
            values,
            weight,
            output,
            num_heads,
            values.stride(0),
            values.stride(1),
            size,
            eps,
            BLOCK=block,
            num_warps=num_warps(block),
        )
    return output


def fused_add_rms_norm(
    update: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    rows, size = update.shape
    output = update if update.dtype == residual.dtype else torch.empty_like(residual)
    block = next_power_of_2(size)
    if rows:
        fused_add_rms_norm_kernel[(rows,)](
            update,
            residual,
            weight,
            output,
            update.stride(0),
            residual.stride(0),
            output.stride(0),
            size,
            eps,
            BLOCK=block,
            num_warps=num_warps(block),
            **overlap(residual.device),
        )
    return output
