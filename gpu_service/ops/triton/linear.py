"""A GEMM whose 8-bit weights are widened on chip: they are read once, at their stored size.

With many rows some outputs at a time are widened once, for torch's own product.
"""

from __future__ import annotations

import torch
import triton.language as tl

from gpu_service.ops.linear import GROUP
from gpu_service.ops.panel_linear import UNPACKED_BYTES
from gpu_service.ops.triton.e4m3 import as_loadable, widened
from gpu_service.ops.triton.jit import jit, next_power_of_2

# Rows from which on weights are widened ahead. An estimate: by then what that costs is gained by the faster
# product.
WIDEN_FROM_ROWS = 512
# Rows of a GEMM: tensor cores take at least 16; more than that many are multiplied in several programs.
_FEWEST_ROWS, _MOST_ROWS = 16, 64
# Columns that a program widens.
_COLUMNS = 1024
# Outputs of a program: narrow ones spread a decode step over all processors.
_NARROW, _WIDE = 16, 64


@jit
def fp8_linear_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    output_ptr: tl.tensor,
    num_rows: int,
    num_outputs: int,
    num_columns: int,
    first_column: int,
    x_stride: int,
    GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Program (n, t) makes block n of the outputs of block t of the rows, one group of columns at a time."""
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    has_output, has_row = output < num_outputs, row < num_rows
    x_rows = x_ptr + row.to(tl.int64)[:, None] * x_stride
    weight_rows = weight_ptr + output.to(tl.int64)[:, None] * num_columns
    total = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for group in range(GROUPS):
        column = group * GROUP - first_column + tl.arange(0, GROUP)
        inside = (column >= 0) & (column < num_columns)
        x = tl.load(x_rows + column[None, :], mask=has_row[:, None] & inside[None, :], other=0.0)
        stored = tl.load(weight_rows + column[None, :], mask=has_output[:, None] & inside[None, :], other=0.0)
        weight = widened(stored, x.dtype)
        scale = tl.load(scales_ptr + output * GROUPS + group, mask=has_output, other=0.0)
        total += tl.dot(x, tl.trans(weight), input_precision=PRECISION) * scale[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + output, mask=has_output, other=0.0).to(tl.float32)[None, :]
    target = output_ptr + row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    mask = has_row[:, None] & has_output[None, :]
    tl.store(target, total.to(output_ptr.dtype.element_ty), mask=mask)


@jit
def widen_kernel(
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    values_ptr: tl.tensor,
    num_columns: int,
    first_column: int,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Program (output, block of COLUMNS columns): weights times their scales, rounded once."""
    output, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < num_columns
    stored = tl.load(weight_ptr + output * num_columns + column, mask=inside, other=0.0)
    scale_at = scales_ptr + output * GROUPS + (first_column + column) // GROUP
    value = widened(stored, tl.float32) * tl.load(scale_at, mask=inside, other=0.0)
    target = values_ptr + output * num_columns + column
    tl.store(target, value.to(values_ptr.dtype.element_ty), mask=inside)


def fp8_linear(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    first_column: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Computes `ops.linear.fp8_linear`; sums in float32, scaled group by group."""
    x = hidden_states if hidden_states.stride(-1) == 1 else hidden_states.contiguous()
    rows, (outputs, columns) = x.shape[0], weight.shape
    result = x.new_empty((rows, outputs))
    if not result.numel():
        return result
    if rows >= WIDEN_FROM_ROWS:
        _widened_product(x, weight, scales, first_column, bias, result)
        return result
    block_rows = min(_MOST_ROWS, max(_FEWEST_ROWS, next_power_of_2(rows)))
    block_outputs = _NARROW if rows <= _FEWEST_ROWS else _WIDE
    fp8_linear_kernel[(-(-outputs // block_outputs), -(-rows // block_rows))](
        x,
        as_loadable(weight),
        scales,
        scales if bias is None else bias,
        result,
        rows,
        outputs,
        columns,
        first_column,
        x.stride(0),
        GROUPS=scales.shape[1],
        HAS_BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        GROUP=GROUP,
        BLOCK_T=block_rows,
        BLOCK_N=block_outputs,
    )
    return result


def _widened_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    first_column: int,
    bias: torch.Tensor | None,
    result: torch.Tensor,
) -> None:
    outputs, columns = weight.shape
    step = max(1, UNPACKED_BYTES // (columns * x.element_size()))
    values = x.new_empty((min(step, outputs), columns))
    for first in range(0, outputs, step):
        own = slice(first, min(first + step, outputs))
        count = own.stop - first
        widen_kernel[(count, -(-columns // _COLUMNS))](
            as_loadable(weight[own]),
            scales[own],
            values,
            columns,
            first_column,
            GROUPS=scales.shape[1],
            GROUP=GROUP,
            COLUMNS=_COLUMNS,
            num_warps=4,
        )
        if bias is None:
            torch.mm(x, values[:count].t(), out=result[:, own])
        else:
            torch.addmm(bias[own].to(x.dtype), x, values[:count].t(), out=result[:, own])
