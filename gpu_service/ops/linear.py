"""Linear layers: weights in torch's own layout, packed once for a CPU, or kept in fp8.

oneDNN multiplies two to three times faster when the weight has been put into its blocked layout before,
and dense GEMMs are what a step on a CPU spends most of its time in. The packed GEMM is the one
torch's own compiler emits for frozen weights.

oneDNN compiles a kernel for every number of rows that a weight meets, about half a MiB each, and two caches
keep them: steps of every size from 1 to 512 would take hundreds of MiB that never come back, and a pause
for each new size. Rows are therefore padded to few sizes.

Of bfloat16, oneDNN needs a CPU with AVX-512 (BW, VL, DQ) or AVX-NE-CONVERT. Elsewhere it packs none, and
torch's own products are loops that take longer with every row: a weight is packed as float32 there, which is
exact and takes twice the memory, rows are widened and results rounded once. Figures: "Without AVX-512"
in docs/benchmarks.md.

`add_norm_linear` and `add_norm_route` are the seam of a pre-norm layer with what follows it: a projection, or
the choice of experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from gpu_service.ops.norm import fused_add_rms_norm, rms_norm
from gpu_service.ops.registry import Op
from gpu_service.ops.router import route
from moebius.models.layers.router import RouterConfig

# Rows the blocked layout is chosen for: a busy decode step. One row stays as fast as with torch's layout.
_PACKED_FOR_ROWS = 64

_onednn: Any = torch.ops.mkldnn
_backend: Any = torch.backends.mkldnn


def can_pack(weight: torch.Tensor) -> bool:
    """Returns whether `pack_weight` knows a better layout for this weight on its device."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and bool(_backend.is_available())
        and hasattr(_onednn, "_reorder_linear_weight")
    )


def multiplies_bfloat16() -> bool:
    """Returns whether this CPU has what oneDNN needs to multiply bfloat16; asks oneDNN, which asks
    the CPU.
    """
    return bool(_backend.is_available()) and bool(_onednn._is_mkldnn_bf16_supported())


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns what this machine's CPU multiplies values of a dtype as: itself, or float32 in place of
    bfloat16.
    """
    return torch.float32 if dtype == torch.bfloat16 and not multiplies_bfloat16() else dtype


def widened(*operands: torch.Tensor | None) -> tuple[Any, ...]:
    """Returns the operands of a product as this machine multiplies them: on a CPU in `product_dtype`; None is
    None.

    The caller rounds the product to the dtype that it wants.
    """
    return tuple(
        operand.to(product_dtype(operand.dtype))
        if operand is not None and operand.device.type == "cpu"
        else operand
        for operand in operands
    )


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Returns weight `[out, in]` in oneDNN's blocked layout: opaque, same shape, in `product_dtype` of its
    dtype.

    `.to_dense()` undoes it.
    """
    values = weight.to(product_dtype(weight.dtype))
    packed: torch.Tensor = _onednn._reorder_linear_weight(values, _PACKED_FOR_ROWS)
    return packed


def padded_rows(rows: int) -> int:
    """Returns the size that a product of `rows` rows is computed with: 31 sizes up to 512, the first 8
    exactly.
    """
    step = 1 if rows <= 8 else 8 if rows <= 64 else 16 if rows <= 128 else 32 if rows <= 512 else 128
    return -(-rows // step) * step


@Op
def linear(hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Computes `x W^T + b`: hidden_states `[T, in]`, weight `[out, in]` plain or packed, bias `[out]`; `[T,
    out]`.

    The result has the dtype of `hidden_states`, whatever a packed weight has.
    """
    if weight.is_mkldnn:
        num_rows = hidden_states.shape[0]
        padding = padded_rows(num_rows) - num_rows
        padded = functional.pad(hidden_states, (0, 0, 0, padding)) if padding else hidden_states
        offset = None if bias is None else bias.to(weight.dtype)
        product = _onednn._linear_pointwise(padded.to(weight.dtype), weight, offset, "none", [], "")
        output: torch.Tensor = product.to(hidden_states.dtype)
        return output[:num_rows] if padding else output
    rows, plain, offset = widened(hidden_states, weight, bias)
    return functional.linear(rows, plain, offset).to(hidden_states.dtype)


# Columns of a weight that share a scale.
GROUP = 128


def dequantise(weight: torch.Tensor, scales: torch.Tensor, first_column: int) -> torch.Tensor:
    """Returns float32 `[out, in]`; arguments as `fp8_linear`'s."""
    spread = scales.repeat_interleave(GROUP, dim=1)[:, first_column : first_column + weight.shape[1]]
    return weight.float() * spread


@Op
def fp8_linear(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    first_column: int,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Computes `x (W s)^T + b`: `[T, in]` to `[T, out]`, in the dtype of `hidden_states`.

    weight: float8_e4m3fn `[out, in]`. scales: float32 `[out, ceil((first_column + in) / 128)]`, one for 128
    columns of a row; column 0 of the weight is number `first_column` (below 128) of its group. Rows of a
    128 x 128 block repeat its scale: three percent of the weight, for which rows may be cut anywhere.
    """
    # Rounded to the model's dtype, so that the product is the same on every device.
    values = dequantise(weight, scales, first_column).to(hidden_states.dtype)
    return linear(hidden_states, values, bias)


@Op
def add_norm_linear(
    residual: torch.Tensor,
    update: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`residual + update`, its RMS norm, and the norm's projection `x W^T + b`.

    residual and update `[T, N]` as in `fused_add_rms_norm` (None: nothing is added), norm_weight `[N]`;
    weight `[out, N]` and bias `[out]` as in `linear`, perhaps wider than the activations. Returns the sum
    and the norm `[T, N]` in the residual's dtype, and the projection `[T, out]` in the weight's. The sum may
    be the residual's memory, the norm the update's.
    """
    if update is None:
        normed = rms_norm(residual, norm_weight, eps)
    else:
        normed = fused_add_rms_norm(update, residual, norm_weight, eps)
    return residual, normed, linear(normed if weight.is_mkldnn else normed.to(weight.dtype), weight, bias)


@Op
def add_norm_route(
    residual: torch.Tensor,
    update: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    correction_bias: torch.Tensor | None,
    config: RouterConfig,
    valid_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`add_norm_linear` with a router's weight, whose logits `route` chooses by.

    Arguments as there. Returns the sum and the norm `[T, N]`, weights float32 and ids int32 `[T, top_k]`.
    """
    total, normed, logits = add_norm_linear(residual, update, norm_weight, eps, weight, bias)
    return total, normed, *route(logits, correction_bias, config, valid_rows)
