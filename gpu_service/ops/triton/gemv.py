"""Products of few rows with a dense weight, alone or after the addition and the norm of a layer's seam.

Reading the weight is all that counts. A program has some features whole, so that each is one sum; its part of
the weight is under way while the kernel before ends, and while it norms the rows, which every program does
again: they are few, and in the cache. Sums are in float32, and of a row alone: how many others a step has
changes nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import nn

from gpu_service.ops.triton.jit import jit, next_power_of_2, overlap, wait_for_previous
from gpu_service.ops.triton.norm import rounded_norm

# Of several rows, and sums that a program makes for them; above, torch's product is faster. On an H200, one
# row of 5120 x 2048 took 7.9 us with the seam and 9.9 apart, two 12.4 and 9.8: `tests/gpu/time_fused.py`.
MAX_ROWS, MAX_SUMS = 4, 8
# Elements of a row that a program holds, and bytes of its part of the weight.
MAX_COLUMNS, TILE_BYTES = 8192, 65536
# Of a program after a norm, and of one without, where 16 sums would spill 768 bytes a thread: so an H200
# read the weight of logits, 151936 x 2048, at 0.84 TB/s.
MAX_FEATURES, MAX_PLAIN_FEATURES = 16, 8
# Programs that keep all processors of a large device reading.
MIN_PROGRAMS = 256
# Of a program; and registers of a thread with which a multiprocessor holds two programs of that many warps,
# or three of half as many. With more, the last part of a weight would be read when the first one is done.
MOST_WARPS, MAX_REGISTERS, MAX_REGISTERS_OF_FEWER = 8, 128, 168

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@jit
def gemv_kernel(
    rows_ptr: tl.tensor,
    update_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    total_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    output_ptr: tl.tensor,
    num_features: int,
    num_columns: int,
    row_stride: int,
    update_stride: int,
    eps: float,
    ROWS: tl.constexpr,
    ADDS: tl.constexpr,
    NORMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Program f: features from f * FEATURES on of every row; the first one also writes sums and norms."""
    program = tl.program_id(0)
    feature = program * FEATURES + tl.arange(0, FEATURES)
    column = tl.arange(0, COLUMNS)
    has_feature, inside = feature < num_features, column < num_columns
    place = feature.to(tl.int64)[:, None] * num_columns + column[None, :]
    weight = tl.load(weight_ptr + place, mask=has_feature[:, None] & inside[None, :], other=0.0)
    if NORMS:
        norm_weight = tl.load(norm_weight_ptr + column, mask=inside, other=0.0)
    wait_for_previous(OVERLAPS)
    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    for row in tl.static_range(ROWS):
        x = tl.load(rows_ptr + row * row_stride + column, mask=inside, other=0.0)
        if ADDS:
            update = tl.load(update_ptr + row * update_stride + column, mask=inside, other=0.0)
            x = (x.to(tl.float32) + update.to(tl.float32)).to(dtype)
            tl.store(total_ptr + row * num_columns + column, x, mask=inside & (program == 0))
        if NORMS:
            x = rounded_norm(x.to(tl.float32), norm_weight, num_columns, eps, dtype)
            tl.store(normed_ptr + row * num_columns + column, x, mask=inside & (program == 0))
        product = tl.sum(weight.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
        if HAS_BIAS:
            product += tl.load(bias_ptr + feature, mask=has_feature, other=0.0).to(tl.float32)
        target = output_ptr + row * num_features + feature
        tl.store(target, product.to(output_ptr.dtype.element_ty), mask=has_feature)


def features_per_program(num_features: int, row_bytes: int, most: int = MAX_FEATURES) -> int:
    """Returns as many rows of a weight, `most` at most, as fit into a program's tile and leave enough
    programs.
    """
    features = min(most, max(1, TILE_BYTES // row_bytes))
    while features > 1 and num_features < features * MIN_PROGRAMS:
        features //= 2
    return features


def is_few(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a product is one of few rows that a program can hold."""
    if weight.is_mkldnn or not rows.dim() == weight.dim() == 2:
        return False
    num_rows, columns = rows.shape
    features = features_per_program(weight.shape[0], next_power_of_2(columns) * weight.itemsize)
    return (
        (num_rows == 1 or (1 < num_rows <= MAX_ROWS and num_rows * features <= MAX_SUMS))
        and rows.stride(1) == 1
        and columns <= MAX_COLUMNS
        and weight.is_contiguous()
        and weight.dtype in _DTYPES
        and rows.dtype in _DTYPES
    )


def can_linear(hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    return is_few(hidden_states, weight) and hidden_states.dtype == weight.dtype


def linear(hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    output = hidden_states.new_empty((hidden_states.shape[0], weight.shape[0]))
    launch = _launch(hidden_states, weight, bias, output)
    gemv_kernel[launch.grid](**launch.arguments, **launch.options)
    return output


def can_add_norm_linear(
    residual: torch.Tensor,
    update: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> bool:
    return is_few(residual, weight) and (update is None or update.stride(1) == 1)


def add_norm_linear(
    residual: torch.Tensor,
    update: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found, launch = seam_launch(residual, update, norm_weight, eps, weight, bias)
    gemv_kernel[launch.grid](**launch.arguments, **launch.options)
    return found


class Launch(NamedTuple):
    """A launch of `gemv_kernel`, or of a kernel that begins with it."""

    grid: tuple[int]
    arguments: dict[str, Any]
    options: dict[str, Any]


def seam_launch(
    residual: torch.Tensor,
    update: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], Launch]:
    """Where sum, norm and product of `add_norm_linear` will be, and what computes them."""
    rows, columns = residual.shape
    # Programs that begin late must still find the rows as they were.
    total = residual if update is None else residual.new_empty((rows, columns))
    normed = residual.new_empty((rows, columns))
    output = weight.new_empty((rows, weight.shape[0]))
    seam = {"norm_weight_ptr": norm_weight, "total_ptr": total, "normed_ptr": normed, "eps": eps}
    return (total, normed, output), _launch(residual, weight, bias, output, update, seam)


def _launch(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    update: torch.Tensor | None = None,
    seam: dict[str, Any] | None = None,
) -> Launch:
    """`seam`: what belongs to the norm; None: there is none."""
    num_features, num_columns = weight.shape
    columns = next_power_of_2(num_columns)
    most = MAX_PLAIN_FEATURES if seam is None else MAX_FEATURES
    features = features_per_program(num_features, columns * weight.itemsize, most)
    unused = {"norm_weight_ptr": rows, "total_ptr": rows, "normed_ptr": rows, "eps": 0.0}
    arguments = {
        "rows_ptr": rows,
        "update_ptr": rows if update is None else update,
        "weight_ptr": weight,
        "bias_ptr": weight if bias is None else bias,
        "output_ptr": output,
        "num_features": num_features,
        "num_columns": num_columns,
        "row_stride": rows.stride(0),
        "update_stride": 0 if update is None else update.stride(0),
        "ROWS": rows.shape[0],
        "ADDS": update is not None,
        "NORMS": seam is not None,
        "HAS_BIAS": bias is not None,
        "FEATURES": features,
        "COLUMNS": columns,
    }
    # What is not a parameter may be what the kernel before writes.
    read_before = [weight] if seam is None else [weight, seam["norm_weight_ptr"]]
    overlaps = overlap(rows.device, all(isinstance(each, nn.Parameter) for each in read_before))
    num_warps = warps(columns)
    registers = MAX_REGISTERS if num_warps == MOST_WARPS else MAX_REGISTERS_OF_FEWER
    options = {"num_warps": num_warps, "maxnreg": registers, **overlaps}
    return Launch((-(-num_features // features),), arguments | (seam or unused), options)


def warps(columns: int) -> int:
    """16 elements of a row a thread."""
    return min(MOST_WARPS, max(1, columns // 512))
