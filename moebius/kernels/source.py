"""One weight matrix as a checkpoint stores it: what `moebius._kernels` packs, dequantises and requantises."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

SourceLayout = Literal["plain", "compressed_int4", "awq_int4", "gptq_int4", "mxfp4", "nvfp4", "grid_words"]
SmallInteger = Literal["int2", "int3", "int4", "int5", "int6"]
# Places of values in the tables of `weight_formats.CODEBOOKS`.
TableCode = Literal["iq4"]
# Rows of `weight_formats.grid`, with signs and scales, and tq1, digits to the base of 3.
GridCode = Literal["iq3_xxs", "iq3_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq1_s", "iq1_m", "tq1"]
PlainCode = Literal["float32", "bfloat16", "float16", "float8", "int8", "float4"]
Code = Literal[PlainCode, SmallInteger, TableCode, GridCode]
# Stored as [in, out]: rows lie along the second axis, eight to a word where words hold rows.
_TRANSPOSED: tuple[SourceLayout, ...] = ("awq_int4", "gptq_int4")
_WORD = 8
ScaleType = Literal["float32", "bfloat16", "float16", "e8m0", "e4m3", "products"]


@dataclass(frozen=True, eq=False)
class SourceMatrix:
    """Arrays of a checkpoint, or views of them, that describe the logical matrix [rows, cols] = [out, in].

    The reader of the checkpoint fills every field.
    `weight[r, c] = (value(codes) * group scale + minimum) * column_scale[r] * tensor_scale`.
    numpy has no bfloat16, e4m3 or e8m0: their bits come as uint16 and uint8.

    codes, by layout:
      plain             [rows, cols], any strides: float32, float16, uint16 (bfloat16), int8, or uint8 with
                        `code` float8, or one of fewer than 8 bits, one element a byte
      compressed_int4   int32 [rows, cols / 8] (compressed-tensors `weight_packed`)
      awq_int4          int32 [cols, rows / 8] (AutoAWQ `qweight`)
      gptq_int4         int32 [cols / 8, rows] (AutoGPTQ `qweight`)
      mxfp4, nvfp4      uint8 [rows, cols / 2], even columns in the low nibbles
      grid_words        int32 [rows, words], of `code`: for 32 columns two words (iq2_xxs, iq2_xs, iq1, tq1)
                        or four, first what panels have of them, then, of iq3_s, iq2_s, iq1 and tq1, one
                        whose lowest byte, or two of iq1 and tq1, are those of signs, and of tq1 4 bits above;
                        what is left is not read
    """

    codes: NDArray[Any]
    layout: SourceLayout = "plain"
    # Needed for uint8 codes of layout plain, and for grid_words; elsewhere the dtype or the layout tells.
    code: Code | None = None
    # Where codes are padded to whole words; None: as many as codes hold.
    rows: int | None = None
    cols: int | None = None
    # [ceil((rows + scale_row_begin) / scale_rows), ceil(cols / group_size)]; awq_int4 and gptq_int4: as
    # stored, [groups, rows].
    scales: NDArray[Any] | None = None
    # Needed for uint8 scales (e8m0, e4m3) and for int32 ones; elsewhere the dtype tells. "products": words
    # with a float16 factor in the low half, which the groups 2 n and 2 n + 1 of a row share, and in the byte
    # above it an int8, by which it is multiplied.
    scale_type: ScaleType | None = None
    group_size: int = 0  # Columns that share a scale: 16, 32, 64, 128; 0 without group scales.
    # Rows that share a scale (128 for blocks of fp8), and how far into such a block row 0 lies.
    scale_rows: int = 1
    scale_row_begin: int = 0
    # Zero points as the layout stores them: plain uint8 [rows, groups], compressed_int4 int32
    # [rows / 8, groups], awq_int4 and gptq_int4 int32 [groups, rows / 8]. None: symmetric, zero point 8.
    zeros: NDArray[Any] | None = None
    zeros_offset: int = 0  # Added to stored zero points, modulo 16: 1 for GPTQ checkpoints of version 1.
    # What code 0 means, for int4 (whose codes then are 0 to 15) and int8; shape, dtype and place in memory
    # are those of `scales`. None: no mins.
    mins: NDArray[Any] | None = None
    column_scale: NDArray[np.float32] | None = None  # float32 [rows]: per-channel scales.
    # Per-tensor or global scale, as a factor (reciprocals are resolved by the reader).
    tensor_scale: float = 1.0
    bias: NDArray[np.float32] | None = None  # float32 [rows].
    # uint32 [cols]: columns are sorted by group, column c being the checkpoint's order[c]. None: as there.
    order: NDArray[np.uint32] | None = None

    def take_rows(self, begin: int, end: int) -> SourceMatrix:
        """Rows [begin, end) as views; `begin` must be a multiple of 8 where words hold codes or zeros."""
        rows = slice(begin, end)
        words = slice(begin // _WORD, -(-end // _WORD))
        block = self.scale_row_begin + begin
        scale_rows = slice(block // self.scale_rows, -(-(self.scale_row_begin + end) // self.scale_rows))
        transposed = self.layout in _TRANSPOSED
        return replace(
            self,
            codes=_along(self.codes, words if self.layout == "awq_int4" else rows, transposed),
            rows=end - begin,
            scales=None if self.scales is None else _along(self.scales, scale_rows, transposed),
            scale_row_begin=block % self.scale_rows,
            mins=None if self.mins is None else _along(self.mins, scale_rows, transposed),
            zeros=None
            if self.zeros is None
            else _along(self.zeros, rows if self.layout == "plain" else words, transposed),
            column_scale=None if self.column_scale is None else self.column_scale[rows],
            bias=None if self.bias is None else self.bias[rows],
        )


def _along(array: NDArray[Any], picked: slice, transposed: bool) -> NDArray[Any]:
    return array[:, picked] if transposed else array[picked]
