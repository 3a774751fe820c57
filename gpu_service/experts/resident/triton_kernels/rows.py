"""Products of few rows with packed experts, where reading the weights is all that counts.

One program multiplies one row with one panel, or a pair of them, of one chosen expert, and down with the same
panel of all chosen experts, whose weighted sum it writes. Programs of an expert that is not in a slot end at
once. Every word is loaded once, in whole lines, and `AHEAD` tiles of them before the first one is multiplied:
the compiler would otherwise load late, to save registers, and wait for memory each time. A tile has fewer
lines than threads (`launch.lines`): then the compiler loads the row where it is used, without exchanges.
"""

from __future__ import annotations

import triton.language as tl

from gpu_service.experts.resident.triton_kernels.gemm import (
    INTEGER_BASE,
    activate,
    element,
    element_place,
    high_words,
    load_scales,
    low_words,
    slot_of,
)
from gpu_service.ops.triton.jit import jit, jit_for_any, wait_for_previous

# Bytes that one request to the cache brings in.
CACHE_LINE = tl.constexpr(128)
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
def line_products(x, loaded, words, order, line, exponent, PANEL: tl.constexpr):  # type: ignore[no-untyped-def]
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
            value = element(packed, high, i, PANEL)
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


@jit
def prefetch(bytes_, begin, LINES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Brings LINES cache lines from byte `begin` on into the device's cache, and waits for nothing."""
    line = tl.minimum(tl.arange(0, BLOCK), LINES - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [bytes_ + begin + line * CACHE_LINE],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit_for_any("exponent")
def gate_up_rows(  # type: ignore[no-untyped-def]
    x, words, scales, bytes_, floats, ids, slot_of_expert, intermediate, alpha, limit, exponent,
    TOP_K: tl.constexpr, EXPERT_BYTES: tl.constexpr, ORDER_AT: tl.constexpr, DOWN_AT: tl.constexpr,
    INTERMEDIATE_COLUMNS: tl.constexpr, PANEL: tl.constexpr, ACTIVATION: tl.constexpr, LINES: tl.constexpr,
    AHEAD: tl.constexpr, PREFETCHED: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (pair, block of 16 channels): intermediate [pairs, INTERMEDIATE_COLUMNS] of a pair's expert.

    It also prefetches its part of what `down_rows` will read, PREFETCHED cache lines.
    """
    wait_for_previous(OVERLAPS)
    pair, block = tl.program_id(0), tl.program_id(1)
    slot = slot_of(ids, slot_of_expert, pair)
    if slot < 0:
        return
    IS_GATED: tl.constexpr = ACTIVATION != "relu2"
    gate = slot.to(tl.int64) * EXPERT_BYTES + block * ((1 + IS_GATED) * PANEL.panel_bytes)
    row = x + (pair // TOP_K) * PANEL.k
    order = (slot.to(tl.int64) * EXPERT_BYTES + ORDER_AT) // 4
    up = gate + IS_GATED * PANEL.panel_bytes
    down = slot.to(tl.int64) * EXPERT_BYTES + DOWN_AT + block * (PREFETCHED * CACHE_LINE)
    num_lines: tl.constexpr = PANEL.k_padded * PANEL.low_bits // 32
    g = tl.zeros([LINES, 16], tl.float32)
    u = tl.zeros([LINES, 16], tl.float32)
    for begin in range(0, num_lines, LINES * AHEAD):
        gates, ups = (), ()
        for n in tl.static_range(AHEAD):
            line = begin + n * LINES + tl.arange(0, LINES)
            if IS_GATED:
                gates += (load_lines(words, scales, bytes_, gate, line, PANEL),)  # type: ignore[assignment]
            ups += (load_lines(words, scales, bytes_, up, line, PANEL),)  # type: ignore[assignment]
        if OVERLAPS and PREFETCHED and begin == 0:
            prefetch(bytes_, down, PREFETCHED, BLOCK)
        tl.debug_barrier()
        for n in tl.static_range(AHEAD):
            line = begin + n * LINES + tl.arange(0, LINES)
            if IS_GATED:
                g += line_products(row, gates[n], words, order, line, exponent, PANEL)
            u += line_products(row, ups[n], words, order, line, exponent, PANEL)
    g = tl.sum(g, 0)
    if IS_GATED:
        g = finish(g, floats, gate, PANEL)
    u = finish(tl.sum(u, 0), floats, up, PANEL)
    value = activate(g, u, alpha, limit, ACTIVATION)
    target = intermediate + pair * INTERMEDIATE_COLUMNS + block * 16 + tl.arange(0, 16)
    tl.store(target, value.to(intermediate.dtype.element_ty))


@jit_for_any("exponent")
def down_rows(  # type: ignore[no-untyped-def]
    intermediate, words, scales, bytes_, floats, ids, slot_of_expert, weights, partial, result, exponent,
    TOP_K: tl.constexpr, EXPERT_BYTES: tl.constexpr, DOWN_AT: tl.constexpr, HIDDEN: tl.constexpr,
    INTERMEDIATE_COLUMNS: tl.constexpr, PANEL: tl.constexpr, HAS_PARTIAL: tl.constexpr,
    CHOICES: tl.constexpr, LINES: tl.constexpr, AHEAD: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (row, block of 16 columns): result = partial + sum of weight * product over the row's choices.

    All choices at once, in a tile of CHOICES (TOP_K or more) times LINES lines; those that are in no slot
    read another choice's panel, whose products count for nothing: no slot that the row does not need is read,
    since it may have no memory. The choices, and with them the weights, are read before `gate_up_rows` ends:
    it waited for the kernel that wrote them. L1 may hold older choices.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    choice, column = tl.arange(0, CHOICES), block * 16 + tl.arange(0, 16)
    place = row.to(tl.int64) * HIDDEN + column
    expert = tl.load(ids + row * TOP_K + choice, mask=choice < TOP_K, other=-1, cache_modifier=".cg")
    at = slot_of_expert + tl.maximum(expert, 0)
    slot = tl.load(at, mask=expert >= 0, other=-1, cache_modifier=".cg")
    some_slot = tl.max(slot, 0)
    if some_slot < 0:
        wait_for_previous(OVERLAPS)
        nothing = tl.zeros([16], tl.float32)
        if HAS_PARTIAL:
            nothing += tl.load(partial + place, mask=column < HIDDEN, other=0.0).to(tl.float32)
        tl.store(result + place, nothing, mask=column < HIDDEN)
        return
    read = tl.where(slot >= 0, slot, some_slot)
    panel = read.to(tl.int64) * EXPERT_BYTES + DOWN_AT + block * PANEL.panel_bytes
    x = intermediate + (row * TOP_K + tl.minimum(choice, TOP_K - 1)).to(tl.int64) * INTERMEDIATE_COLUMNS
    # Each choice's, once for every line.
    x = tl.reshape(tl.broadcast_to(x[:, None], [CHOICES, LINES]), [CHOICES * LINES])
    panels = tl.reshape(tl.broadcast_to(panel[:, None], [CHOICES, LINES]), [CHOICES * LINES, 1])
    # Lost by reshaping, and what vectors of words need.
    panels = tl.multiple_of(panels, [64, 64])
    line = tl.arange(0, CHOICES * LINES) % LINES
    num_lines: tl.constexpr = PANEL.k_padded * PANEL.low_bits // 32
    total = tl.zeros([CHOICES * LINES, 16], tl.float32)
    for begin in range(0, num_lines, LINES * AHEAD):
        loaded = ()
        for n in tl.static_range(AHEAD):
            lines = begin + n * LINES + line
            loaded += (load_lines(words, scales, bytes_, panels, lines, PANEL),)  # type: ignore[assignment]
        if begin == 0:
            wait_for_previous(OVERLAPS)
        tl.debug_barrier()
        for n in tl.static_range(AHEAD):
            total += line_products(x, loaded[n], words, 0, begin + n * LINES + line, exponent, PANEL)
    total = tl.sum(tl.reshape(total, [CHOICES, LINES, 16]), 1)
    weight = tl.load(weights + row * TOP_K + choice, mask=choice < TOP_K, other=0.0)
    value = finish(total, floats, panel[:, None], PANEL) * weight[:, None]
    # What was not computed may hold anything.
    value = tl.sum(tl.where((slot >= 0)[:, None], value, 0.0), 0)
    if HAS_PARTIAL:
        value += tl.load(partial + place, mask=column < HIDDEN, other=0.0).to(tl.float32)
    tl.store(result + place, value, mask=column < HIDDEN)
