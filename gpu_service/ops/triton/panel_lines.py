"""Lines of packed panels, loaded whole and multiplied with single rows; `PANEL` is a `PanelFormat`."""

from __future__ import annotations

import triton.language as tl

from gpu_service.ops.triton.jit import jit
from gpu_service.ops.triton.panel_elements import (
    INTEGER_BASE,
    element,
    element_place,
    high_words,
    load_scales,
    low_words,
)

# The bits of 256.0.
EXPONENT = 0x43800000


@jit
def load_lines(words, scales, bytes_, panel, line, PANEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Words of lines int32 [L], high bits, and in float32 zero points, scales and mins; 0 for those that a
    format lacks.

    `panel`, the panels' first byte, is one for all lines, or int64 [L, 1].
    """
    per_word: tl.constexpr = 32 // PANEL.low_bits
    column = tl.arange(0, 16)
    packed = low_words(words, panel // 4, line[:, None], column[None, :], PANEL)
    high = high_words(words, panel // 4, line[:, None], column[None, :], PANEL)
    zero, scale, minimum = 0.0, 0.0, 0.0
    if PANEL.group_size:
        group = (line * per_word // PANEL.group_size)[:, None]
        # The last group may end before the padding does.
        in_groups = (line * per_word < PANEL.k)[:, None]
        if not PANEL.panel_scale:
            in_groups = in_groups & (column >= 0)[None, :]
        section = panel + PANEL.scales_offset
        scale = load_scales(scales, bytes_, section, group, column[None, :], in_groups, PANEL)
        if PANEL.zeros:
            at = panel + PANEL.zeros_offset + group * 16 + column[None, :]
            zero = tl.load(bytes_ + at, mask=in_groups, other=0).to(tl.float32)
        if PANEL.mins:
            section = panel + PANEL.mins_offset
            minimum = load_scales(scales, bytes_, section, group, column[None, :], in_groups, PANEL, True)
    return packed, high, zero, scale, minimum


@jit
def placed(words, i: tl.constexpr, exponent):  # type: ignore[no-untyped-def]
    """Returns 256 plus integer i of a word's eight of 4 bits, or plus 16 times it where i // 2 is odd, in
    float32.

    Two integers share a shift: both then lie in the mantissa of a float that begins at 256. `exponent` is
    `EXPONENT` as an argument of the kernel: of two constants the compiler would make two instructions.
    """
    byte: tl.constexpr = i // 4 + i % 2 * 2  # As `element_shift` says.
    moved = words << (15 - 8 * byte) if byte < 2 else words >> (8 * byte - 15)
    return ((moved & (0x780000 if i // 2 % 2 else 0x78000)) | exponent).to(tl.float32, bitcast=True)


@jit
def row_element(x, line, i, order, words, PANEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns float32 [L]: of the row at `x` what meets element i of each line's words."""
    k = line * (32 // PANEL.low_bits) + i
    place = element_place(words, order, k, PANEL)
    if PANEL.k < PANEL.k_padded:
        return tl.load(x + place, mask=k < PANEL.k, other=0.0).to(tl.float32)
    return tl.load(x + place).to(tl.float32)


@jit
def line_products(x, loaded, words, grids, order, line, exponent, PANEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns float32 [L, 16]: for each of `load_lines`, its elements times those of the row at `x`, summed.

    `x` is one row's, or [L]. `order`: the word from which on an ordered format says which of the row's
    elements each k meets.
    """
    packed, high, zero, scale, minimum = loaded
    per_word: tl.constexpr = 32 // PANEL.low_bits
    is_placed: tl.constexpr = PANEL.is_small_integer and PANEL.bits == 4
    product = tl.zeros([line.shape[0], 16], tl.float32)
    row_sum = tl.zeros([line.shape[0]], tl.float32)
    # What the products have too much, besides zero points.
    excess = tl.zeros([line.shape[0]], tl.float32)
    for i in tl.static_range(per_word):
        row = row_element(x, line, i, order, words, PANEL)
        if is_placed:
            value = placed(packed, i, exponent)
            excess += row * ((16 if i // 2 % 2 else 256) + (0 if PANEL.zeros else PANEL.middle))
            factor = row * 0.0625 if i // 2 % 2 else row
        else:
            value = element(packed, high, i, grids, PANEL)
            if PANEL.zeros:
                value -= INTEGER_BASE + zero
            elif PANEL.is_small_integer:
                value -= INTEGER_BASE + PANEL.middle
            factor = row
        product += factor[:, None] * value
        row_sum += row
    if is_placed:
        product -= excess[:, None]
        if PANEL.zeros:
            product -= row_sum[:, None] * zero
    if PANEL.group_size:
        product *= scale
    if PANEL.mins:
        product += row_sum[:, None] * minimum
    return product


@jit
def finish(result, floats, panel, PANEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns scales of whole columns, and biases; float32 [16] of one panel, or [P, 16] of panels int64 [P,
    1].
    """
    column = tl.arange(0, 16)
    if len(result.shape) == 2:
        column = column[None, :]
    if PANEL.column_scale:
        result *= tl.load(floats + (panel + PANEL.column_scale_offset) // 4 + column)
    if PANEL.has_bias:
        result += tl.load(floats + (panel + PANEL.bias_offset) // 4 + column)
    return result
