"""Packed weights back to float32 in numpy, written from what `moebius.kernels.weight_formats` documents.

What the kernels pack, and what GPUs unpack, is compared with it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moebius.kernels.source import Code, ScaleType
from moebius.kernels.weight_formats import (
    CODE_MIDDLES,
    CODEBOOKS,
    GRID_UNITS,
    PANEL_COLUMNS,
    PackedExpertLayout,
    PanelLayout,
    grid,
)

SCALE_BYTES: dict[ScaleType, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "e8m0": 1,
    "e4m3": 1,
    "products": 1,
}
# Element i of a word's k, k+1, ... lies in bits shift[i] ... shift[i] + bits - 1.
WORD_SHIFTS: dict[int, tuple[int, ...]] = {
    32: (0,),
    16: (0, 16),
    8: (0, 8, 16, 24),
    4: (0, 16, 4, 20, 8, 24, 12, 28),
}
FLOAT4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

# Rows of a grid that are signed, an eighth more or less.
IQ1 = ("iq1_s", "iq1_m")

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


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
        case "products":
            raise AssertionError("products lie in two places")


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
        case "int2" | "int3" | "int5" | "int6":
            return codes.astype(np.float32)
        case "iq4":
            return np.array(CODEBOOKS[code], np.float32)[codes]
        case "iq3_xxs" | "iq3_s" | "iq2_xxs" | "iq2_xs" | "iq2_s" | "iq1_s" | "iq1_m" | "tq1":
            raise AssertionError("rows of a grid have no codes of single weights")


def unpack_codes(layout: PanelLayout, panel: Bytes) -> NDArray[np.uint32]:
    """Returns the elements' bits [k_padded, 16], padding included."""
    bits = layout.bits
    if bits in (2, 3, 5, 6):
        return _unpack_planes(layout, panel)
    shifts = WORD_SHIFTS[bits]
    words = panel[: layout.scales_offset].view(np.uint32).reshape(-1, 1, PANEL_COLUMNS)
    codes = words >> np.array(shifts, np.uint32)[None, :, None]
    return (codes & np.uint32((1 << bits) - 1)).reshape(layout.k_padded, PANEL_COLUMNS)


def _plane(lines: Bytes, width: int) -> NDArray[np.uint32]:
    """uint32 `[32 k's, 8 vectors, 64 bytes]` of lines `[32 k's, width, 64]`: `width` bits of each byte."""
    places = np.arange(0, 8, width, dtype=np.uint8)
    fields = lines[:, :, None, :] >> places[None, None, :, None] & np.uint8((1 << width) - 1)
    return fields.reshape(len(lines), 8, 64).astype(np.uint32)


def _unpack_planes(layout: PanelLayout, panel: Bytes) -> NDArray[np.uint32]:
    low = 2 if layout.bits < 4 else 4
    lines = panel[: layout.scales_offset].reshape(-1, layout.bits, 64)
    vectors = _plane(lines[:, :low], low)
    if layout.bits > low:
        vectors |= _plane(lines[:, low:], layout.bits - low) << np.uint32(low)
    codes = np.empty((len(lines), 4, 8, PANEL_COLUMNS), np.uint32)
    of_columns = vectors.reshape(-1, 4, 2, PANEL_COLUMNS, 4)
    for vector, places in enumerate(((0, 4, 1, 5), (2, 6, 3, 7))):
        for byte, place in enumerate(places):
            codes[:, :, place] = of_columns[:, :, vector, :, byte]
    return codes.reshape(layout.k_padded, PANEL_COLUMNS)


def unpack_panel(layout: PanelLayout, panel: Bytes) -> Floats:
    """Returns the weights [16, k] of one panel's bytes."""
    if layout.code in GRID_UNITS:
        weights = _grid_values(layout, panel)[: layout.k]
    else:
        weights = _code_values(layout.code, unpack_codes(layout, panel)[: layout.k])
    group = np.arange(layout.k) // max(layout.group_size, 1)
    if layout.zeros:
        begin = layout.zeros_offset
        zeros = panel[begin : begin + layout.groups * PANEL_COLUMNS].reshape(-1, PANEL_COLUMNS)
        weights = weights - zeros[group].astype(np.float32)
    elif layout.code in CODE_MIDDLES and not layout.mins:
        weights = weights - np.float32(CODE_MIDDLES[layout.code])
    if layout.scale is not None:
        weights = weights * _group_values(layout, layout.scale, panel, layout.scales_offset)[group]
        if layout.mins:
            weights = weights + _group_values(layout, layout.scale, panel, layout.mins_offset)[group]
    if layout.column_scale:
        weights = weights * _columns(panel, layout.column_scale_offset)
    return np.ascontiguousarray(weights.T)


