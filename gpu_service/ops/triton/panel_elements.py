"""What all kernels read packed panels by, and products of tiles with them; `PANEL` is a `PanelFormat`.

Whole numbers become floats by setting them into the mantissa of a float whose exponent is known, and small
floats by shifting their bits into place and multiplying by a power of two: both exact, both of full rate.
"""

from __future__ import annotations

import triton.language as tl

from gpu_service.ops.triton.e4m3 import decode_e4m3
from gpu_service.ops.triton.jit import jit

# What the integer 0 is as a float of exponent 23.
INTEGER_BASE = tl.constexpr(8388608.0)


@jit
def element(words, high, i, grids, PANEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the float32 of element i of int32 words; integers of fewer than 8 bits as 2^23 plus their code.

    `high`: of `high_words`, where elements have bits in two planes. `grids`: of `PanelViews`.
    """
    shift = element_shift(i, PANEL.low_bits)
    if PANEL.code == "float32":
        value = words.to(tl.float32, bitcast=True)
    elif PANEL.code == "bfloat16":
        value = ((words >> shift) << 16).to(tl.float32, bitcast=True)
    elif PANEL.code == "float16":
        value = (words >> shift).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    elif PANEL.code == "float8":
        value = decode_e4m3(words >> shift)
    elif PANEL.code == "int8":
        value = ((words << (24 - shift)) >> 24).to(tl.float32)
    elif PANEL.is_iq1:
        value = iq1_value(words, high, i, grids, PANEL)
    elif PANEL.code == "tq1":
        value = digit_value(words, high, i)
    elif PANEL.is_grid:
        value = grid_value(words, high, i, grids, PANEL)
    elif PANEL.code == "float4":
        # e2m1: bias 1 becomes 127 by a factor of 2^126.
        code = words >> shift
        placed = ((code & 7) << 22) | ((code & 8) << 28)
        value = placed.to(tl.float32, bitcast=True) * 8.507059173023462e37
    else:
        code = (words >> shift) & ((1 << PANEL.low_bits) - 1)
        if PANEL.high_bits:
            mask: tl.constexpr = (1 << PANEL.high_bits) - 1
            code |= ((high >> element_shift(i, PANEL.high_bits)) & mask) << PANEL.low_bits
        value = small_value(code, PANEL)
    return value


@jit
def element_shift(i, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the first bit of element i of a word, or of its bits of a plane: planes are of bytes, for four
    k each.
    """
    return i * BITS if BITS > 4 else (i % 8 // 4 + i % 2 * 2) * 8 + (i // 8 * 2 + i // 2 % 2) * BITS


# Four values of GGUF's table of IQ4 each.
IQ4_0, IQ4_1 = tl.constexpr(-1079142271), tl.constexpr(-152379953)
IQ4_2, IQ4_3 = tl.constexpr(639175937), tl.constexpr(1901675829)


@jit
def small_value(code, PANEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the float32 of codes of fewer than 8 bits: `CODEBOOKS`, or integers as 2^23 plus the code."""
    if PANEL.code == "iq4":
        low = tl.where(code < 4, IQ4_0, IQ4_1)
        four = tl.where(code < 8, low, tl.where(code < 12, IQ4_2, IQ4_3))
        value = ((four << (24 - (code & 3) * 8)) >> 24).to(tl.float32)
    else:
        value = (code | 0x4B000000).to(tl.float32, bitcast=True)
    return value


@jit
def iq1_value(words, signs, i, grids, PANEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the float32 of element i of rows that are int8, one unit more or less; arguments as of
    `grid_value`.
    """
    number = tl.where(i // 8 == 0, words & 2047, ((words >> 11) & 31) | (signs & 63) << 5)
    four = tl.load(grids + PANEL.grid_begin + number * 2 + i % 8 // 4)
    less = signs >> 8 if PANEL.code == "iq1_s" else signs >> (6 + i // 8)
    whole = ((four << (24 - i % 4 * 8)) >> 24) + 1 - 2 * (less & 1)
    return whole.to(tl.float32) * PANEL.grid_unit


@jit
def digit_value(words, more, i):  # type: ignore[no-untyped-def]
    """Returns the float32 of digit i, -1, 0 or 1, of 32 to the base of 3: 20 in a word, 12 in `more`."""
    moved = tl.where(i < 20, words >> (i % 4 * 8), more >> tl.where(i < 30, i % 2 * 8, i % 2 * 2 + 16))
    place = tl.where(i < 20, i // 4, i // 2 - 10)
    power = tl.where(place == 1, 3, 1) * tl.where(place == 2, 9, 1) * tl.where(place == 3, 27, 1)
    # The last two have 2 bits each, which are moved to a byte's upper end.
    power *= tl.where(place == 4, 81, tl.where(place == 5, 64, 1))
    byte = ((moved * power) << 24) >> 24
    return (byte > 42).to(tl.float32) - (byte < -42).to(tl.float32)


@jit
def grid_value(words, signs, i, grids, PANEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the float32 of element i of words of numbers of rows, and of the signs that go with them
    (`high_words`).
    """
    if PANEL.code == "iq2_xs" or PANEL.code == "iq2_s":
        number = (words >> (i // 8 * 16)) & (1023 if PANEL.code == "iq2_s" else 511)
    elif PANEL.code == "iq3_s":
        own = words >> tl.where(i // 4 == 0, 0, tl.where(i // 4 == 1, 10, 23))
        number = tl.where(i // 4 == 3, signs >> 16, own) & 511
    else:
        number = (words >> (i // PANEL.grid_row * 8)) & 255
    at = PANEL.grid_begin + number * (PANEL.grid_row // 4) + i % PANEL.grid_row // 4
    magnitude = (tl.load(grids + at) >> (i % 4 * 8)) & 255
    if PANEL.code == "iq3_s":
        both = (signs & 0x7FF) | ((words >> 8) & 0x7800) | ((words << 6) & 0x8000)
        eight = both >> (i // 8 * 8)
    elif PANEL.code == "iq2_s":
        eight = ((words >> (i // 8 * 16 + 10)) & 63) | ((signs >> (i // 8 * 2)) & 3) << 6
    else:
        is_paired: tl.constexpr = PANEL.code == "iq2_xs"
        stored = (words >> (i // 8 * 16 + 9) if is_paired else signs >> (i // 8 * 7)) & 127
        folded = stored ^ (stored >> 4)
        folded = folded ^ (folded >> 2)
        # The eighth sign makes the number of ones even.
        eight = stored | ((folded ^ (folded >> 1)) & 1) << 7
    negative = (eight >> (i % 8)) & 1
    value = magnitude.to(tl.float32) * PANEL.grid_unit
    return tl.where(negative != 0, -value, value)


@jit
def low_words(words, panel, line, column, PANEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns int32 words of lines, which have 32 // PANEL.low_bits elements each; `panel` in words."""
    half = 0
    if PANEL.is_iq1:
        # Lines of 16 k, which are halves of words.
        half = line % 2 * 16
        line = line // 2
    elif PANEL.code == "iq3_s":
        line = line // 2 * 3 + line % 2 * 2
    elif PANEL.high_bits and PANEL.code != "iq2_s":
        # In 32 k as many lines of either plane as that has bits.
        line = line // PANEL.low_bits * PANEL.bits + line % PANEL.low_bits
    return tl.load(words + panel + line * 16 + column) >> half


@jit
def high_words(words, panel, line, column, PANEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """For the lines of `low_words` those with the elements' high bits, moved to where element 0 begins.

    Of rows of a grid signs; of iq3_s those that words lack, and the fourth number from bit 16 on.
    """
    if PANEL.code == "iq2_s" or PANEL.code == "iq3_s":
        at = panel + PANEL.signs_offset // 4 + line // 2 * 4 + column // 4
        high = tl.load(words + at) >> (column % 4 * 8 + line % 2 * 4)
        if PANEL.code == "iq3_s":
            shared = tl.load(words + panel + (line // 2 * 3 + 1) * 16 + column)
            number = (shared >> (line % 2 * 23)) & 511
            high = (high & 15) | ((shared >> (9 + line % 2 * 7)) & 127) << 4 | number << 16
    elif PANEL.is_iq1:
        at = panel + PANEL.signs_offset // 4 + line // 2 * 8 + column // 2
        half = tl.load(words + at) >> (column % 2 * 16)
        # A byte of two, and above it whether all 32 k are less.
        high = ((half >> (line % 2 * 8)) & 255) | ((half >> 15) & 1) << 8
    elif PANEL.code == "tq1":
        at = panel + PANEL.signs_offset // 4
        half = tl.load(words + at + line * 8 + column // 2) >> (column % 2 * 16)
        bits = tl.load(words + at + PANEL.k_padded // 4 + line // 2 * 4 + column // 4)
        high = (half & 0xFFFF) | ((bits >> (column % 4 * 8 + line % 2 * 4)) & 15) << 16
    elif PANEL.code == "iq2_xs":
        high = 0
    elif PANEL.is_grid:
        held = line // PANEL.low_bits * PANEL.bits + PANEL.low_bits
        # Seven bits for eight k.
        high = tl.load(words + panel + held * 16 + column) >> (line % PANEL.low_bits * 14)
    elif PANEL.high_bits:
        in_line: tl.constexpr = 8 // PANEL.high_bits
        vector = line % PANEL.low_bits * (8 // PANEL.low_bits)
        held = line // PANEL.low_bits * PANEL.bits + PANEL.low_bits + vector // in_line
        high = tl.load(words + panel + held * 16 + column) >> (vector % in_line * PANEL.high_bits)
    else:
        high = 0
    return high


@jit
def load_scales(  # type: ignore[no-untyped-def]
    scales, bytes_, section, group, column, mask, PANEL: tl.constexpr, MINS: tl.constexpr = False
):
    """float32 of a group's scales or mins; `section`: their first byte.

    `scales` points to the scale type, to its bits, or to the factors of products.
    """
    if PANEL.scale == "products":
        at = section // 2 + group // PANEL.factor_groups * 16
        factor = tl.load(scales + at + column, mask=mask, other=0).to(tl.float32)
        if PANEL.joined and MINS:
            section += PANEL.scales_offset - PANEL.mins_offset
        if PANEL.whole_low_bits:
            at = section + PANEL.whole_offset + column
            whole = scale_field(bytes_, at, group, mask, PANEL.whole_low_bits)
            if PANEL.whole_high_bits:
                at = section + PANEL.whole_high_offset + column
                high = scale_field(bytes_, at, group, mask, PANEL.whole_high_bits)
                whole |= high << PANEL.whole_low_bits
            middle: tl.constexpr = 1 << (PANEL.whole_low_bits + PANEL.whole_high_bits - 1)
            whole = whole * 2 + 1 if PANEL.is_grid else whole - middle
        elif PANEL.is_iq1:
            at = section + (PANEL.signs_offset - PANEL.scales_offset) + (group * 16 + column) * 2
            low = tl.load(bytes_ + at, mask=mask, other=0).to(tl.int32) >> 6
            third = (tl.load(bytes_ + at + 1, mask=mask, other=0).to(tl.int32) >> 6) & 1
            whole = (low | third << 2) * 2 + 1
        elif PANEL.code == "tq1":
            whole = 1
        elif PANEL.is_grid:
            # The upper half of the last byte of the group's last word.
            at = section - PANEL.scales_offset + ((group + 1) * PANEL.bits - 1) * 64 + 3
            whole = (tl.load(bytes_ + at + column * 4, mask=mask, other=0).to(tl.int32) >> 4) * 2 + 1
        else:
            at = section + PANEL.whole_offset + group * 16
            whole = tl.load(bytes_ + at + column, mask=mask, other=0).to(tl.int32)
            half = whole >> 4 if MINS else whole & 15
            whole = half if PANEL.joined else (whole << 24) >> 24
        value = factor if PANEL.code == "tq1" else factor * whole.to(tl.float32)
    else:
        raw = tl.load(scales + scale_index(section, group, column, PANEL), mask=mask, other=0)
        if PANEL.scale == "e8m0":
            bits = raw.to(tl.int32)
            # 2^-127 is no normal float32.
            value = tl.where(bits == 0, 0x00400000, bits << 23).to(tl.float32, bitcast=True)
            value = tl.where(bits == 255, float("nan"), value)
        elif PANEL.scale == "e4m3":
            value = decode_e4m3(raw.to(tl.int32))
        else:
            value = raw.to(tl.float32)
    return value


@jit
def scale_field(bytes_, section, group, mask, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns int32: BITS of a group's bytes, of which groups that share one come lowest first."""
    in_byte: tl.constexpr = 8 // BITS
    held = tl.load(bytes_ + section + group // in_byte * 16, mask=mask, other=0).to(tl.int32)
    return (held >> (group % in_byte * BITS)) & ((1 << BITS) - 1)


@jit
def scale_index(section, group, column, PANEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns where the scale (or minimum) of a group and column lies, in elements; `section`: their first
    byte.
    """
    if PANEL.scale == "float32":
        begin = section // 4
    elif PANEL.scale == "bfloat16" or PANEL.scale == "float16":
        begin = section // 2
    else:
        begin = section
    return begin + group if PANEL.panel_scale else begin + group * 16 + column


@jit
def element_place(words, order, k, PANEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns which element of a row meets the panels' k; beyond the last one k itself."""
    if PANEL.ordered:
        place = tl.where(k < PANEL.k, tl.load(words + order + k, mask=k < PANEL.k, other=0), k)
    else:
        place = k
    return place


@jit
def dequantised(  # type: ignore[no-untyped-def]
    words, scales, bytes_, grids, panel, line, column, PANEL: tl.constexpr
):
    """Returns float32 [L, k of a line, N]: weights of lines int32 [L] and columns [1, N], scales and mins
    applied.

    `panel`: the panels' first byte, one for all columns, or int64 [1, N].
    """
    per_word: tl.constexpr = 32 // PANEL.low_bits
    packed = low_words(words, panel // 4, line[:, None], column, PANEL)
    high = high_words(words, panel // 4, line[:, None], column, PANEL)
    if PANEL.high_bits:
        high = high[:, None, :]
    value = element(packed[:, None, :], high, tl.arange(0, per_word)[None, :, None], grids, PANEL)
    if PANEL.group_size:
        group = (line * per_word // PANEL.group_size)[:, None]
        # The last group may end before the padding does.
        inside = (line * per_word < PANEL.k)[:, None]
        if not PANEL.panel_scale or len(panel.shape) == 2:
            inside = inside & (column >= 0)
    if PANEL.zeros:
        at = panel + PANEL.zeros_offset + group * 16 + column
        zero = tl.load(bytes_ + at, mask=inside, other=0).to(tl.float32) + INTEGER_BASE
        value -= zero[:, None, :]
    elif PANEL.is_small_integer:
        value -= INTEGER_BASE + PANEL.middle
    if PANEL.group_size:
        scale = load_scales(scales, bytes_, panel + PANEL.scales_offset, group, column, inside, PANEL)
        value *= scale[:, None, :]
    if PANEL.mins:
        minimum = load_scales(scales, bytes_, panel + PANEL.mins_offset, group, column, inside, PANEL, True)
        value += minimum[:, None, :]
    return value


@jit
def plain_tile(codes, panel, column, begin, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns bfloat16 [CHUNK, N] straight from memory: in pairs of k, so that it may be copied in
    advance.
    """
    k = begin + tl.arange(0, CHUNK)
    place = tl.max_contiguous(tl.multiple_of(k // 2 * 32 + k % 2, 2), 2)
    return tl.load(codes + (panel // 2 + column * 2)[None, :] + place[:, None])


@jit
def add_product(  # type: ignore[no-untyped-def]
    total, x, words, scales, bytes_, grids, panel, column, begin,
    PANEL: tl.constexpr, CHUNK: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Returns total [M, N] plus x [M, CHUNK] times the weights of k from `begin`; `panel` int64 [N] bytes."""
    if PANEL.code == "bfloat16":
        weights = plain_tile(scales, panel, column, begin, CHUNK)
    else:
        per_word: tl.constexpr = 32 // PANEL.low_bits
        line = begin // per_word + tl.arange(0, CHUNK // per_word)
        value = dequantised(words, scales, bytes_, grids, panel[None, :], line, column[None, :], PANEL)
        weights = tl.reshape(value, [CHUNK, total.shape[1]])
    return tl.dot(x, weights.to(TYPE), total, input_precision=PRECISION)


@jit
def finish_tile(total, floats, panel, column, PANEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Applies scales of whole columns and adds biases; float32 [M, N]."""
    if PANEL.column_scale:
        total *= tl.load(floats + (panel + PANEL.column_scale_offset) // 4 + column)[None, :]
    if PANEL.has_bias:
        total += tl.load(floats + (panel + PANEL.bias_offset) // 4 + column)[None, :]
    return total
