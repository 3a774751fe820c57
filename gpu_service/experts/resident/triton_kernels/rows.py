"""Products of few rows with packed experts, where reading the weights is all that counts.

One program multiplies one row with one panel, or a pair of them, of one chosen expert, and down with the same
panel of all chosen experts, whose weighted sum it writes. Programs of an expert that is not in a slot end at
once. Every word is loaded once, in whole lines, and `AHEAD` tiles of them before the first one is multiplied:
the compiler would otherwise load late, to save registers, and wait for memory each time. A tile has fewer
lines than threads (`panel_sizes.lines`): then the compiler loads the row where it is used, without exchanges.
"""

from __future__ import annotations

import triton.language as tl

from gpu_service.experts.resident.triton_kernels.gemm import activate, slot_of
from gpu_service.ops.triton.jit import jit, jit_for_any, wait_for_previous
from gpu_service.ops.triton.panel_lines import finish, line_products, load_lines

# Bytes that one request to the cache brings in.
CACHE_LINE = tl.constexpr(128)


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


@jit
def panel_products(  # type: ignore[no-untyped-def]
    row, words, scales, bytes_, grids, panel, order, exponent, PANEL: tl.constexpr, LINES: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Returns float32 [LINES, 16]: the products of a row with one panel, to be summed over the lines."""
    num_lines: tl.constexpr = PANEL.k_padded * PANEL.low_bits // 32
    total = tl.zeros([LINES, 16], tl.float32)
    for begin in range(0, num_lines, LINES * AHEAD):
        loaded = ()
        for n in tl.static_range(AHEAD):
            line = begin + n * LINES + tl.arange(0, LINES)
            loaded += (load_lines(words, scales, bytes_, panel, line, PANEL),)  # type: ignore[assignment]
        tl.debug_barrier()
        for n in tl.static_range(AHEAD):
            line = begin + n * LINES + tl.arange(0, LINES)
            total += line_products(row, loaded[n], words, grids, order, line, exponent, PANEL)
    return total


@jit_for_any("exponent")
def gate_up_rows(  # type: ignore[no-untyped-def]
    x, words, gate_scales, scales, bytes_, grids, floats, ids, slot_of_expert, intermediate, alpha, limit,
    exponent, TOP_K: tl.constexpr, EXPERT_BYTES: tl.constexpr, ORDER_AT: tl.constexpr, DOWN_AT: tl.constexpr,
    INTERMEDIATE_COLUMNS: tl.constexpr, GATE: tl.constexpr, PANEL: tl.constexpr, MIXED: tl.constexpr,
    GATE_STEP: tl.constexpr, UP_AT: tl.constexpr, UP_STEP: tl.constexpr, ACTIVATION: tl.constexpr,
    GATE_LINES: tl.constexpr, GATE_AHEAD: tl.constexpr, LINES: tl.constexpr, AHEAD: tl.constexpr,
    PREFETCHED: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (pair, block of 16 channels): intermediate [pairs, INTERMEDIATE_COLUMNS] of a pair's expert.

    MIXED: gate's panels are of another format than up's, and read first. It also prefetches its part of what
    `down_rows` will read, PREFETCHED cache lines.
    """
    wait_for_previous(OVERLAPS)
    pair, block = tl.program_id(0), tl.program_id(1)
    slot = slot_of(ids, slot_of_expert, pair)
    if slot < 0:
        return
    IS_GATED: tl.constexpr = ACTIVATION != "relu2"
    gate = slot.to(tl.int64) * EXPERT_BYTES + block * GATE_STEP
    row = x + (pair // TOP_K) * PANEL.k
    order = (slot.to(tl.int64) * EXPERT_BYTES + ORDER_AT) // 4
    up = slot.to(tl.int64) * EXPERT_BYTES + UP_AT + block * UP_STEP
    down = slot.to(tl.int64) * EXPERT_BYTES + DOWN_AT + block * (PREFETCHED * CACHE_LINE)
    num_lines: tl.constexpr = PANEL.k_padded * PANEL.low_bits // 32
    # No loop of none: the compiler reads its body, where gate's tiles do not fit up's.
    if MIXED:
        if OVERLAPS and PREFETCHED:
            prefetch(bytes_, down, PREFETCHED, BLOCK)
        g = panel_products(
            row, words, gate_scales, bytes_, grids, gate, order, exponent, GATE, GATE_LINES, GATE_AHEAD
        )
        u = panel_products(row, words, scales, bytes_, grids, up, order, exponent, PANEL, LINES, AHEAD)
    else:
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
                    g += line_products(row, gates[n], words, grids, order, line, exponent, PANEL)
                u += line_products(row, ups[n], words, grids, order, line, exponent, PANEL)
    g = tl.sum(g, 0)
    if IS_GATED:
        g = finish(g, floats, gate, GATE)
    u = finish(tl.sum(u, 0), floats, up, PANEL)
    value = activate(g, u, alpha, limit, ACTIVATION)
    target = intermediate + pair * INTERMEDIATE_COLUMNS + block * 16 + tl.arange(0, 16)
    tl.store(target, value.to(intermediate.dtype.element_ty))


@jit_for_any("exponent")
def down_rows(  # type: ignore[no-untyped-def]
    intermediate, words, scales, bytes_, grids, floats, ids, slot_of_expert, weights, partial, result,
    exponent, TOP_K: tl.constexpr, EXPERT_BYTES: tl.constexpr, DOWN_AT: tl.constexpr, HIDDEN: tl.constexpr,
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
            total += line_products(x, loaded[n], words, grids, 0, begin + n * LINES + line, exponent, PANEL)
    total = tl.sum(tl.reshape(total, [CHOICES, LINES, 16]), 1)
    weight = tl.load(weights + row * TOP_K + choice, mask=choice < TOP_K, other=0.0)
    value = finish(total, floats, panel[:, None], PANEL) * weight[:, None]
    # What was not computed may hold anything.
    value = tl.sum(tl.where((slot >= 0)[:, None], value, 0.0), 0)
    if HAS_PARTIAL:
        value += tl.load(partial + place, mask=column < HIDDEN, other=0.0).to(tl.float32)
    tl.store(result + place, value, mask=column < HIDDEN)
