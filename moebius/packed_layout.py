"""The packed weights of an expert, described and unpacked in numpy: the reference for kernels on a GPU.

A matrix [out, in] is stored as panels of 16 output features ("columns"), each holding all of k = in. Inside a
panel, every section beginning at a multiple of 64 bytes:

    codes         k_padded x 16 elements in 32-bit words: a line of 64 bytes is one word of each column. From
                  bit 0 on, a column's word holds
                      32-bit elements   k
                      16-bit elements   k, k+1
                      8-bit elements    k, k+1, k+2, k+3
                      4-bit elements    k, k+2, k+4, k+6, k+1, k+3, k+5, k+7
    scales        [groups][16] of the format's scale type; [groups] where one scale serves the whole panel
    zeros         [groups][16] uint8
    minimums      [groups][16] of the scale type
    column_scale  [16] float32
    bias          [16] float32

A section that the format lacks takes no bytes. k is padded to a multiple of 64, columns to whole panels. The
same layout serves every instruction set (kernels/format/panel_layout.h says the same in C++).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moebius.kernels_source import Code, ScaleType
from moebius.weight_formats import CODE_BITS, SCALE_BYTES, WeightFormat

PANEL_COLUMNS = 16
PAD_K = 64

# Element i of a word's k, k+1, ... lies in bits shift[i] ... shift[i] + bits - 1.
WORD_SHIFTS: dict[int, tuple[int, ...]] = {
    32: (0,),
    16: (0, 16),
    8: (0, 8, 16, 24),
    4: (0, 16, 4, 20, 8, 24, 12, 28),
}
FLOAT4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def _align(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


@dataclass(frozen=True)
class PanelLayout:
    """Where the sections of one panel lie, in bytes from its begin."""

    format: WeightFormat
    k: int
    has_bias: bool = False

    @property
    def k_padded(self) -> int:
        return -(-self.k // PAD_K) * PAD_K

    @property
    def groups(self) -> int:
        return -(-self.k // self.format.group_size) if self.format.group_size else 0

    @property
    def scales_offset(self) -> int:
        return self.k_padded * PANEL_COLUMNS * CODE_BITS[self.format.code] // 8

    @property
    def scales_bytes(self) -> int:
        """Of the group scales, or of the minimums, without padding."""
        if self.format.scale is None:
            return 0
        columns = 1 if self.format.panel_scale else PANEL_COLUMNS
        return self.groups * columns * SCALE_BYTES[self.format.scale]

    @property
    def zeros_offset(self) -> int:
        return self.scales_offset + _align(self.scales_bytes)

    @property
    def minimums_offset(self) -> int:
        return self.zeros_offset + (_align(self.groups * PANEL_COLUMNS) if self.format.zeros else 0)

    @property
    def column_scale_offset(self) -> int:
        return self.minimums_offset + (_align(self.scales_bytes) if self.format.minimums else 0)

    @property
    def bias_offset(self) -> int:
        return self.column_scale_offset + (PANEL_COLUMNS * 4 if self.format.column_scale else 0)

    @property
    def panel_bytes(self) -> int:
        return self.bias_offset + (PANEL_COLUMNS * 4 if self.has_bias else 0)


@dataclass(frozen=True)
class ExpertLayout:
    """One expert: gate and up panels alternating (gate 0, up 0, gate 1, ...), then the down panels.

    Without a gate the up panels stand alone. gate_up and down describe the two kinds of panel, with
    k = hidden_size and k = intermediate_size.
    """

    gate_up: PanelLayout
    down: PanelLayout
    gated: bool = True

    @property
    def panels_per_column_block(self) -> int:
        return 2 if self.gated else 1

    @property
    def intermediate_blocks(self) -> int:
        return -(-self.down.k // PANEL_COLUMNS)

    @property
    def down_panels(self) -> int:
        return -(-self.gate_up.k // PANEL_COLUMNS)

    @property
    def down_offset(self) -> int:
        return self.intermediate_blocks * self.panels_per_column_block * self.gate_up.panel_bytes

    @property
    def expert_bytes(self) -> int:
        return self.down_offset + self.down_panels * self.down.panel_bytes


def _float8_values(bits: Bytes) -> Floats:
    """OCP e4m3fn: bias 7, subnormals in steps of 2^-9, NaN at 0x7f and 0xff."""
    exponent = (bits >> 3 & 15).astype(np.int32)
    mantissa = (bits & 7).astype(np.float32)
    magnitude = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(mantissa + 8, exponent - 10))
    magnitude = np.where(bits & 0x7F == 0x7F, np.nan, magnitude).astype(np.float32)
    return np.where(bits & 0x80, -magnitude, magnitude)


def _bfloat16_values(bits: NDArray[np.uint16]) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _e8m0_values(bits: Bytes) -> Floats:
    """2^(bits - 127), NaN at 255."""
    powers = np.ldexp(np.float32(1), bits.astype(np.int32) - 127)
    return np.where(bits == 255, np.float32(np.nan), powers).astype(np.float32)


def _scale_values(scale: ScaleType, section: Bytes) -> Floats:
    match scale:
        case "float32":
            return section.view(np.float32)
        case "float16":
            return section.view(np.float16).astype(np.float32)
        case "bfloat16":
            return _bfloat16_values(section.view(np.uint16))
        case "e8m0":
            return _e8m0_values(section)
        case "e4m3":
            return _float8_values(section)


def _code_values(code: Code, codes: NDArray[np.uint32]) -> Floats:
    match code:
        case "float32":
            return codes.view(np.float32)
        case "bfloat16":
            return _bfloat16_values(codes.astype(np.uint16))
        case "float16":
            return codes.astype(np.uint16).view(np.float16).astype(np.float32)
        case "float8":
            return _float8_values(codes.astype(np.uint8))
        case "int8":
            return codes.astype(np.uint8).view(np.int8).astype(np.float32)
        case "int4":
            return codes.astype(np.float32)
        case "float4":
            return FLOAT4_VALUES[codes]


def unpack_codes(layout: PanelLayout, panel: Bytes) -> NDArray[np.uint32]:
    """The elements' bits [k_padded, 16], padding included."""
    bits = CODE_BITS[layout.format.code]
    shifts = WORD_SHIFTS[bits]
    words = panel[: layout.scales_offset].view(np.uint32).reshape(-1, 1, PANEL_COLUMNS)
    codes = words >> np.array(shifts, np.uint32)[None, :, None]
    return (codes & np.uint32((1 << bits) - 1)).reshape(layout.k_padded, PANEL_COLUMNS)


