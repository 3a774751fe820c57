"""Weights of dense layers on a GPU in the format that their checkpoint stores: `PackedWeight` of a device."""

from __future__ import annotations

import torch
from torch import nn

from gpu_service.ops.packed_weight import PackedPart, packed_bytes
from gpu_service.ops.panel_linear import UNPACK_FROM_ROWS, panel_linear, panel_parts, panel_rows
from moebius import _kernels
from moebius.kernels.source import SourceMatrix
from moebius.kernels.weight_formats import PANEL_COLUMNS

# Numbers of rows that between them take every kernel of products (`ops/triton/panel_linear.py`).
_WARM_UP_ROWS = (1, 2, 16, 32, 64, UNPACK_FROM_ROWS)


class PanelWeight:
    """A weight `[out, in]` whose parts follow one another; filled by `pack`."""

    def __init__(
        self, in_features: int, parts: tuple[PackedPart, ...], device: torch.device, dtype: torch.dtype
    ) -> None:
        """Takes the memory on the device; `dtype`: of activations."""
        self.in_features, self.out_features = in_features, sum(part.rows for part in parts)
        self.parts = panel_parts(in_features, parts)
        memory = torch.zeros(packed_bytes(in_features, parts), dtype=torch.uint8, device=device)
        self.memory = nn.Parameter(memory, requires_grad=False)
        self._dtype = dtype

    def pack(self, part: int, first_row: int, source: SourceMatrix) -> None:
        """Pack rows of a part from `first_row` on, a multiple of 16; threads may pack different rows at once.

        Raises ValueError where the source does not fit, or would be rounded.
        """
        chosen = self.parts[part]
        packed = torch.from_numpy(_kernels.pack_matrix(chosen.panels.name, source))
        begin = first_row // PANEL_COLUMNS * chosen.panels.panel_bytes
        target = chosen.memory(self.memory.data)[begin : begin + len(packed)]
        if first_row % PANEL_COLUMNS or len(target) != len(packed):
            raise ValueError(f"rows from {first_row} on do not fit a part of {chosen.rows} rows")
        target.copy_(packed)

    def calibrate(self) -> None:
        """Compile the kernels of all numbers of rows on a GPU, once all is packed."""
        if self.memory.device.type != "cuda":
            return
        for rows in _WARM_UP_ROWS:
            self.linear(self.memory.new_zeros((rows, self.in_features), dtype=self._dtype), None)

    def linear(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Computes `x W^T + b`: rows `[..., in]` to `[..., out]` of their dtype; bias `[out]`."""
        product = panel_linear(rows.reshape(-1, self.in_features), self.memory, self.parts, bias)
        return product.view(*rows.shape[:-1], self.out_features)

    def take_rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the rows of the weight, dequantised: int64 `[T]` to `[T, in]` of `dtype`; zeros for unknown
        ids.
        """
        return panel_rows(ids, self.memory, self.parts, dtype)
