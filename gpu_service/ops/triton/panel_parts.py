"""Tiles of 4-bit codes for tensor cores, 32 k at a time; `PANEL` is a `PanelFormat`.

The codes themselves are multiplied, which bfloat16 holds, and the sums of a part are scaled: that takes
fewer instructions than to dequantise weights one by one, which bound products of 16 to 64 rows. Two codes
that are 16 bits apart in a word (`element_shift`) are set into the mantissas of two bfloat16 numbers of known
exponent at once, as in Marlin (Frantar et al., 2024).

A loop loads the words of the part after the next one, decodes those of the next one and multiplies this
one's. Since the decoded tile comes from the iteration before, the compiler gives it the layout of a bfloat16
tile from memory, whose registers tensor cores take as they are.
"""

from __future__ import annotations

import triton.language as tl

from gpu_service.ops.triton.jit import jit
from gpu_service.ops.triton.panel_elements import INTEGER_BASE, element, load_scales, low_words

# k of a part: what every format with group scales has in one group.
PART = 32
# The bits of 128.0 in bfloat16, twice: after it, a mantissa's last four bits are whole numbers.
BASES = 0x43004300
_MINUS_BASES = tl.constexpr(0xC300C300 - (1 << 32))
# 1.0, 2^126 and -0.0, twice each.
_ONES, _FLOAT4_FACTORS = tl.constexpr(0x3F803F80), tl.constexpr(0x7E807E80)
_MINUS_ZEROS = tl.constexpr(0x80008000 - (1 << 32))


@jit
def load_part(  # type: ignore[no-untyped-def]
    words, scales, bytes_, panel, column, begin, PANEL: tl.constexpr, LENGTH: tl.constexpr
):
    """Returns int32 words [LENGTH / 8, N] of k from `begin`, and int32 [N] zero points, float32 [N] scales
    and mins of their group; anything past the last k, 0 for what a format lacks. `panel`: int64 [N] bytes.
    """
    begin = tl.minimum(begin, PANEL.k_padded - LENGTH)
    line = begin // 8 + tl.arange(0, LENGTH // 8)
    packed = low_words(words, panel[None, :] // 4, line[:, None], column[None, :], PANEL)
    # The last group may end before the padding does.
    inside = (column >= 0) & (begin < PANEL.k)
    group = begin // PANEL.group_size
    scale = load_scales(scales, bytes_, panel + PANEL.scales_offset, group, column, inside, PANEL)
    zero, minimum = tl.zeros([1], tl.int32), tl.zeros([1], tl.float32)
    if PANEL.zeros:
        at = panel + PANEL.zeros_offset + group * 16 + column
        zero = tl.load(bytes_ + at, mask=inside, other=0).to(tl.int32)
    if PANEL.mins:
        minimum = load_scales(scales, bytes_, panel + PANEL.mins_offset, group, column, inside, PANEL, True)
    return packed, zero, scale, minimum


@jit
def _multiply_add(pairs, factors, addends):  # type: ignore[no-untyped-def]
    """Returns int32 of two bfloat16 each: pairs * factors + addends."""
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;",
        "=r,r,r,r",
        [pairs, factors, addends],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@jit
def _two(  # type: ignore[no-untyped-def]
    words, zero, bases, n: tl.constexpr, PANEL: tl.constexpr, BY_PAIRS: tl.constexpr
):
    """Returns [L, N, 2]: elements 2 n and 2 n + 1 of int32 words [L, N], less zero points [1, N]; float32
    where they are not made by pairs.
    """
    if BY_PAIRS:
        if PANEL.code == "float4":
            sign = (words << (12 - 4 * n)) & (0x80008000 - (1 << 32))
            moved = words << (6 - 4 * n) if n < 2 else words >> (4 * n - 6)
            pairs = _multiply_add(sign | (moved & 0x01C001C0), _FLOAT4_FACTORS, _MINUS_ZEROS)
        else:
            excess = _MINUS_BASES + (zero if PANEL.zeros else PANEL.middle) * 0x00010001
            pairs = _multiply_add(((words >> (4 * n)) & 0x000F000F) | bases, _ONES, excess)
        low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        excess = zero.to(tl.float32)
        if PANEL.is_small_integer:
            excess += INTEGER_BASE if PANEL.zeros else INTEGER_BASE + PANEL.middle
        low = element(words, 0, 2 * n, 0, PANEL) - excess
        high = element(words, 0, 2 * n + 1, 0, PANEL) - excess
    return tl.join(low, high)


@jit
def part_codes(words, zero, bases, PANEL: tl.constexpr, BY_PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns [8 L, N]: the codes of int32 words [L, N] less zero points [N].

    BY_PAIRS, in bfloat16, is what GPUs do; Triton's interpreter has neither assembly nor arithmetic in
    bfloat16, and takes float32. `bases` is `BASES` as an argument of the kernel: of two constants the
    compiler would make two instructions.
    """
    zero = zero[None, :]
    first = tl.join(
        _two(words, zero, bases, 0, PANEL, BY_PAIRS), _two(words, zero, bases, 1, PANEL, BY_PAIRS)
    )
    last = tl.join(_two(words, zero, bases, 2, PANEL, BY_PAIRS), _two(words, zero, bases, 3, PANEL, BY_PAIRS))
    # [L, N, k % 2, k // 2 % 2, k // 4 % 2]
    eight = tl.join(first, last)
    return tl.reshape(tl.permute(eight, (0, 4, 3, 2, 1)), [words.shape[0] * 8, words.shape[1]])


@jit
def add_part(total, x, codes, scale, minimum, PANEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns total [M, N] plus x [M, LENGTH] times a part's weights."""
    x = x.to(codes.dtype)
    total += tl.dot(x, codes, input_precision="ieee") * scale[None, :]
    if PANEL.mins:
        # The rows' sums in every column: by tensor cores, whose results lie where the products' do.
        ones = tl.full(codes.shape, 1.0, codes.dtype)
        total += tl.dot(x, ones, input_precision="ieee") * minimum[None, :]
    return total