def unpack_panel(layout: PanelLayout, panel: Bytes) -> Floats:
    """The weights [16, k] of one panel's bytes."""
    weight_format = layout.format
    weights = _code_values(weight_format.code, unpack_codes(layout, panel)[: layout.k])
    group = np.arange(layout.k) // max(weight_format.group_size, 1)
    if weight_format.zeros:
        begin = layout.zeros_offset
        zeros = panel[begin : begin + layout.groups * PANEL_COLUMNS].reshape(-1, PANEL_COLUMNS)
        weights = weights - zeros[group].astype(np.float32)
    elif weight_format.code == "int4" and not weight_format.minimums:
        weights = weights - np.float32(8)
    if weight_format.scale is not None:
        weights = weights * _group_values(layout, weight_format.scale, panel, layout.scales_offset)[group]
        if weight_format.minimums:
            weights = (
                weights + _group_values(layout, weight_format.scale, panel, layout.minimums_offset)[group]
            )
    if weight_format.column_scale:
        weights = weights * _columns(panel, layout.column_scale_offset)
    return np.ascontiguousarray(weights.T)


def _group_values(layout: PanelLayout, scale: ScaleType, panel: Bytes, begin: int) -> Floats:
    """Scales or minimums [groups, 16], or [groups, 1] where one serves the whole panel."""
    columns = 1 if layout.format.panel_scale else PANEL_COLUMNS
    return _scale_values(scale, panel[begin : begin + layout.scales_bytes]).reshape(-1, columns)


def unpack_bias(layout: PanelLayout, panel: Bytes) -> Floats:
    """The biases [16] of one panel's bytes; zeros where the matrix has none."""
    if not layout.has_bias:
        return np.zeros(PANEL_COLUMNS, np.float32)
    return _columns(panel, layout.bias_offset)


def _columns(panel: Bytes, offset: int) -> Floats:
    return panel[offset : offset + PANEL_COLUMNS * 4].view(np.float32)


def unpack_matrix(layout: PanelLayout, packed: NDArray[Any], rows: int) -> Floats:
    """The weights [rows, k] of consecutive panels."""
    panels = packed.reshape(-1, layout.panel_bytes)
    return np.concatenate([unpack_panel(layout, panel) for panel in panels])[:rows]


def unpack_expert(layout: ExpertLayout, packed: Bytes) -> tuple[Floats | None, Floats, Floats]:
    """gate [intermediate, hidden] (None without one), up likewise and down [hidden, intermediate]."""
    hidden, intermediate = layout.gate_up.k, layout.down.k
    blocks = packed[: layout.down_offset].reshape(
        -1, layout.panels_per_column_block, layout.gate_up.panel_bytes
    )
    gate = unpack_matrix(layout.gate_up, blocks[:, 0], intermediate) if layout.gated else None
    up = unpack_matrix(layout.gate_up, blocks[:, -1], intermediate)
    down = unpack_matrix(layout.down, packed[layout.down_offset : layout.expert_bytes], hidden)
    return gate, up, down
