"""Products with weights that stay in 8 bits: dequantised where they are multiplied."""

from __future__ import annotations

import torch
from torch.nn import functional

from gpu_service.ops.registry import Op

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