def _group_values(layout: PanelLayout, scale: ScaleType, panel: Bytes, begin: int) -> Floats:
    """Returns scales or mins [groups, 16], or [groups, 1] where one serves the whole panel."""
    columns = 1 if layout.panel_scale else PANEL_COLUMNS
    nbytes = layout.groups * columns * SCALE_BYTES[scale]
    if scale == "products":
        whole: NDArray[Any]
        low = scale_bits(layout)[0]
        if low < 8:
            whole = _whole_fields(layout, panel[begin + layout.whole_offset :])
        elif layout.code == "iq1_s":
            signs = grid_signs(layout, panel)[: layout.groups]
            whole = (signs >> 6 & 3 | signs >> 12 & 4) * 2 + 1
        elif layout.code == "tq1":
            whole = np.ones((layout.groups, columns))
        elif layout.code in GRID_UNITS:
            whole = (grid_words(layout, panel)[: layout.groups, -1] >> 28) * 2 + 1
        else:
            of_whole = layout.scales_offset if layout.joined else begin
            stored = panel[of_whole + layout.whole_offset :][:nbytes].reshape(-1, columns)
            whole = stored.view(np.int8)
            if layout.joined:
                whole = stored >> 4 if begin == layout.mins_offset else stored & np.uint8(15)
        lines = -(-layout.groups // layout.factor_groups)
        factors = panel[begin : begin + lines * 32].view(np.float16).astype(np.float32).reshape(-1, columns)
        products: Floats = factors[np.arange(layout.groups) // layout.factor_groups] * whole.astype(
            np.float32
        )
        return products
    return _scale_values(scale, panel[begin : begin + nbytes]).reshape(-1, columns)


def grid_words(layout: PanelLayout, panel: Bytes) -> NDArray[np.uint32]:
    """Returns the words `[32 k's, lines, 16]` of a panel whose weights are rows of a grid."""
    return panel[: layout.scales_offset].view(np.uint32).reshape(-1, layout.bits, PANEL_COLUMNS)


def scale_bits(layout: PanelLayout) -> tuple[int, int]:
    """Returns the bits of whole numbers of scales that lie in one byte each, and in others after them."""
    return {"iq3_s": (4, 0), "iq2_xs": (4, 0), "iq2_s": (4, 0), "int3": (4, 2), "iq1_m": (2, 1)}.get(
        layout.code, (8, 0)
    )


def _whole_fields(layout: PanelLayout, section: Bytes) -> NDArray[Any]:
    """Returns whole numbers `[groups, 16]` of fewer than 8 bits, in planes."""
    groups, found, placed = np.arange(layout.groups), np.zeros((layout.groups, PANEL_COLUMNS), np.int32), 0
    for bits in scale_bits(layout):
        rows = -(-layout.groups * bits // 8)
        held = section[: rows * PANEL_COLUMNS].reshape(rows, PANEL_COLUMNS).astype(np.int32)
        if bits:
            moved = held[groups * bits // 8] >> (groups * bits % 8)[:, None]
            found |= (moved & ((1 << bits) - 1)) << placed
        section, placed = section[rows * PANEL_COLUMNS :], placed + bits
    return found * 2 + 1 if layout.code in GRID_UNITS else found - (1 << placed - 1)


def grid_signs(layout: PanelLayout, panel: Bytes) -> NDArray[np.uint32]:
    """Returns the bytes `[32 k's, 16]` of signs, or uint16 of iq1, of codes that have them."""
    held = panel[layout.signs_offset : layout.zeros_offset]
    if layout.code in (*IQ1, "tq1"):
        held = held.view(np.uint16)
    return held[: layout.k_padded // 2].reshape(-1, 16).astype(np.uint32)


def _digits(layout: PanelLayout, panel: Bytes) -> Floats:
    """Returns digits to the base of 3 `[k_padded, 16]`: what a byte of 243rds stands for, digit by digit."""
    words, halves = grid_words(layout, panel)[:, 0], grid_signs(layout, panel)
    begin = layout.signs_offset + layout.k_padded
    both = panel[begin : begin + layout.k_padded // 4].reshape(-1, 1, PANEL_COLUMNS)
    bits = np.concatenate([both & 15, both >> 4], 1).reshape(-1, PANEL_COLUMNS)
    found = np.empty((len(words), 32, PANEL_COLUMNS), np.float32)
    for byte in range(6):
        stored = (words >> np.uint32(byte * 8) if byte < 4 else halves >> np.uint32(byte * 8 - 32)) & 255
        rest = (stored.astype(np.uint8).view(np.int8) / np.float32(256)).astype(np.float32)
        for place in range(5):
            digit = np.rint(rest * 3).clip(-1, 1)
            found[:, place * 4 + byte if byte < 4 else 16 + place * 2 + byte] = digit
            rest = rest * 3 - digit
    for i in range(2):
        found[:, 30 + i] = np.array([0, 1, -1, -1])[bits >> 2 * i & 3]
    return found.reshape(-1, PANEL_COLUMNS)


def _grid_values(layout: PanelLayout, panel: Bytes) -> Floats:
    """Returns magnitudes with signs `[k_padded, 16]`."""
    if layout.code == "tq1":
        return _digits(layout, panel)
    words = grid_words(layout, panel)
    places = np.arange(layout.k_padded)
    chunk, i = places // 32, places % 32
    more = grid_signs(layout, panel)[chunk] if layout.code in ("iq3_s", "iq2_s", *IQ1) else None
    numbers, signs = grid_places(layout.code, words[chunk], i, more)
    rows = grid(layout.code)
    found = rows[numbers, (i % rows.shape[1])[:, None]]
    unit = np.float32(GRID_UNITS[layout.code])
    if layout.code in IQ1:
        return ((found.view(np.int8) + (1 - 2 * signs.astype(np.int32))) * unit).astype(np.float32)
    magnitudes = found.astype(np.float32) * unit
    return np.where(signs == 1, -magnitudes, magnitudes).astype(np.float32)


def grid_places(
    code: Code, words: NDArray[np.uint32], i: NDArray[np.int64], more: NDArray[np.uint32] | None
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns numbers of rows and signs `[n, columns]` of elements i of 32, from `[n, words, columns]`."""
    n, at = np.arange(len(i)), i[:, None]
    if code in ("iq3_xxs", "iq2_xxs"):
        width = 4 if code == "iq3_xxs" else 8
        numbers = words[n, i // (4 * width)] >> (at // width % 4 * 8) & 255
        return numbers, _with_eighth(words[:, -1] >> (at // 8 * 7) & 127, at % 8)
    if code in ("iq2_xs", "iq2_s"):
        pair = words[n, i // 16] >> (at % 16 // 8 * 16) & 0xFFFF
        if code == "iq2_xs":
            return pair & 511, _with_eighth(pair >> 9, at % 8)
        assert more is not None
        return pair & 1023, (pair >> 10 | (more >> (at // 8 * 2) & 3) << 6) >> (at % 8) & 1
    assert more is not None
    if code in IQ1:
        both, byte = words[:, 0] >> (at // 16 * 16) & 0xFFFF, more >> (at // 16 * 8) & 255
        numbers = np.where(at // 8 % 2, both >> 11 | (byte & 63) << 5, both & 2047)
        return numbers, (more >> 15 if code == "iq1_s" else byte >> (6 + at // 8 % 2)) & 1
    own, shared, half = words[n, i // 16 * 2], words[:, 1], at // 16
    row = at % 16 // 4
    numbers = np.where(row == 3, shared >> (half * 23), own >> np.array([0, 10, 23, 0])[row]) & 511
    signs = (more >> (half * 4) & 15) | (shared >> (9 + half * 7) & 127) << 4
    signs |= (own >> 19 & 15) << 11 | (own >> 9 & 1) << 15
    return numbers, signs >> (at % 16) & 1


def _with_eighth(stored: NDArray[Any], which: NDArray[np.int64]) -> NDArray[Any]:
    """Returns sign `which` of eight, of which seven are stored and the number of ones is even."""
    ones = sum(stored >> bit & 1 for bit in range(7))
    signs: NDArray[Any] = (stored | (ones & 1) << 7) >> which & 1
    return signs


def unpack_bias(layout: PanelLayout, panel: Bytes) -> Floats:
    """Returns the biases [16] of one panel's bytes; zeros where the matrix has none."""
    if not layout.has_bias:
        return np.zeros(PANEL_COLUMNS, np.float32)
    return _columns(panel, layout.bias_offset)


def _columns(panel: Bytes, offset: int) -> Floats:
    return panel[offset : offset + PANEL_COLUMNS * 4].view(np.float32)


def unpack_matrix(layout: PanelLayout, packed: NDArray[Any], rows: int) -> Floats:
    """Returns the weights [rows, k] of consecutive panels."""
    panels = packed.reshape(-1, layout.panel_bytes)
    return np.concatenate([unpack_panel(layout, panel) for panel in panels])[:rows]


def unpack_expert(layout: PackedExpertLayout, packed: Bytes) -> tuple[Floats | None, Floats, Floats]:
    """gate [intermediate, hidden] (None without one), up likewise and down [hidden, intermediate].

    Columns are in the order of a request's rows.
    """
    hidden, intermediate = layout.gate_up.k, layout.down.k
    count = -(-intermediate // PANEL_COLUMNS)
    rows = packed[: layout.down_offset]
    if layout.mixed:
        end = count * layout.gate.panel_bytes
        gates, ups = rows[:end], rows[end:]
    else:
        blocks = rows.reshape(count, -1, layout.gate_up.panel_bytes)
        gates, ups = blocks[:, 0], blocks[:, -1]
    gate = unpack_matrix(layout.gate, gates, intermediate) if layout.gated else None
    up = unpack_matrix(layout.gate_up, ups, intermediate)
    down = unpack_matrix(layout.down, packed[layout.down_offset : layout.order_offset], hidden)
    if layout.gate_up.ordered:
        places = np.argsort(packed[layout.order_offset :].view(np.uint32)[:hidden])
        gate, up = None if gate is None else gate[:, places], up[:, places]
    return gate, up, down
