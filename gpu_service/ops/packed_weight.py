"""Weights of dense layers on a CPU in the format that their checkpoint stores, and products with them.

The layouts and kernels are those of experts (`kernels/format`, `kernels/gemm`), called in this process:
products of float32 rows are exact in float32, those of bfloat16 rows as the measured kernel plan has them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moebius import _kernels
from moebius.kernels.source import SourceMatrix
from moebius.kernels.weight_formats import PANEL_COLUMNS, panel_layout


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Rows of a weight that are stored in one format."""

    format: str  # A key of `weight_formats.WEIGHT_FORMATS`.
    rows: int


def packed_bytes(in_features: int, parts: tuple[PackedPart, ...]) -> int:
    """Returns the memory that the parts of a weight take, bytes."""
    panels = (-(-part.rows // PANEL_COLUMNS) for part in parts)
    sizes = (panel_layout(part.format, in_features).panel_bytes for part in parts)
    return sum(count * size for count, size in zip(panels, sizes, strict=True))


class PackedWeight:
    """A weight `[out, in]` whose parts follow one another; filled by `pack`."""

    def __init__(
        self,
        threads: _kernels.DenseThreads,
        in_features: int,
        parts: tuple[PackedPart, ...],
        memory: torch.Tensor,
    ) -> None:
        """`memory`: uint8 `[packed_bytes(in_features, parts)]` of a CPU, 64-byte aligned."""
        self._memory = memory
        self.matrix = _kernels.DenseMatrix(
            threads,
            in_features,
            [(part.format, part.rows) for part in parts],
            memory.data_ptr(),
            memory.numel(),
        )
        self.in_features, self.out_features = in_features, sum(part.rows for part in parts)

    def pack(self, part: int, first_row: int, source: SourceMatrix) -> None:
        """Pack rows of a part from `first_row` on, a multiple of 16; threads may pack different rows at once.

        Raises ValueError where the source does not fit, or would be rounded.
        """
        self.matrix.pack(part, first_row, source)

    def calibrate(self) -> None:
        """Choose the kernels of bfloat16 rows by measuring, once all is packed; 0.15 s for each layout."""
        self.matrix.calibrate()

    def linear(
        self, rows: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Computes `x W^T + b`: rows `[..., in]` to `[..., out]` of `dtype` (None: that of the rows).

        bias: float32 `[out]`, contiguous. Sums are in float32 and rounded once.
        """
        wanted = dtype or rows.dtype
        if rows.dtype == torch.float16 or wanted == torch.float16:
            return self.linear(rows.float(), bias, torch.float32).to(wanted)
        flat = rows if rows.dim() == 2 else rows.reshape(-1, self.in_features)
        if flat.stride(1) != 1:
            flat = flat.contiguous()
        output = torch.empty(*rows.shape[:-1], self.out_features, dtype=wanted)
        self.matrix.multiply(
            flat.data_ptr(),
            flat.stride(0),
            flat.shape[0],
            flat.dtype == torch.bfloat16,
            output.data_ptr(),
            self.out_features,
            wanted == torch.bfloat16,
            0 if bias is None else bias.data_ptr(),
        )
        return output

    def take_rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the rows of the weight, dequantised: int64 `[T]` to `[T, in]` of `dtype`; zeros for unknown
        ids.
        """
        if dtype == torch.float16:
            return self.take_rows(ids, torch.float32).half()
        output = torch.empty(ids.shape[0], self.in_features, dtype=dtype)
        own = ids.contiguous()
        self.matrix.take_rows(own.data_ptr(), own.shape[0], output.data_ptr(), dtype == torch.bfloat16)
        return output
