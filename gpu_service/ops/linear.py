"""Linear layers: weights in torch's own layout, packed once for a CPU, or kept in fp8.

oneDNN multiplies two to three times faster when the weight has been put into its blocked layout before,
and dense GEMMs are what a step on a CPU spends most of its time in. The packed GEMM is the one
torch's own compiler emits for frozen weights.

oneDNN compiles a kernel for every number of rows that a weight meets, about half a MiB each, and two caches
keep them: steps of every size from 1 to 512 would take hundreds of MiB that never come back, and a pause
for each new size. Rows are therefore padded to few sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from gpu_service.ops.registry import Op

# Rows the blocked layout is chosen for: a busy decode step. One row stays as fast as with torch's layout.
_PACKED_FOR_ROWS = 64

_onednn: Any = torch.ops.mkldnn
_backend: Any = torch.backends.mkldnn


def can_pack(weight: torch.Tensor) -> bool:
    """Whether `pack_weight` knows a better layout for this weight on its device."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and bool(_backend.is_available())
        and hasattr(_onednn, "_reorder_linear_weight")
    )


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Weight `[out, in]` in oneDNN's blocked layout: opaque, same shape; `.to_dense()` undoes it."""
    packed: torch.Tensor = _onednn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    return packed


def padded_rows(rows: int) -> int:
    """The size that a product of so many rows is computed with: 31 sizes up to 512, the first 8 exactly."""
    step = 1 if rows <= 8 else 8 if rows <= 64 else 16 if rows <= 128 else 32 if rows <= 512 else 128
    return -(-rows // step) * step


def linear(hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x W^T + b`: hidden_states `[T, in]`, weight `[out, in]` plain or packed, bias `[out]`; `[T, out]`."""
    if weight.is_mkldnn:
        rows = hidden_states.shape[0]
        padding = padded_rows(rows) - rows
        padded = functional.pad(hidden_states, (0, 0, 0, padding)) if padding else hidden_states
        output: torch.Tensor = _onednn._linear_pointwise(padded, weight, bias, "none", [], "")
        return output[:rows] if padding else output
    return functional.linear(hidden_states, weight, bias)


# Columns of a weight that share a scale.
GROUP = 128


def dequantise(weight: torch.Tensor, scales: torch.Tensor, first_column: int) -> torch.Tensor:
    """float32 `[out, in]`; arguments as `fp8_linear`'s."""
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
    """`x (W s)^T + b`: `[T, in]` to `[T, out]`, in the dtype of `hidden_states`.

    weight: float8_e4m3fn `[out, in]`. scales: float32 `[out, ceil((first_column + in) / 128)]`, one for 128
    columns of a row; column 0 of the weight is number `first_column` (below 128) of its group. Rows of a
    128 x 128 block repeat its scale: three percent of the weight, for which rows may be cut anywhere.
    """
    values = dequantise(weight, scales, first_column).to(hidden_states.dtype)
    return functional.linear(hidden_states, values, bias)
