"""Few rows: one program multiplies one row with one panel, or a pair of them, of one chosen expert.

Reading weights is all that counts: every word is loaded once, in whole lines. A program has fewer lines than
threads (`launch.lines`): then the compiler loads the row where it is used, without exchanges in between.
Programs of an expert that is not in a slot end at once.
"""

from __future__ import annotations

import triton.language as tl

from gpu_service.experts.resident.triton_kernels.elements import (
    INT4_BASE,
    INT4_OFFSET,
    activate,
    element,
    element_shift,
    load_scales,
    scale_index,
)
from gpu_service.ops.triton.jit import jit


@jit
def slot_of(ids, slot_of_expert, pair):  # type: ignore[no-untyped-def]
    """The slot of a (row, choice) pair's expert; -1: none."""
    expert = tl.load(ids + pair)
    slot = tl.load(slot_of_expert + tl.maximum(expert, 0))
    return tl.where(expert >= 0, slot, -1)


@jit
def line_products(  # type: ignore[no-untyped-def]
    x, words, scales, bytes_, panel, begin, PANEL: tl.constexpr, LINES: tl.constexpr
):
    """float32 [LINES, 16]: for each line from `begin`, its elements times those of the row at `x`, summed."""
    per_word: tl.constexpr = 32 // PANEL.bits
    line, column = begin + tl.arange(0, LINES), tl.arange(0, 16)
    packed = tl.load(words + panel // 4 + line[:, None] * 16 + column[None, :])
    if PANEL.group:
        group = (line * per_word // PANEL.group)[:, None]
        # The last group may end before the padding does.
        in_groups = (line * per_word < PANEL.k)[:, None]
        if not PANEL.panel_scale:
            in_groups = in_groups & (column >= 0)[None, :]
    if PANEL.zeros:
        at = panel + PANEL.zeros_at + group * 16 + column[None, :]
        offset = tl.load(bytes_ + at, mask=in_groups, other=0).to(tl.float32) + INT4_BASE
    product = tl.zeros([LINES, 16], tl.float32)
    row_sum = tl.zeros([LINES], tl.float32)
    for i in tl.static_range(per_word):
        k = line * per_word + i
        if PANEL.k == PANEL.k_padded:
            row = tl.load(x + k).to(tl.float32)
        else:
            row = tl.load(x + k, mask=k < PANEL.k, other=0.0).to(tl.float32)
        value = element(packed, element_shift(i, PANEL), PANEL)
        if PANEL.zeros:
            value -= offset
        elif PANEL.code == "int4":
            value -= INT4_BASE if PANEL.minimums else INT4_OFFSET
        product += row[:, None] * value
        if PANEL.minimums:
            row_sum += row
    if PANEL.group:
        index = scale_index(panel + PANEL.scales_at, group, column[None, :], PANEL)
        product *= load_scales(scales, index, in_groups, PANEL)
    if PANEL.minimums:
        index = scale_index(panel + PANEL.minimums_at, group, column[None, :], PANEL)
        product += row_sum[:, None] * load_scales(scales, index, in_groups, PANEL)
    return product


@jit
def finish(result, floats, panel, PANEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales of whole columns, and biases; float32 [16]."""
    column = tl.arange(0, 16)
    if PANEL.column_scale:
        result *= tl.load(floats + (panel + PANEL.column_scale_at) // 4 + column)
    if PANEL.bias:
        result += tl.load(floats + (panel + PANEL.bias_at) // 4 + column)
    return result


@jit
def gate_up_rows(  # type: ignore[no-untyped-def]
    x, words, scales, bytes_, floats, ids, slot_of_expert, neurons, alpha, limit,
    TOP_K: tl.constexpr, EXPERT_BYTES: tl.constexpr, NEURON_COLUMNS: tl.constexpr, PANEL: tl.constexpr,
    ACTIVATION: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Program (pair, block of 16 neurons): neurons [pairs, NEURON_COLUMNS] of a pair's expert."""
    pair, block = tl.program_id(0), tl.program_id(1)
    slot = slot_of(ids, slot_of_expert, pair)
    if slot < 0:
        return
    gate = slot.to(tl.int64) * EXPERT_BYTES + block * (2 * PANEL.panel_bytes)
    row = x + (pair // TOP_K) * PANEL.k
    up = gate + PANEL.panel_bytes
    num_lines: tl.constexpr = PANEL.k_padded * PANEL.bits // 32
    g = tl.zeros([LINES, 16], tl.float32)
    u = tl.zeros([LINES, 16], tl.float32)
    # One loop for both, so that both loads are under way together.
    for begin in range(0, num_lines, LINES):
        g += line_products(row, words, scales, bytes_, gate, begin, PANEL, LINES)
        u += line_products(row, words, scales, bytes_, up, begin, PANEL, LINES)
    g = finish(tl.sum(g, 0), floats, gate, PANEL)
    u = finish(tl.sum(u, 0), floats, up, PANEL)
    value = activate(g, u, alpha, limit, ACTIVATION)
    target = neurons + pair * NEURON_COLUMNS + block * 16 + tl.arange(0, 16)
    tl.store(target, value.to(neurons.dtype.element_ty))


@jit
def down_rows(  # type: ignore[no-untyped-def]
    neurons, words, scales, bytes_, floats, ids, slot_of_expert, outputs,
    EXPERT_BYTES: tl.constexpr, DOWN_AT: tl.constexpr, HIDDEN: tl.constexpr, NEURON_COLUMNS: tl.constexpr,
    PANEL: tl.constexpr, LINES: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """Program (pair, block of 16 columns): outputs float32 [pairs, HIDDEN], not yet weighted."""
    pair, block = tl.program_id(0), tl.program_id(1)
    slot = slot_of(ids, slot_of_expert, pair)
    if slot < 0:
        return
    panel = slot.to(tl.int64) * EXPERT_BYTES + DOWN_AT + block * PANEL.panel_bytes
    row = neurons + pair * NEURON_COLUMNS
    num_lines: tl.constexpr = PANEL.k_padded * PANEL.bits // 32
    total = tl.zeros([LINES, 16], tl.float32)
    if num_lines <= UNROLLED * LINES:
        for begin in tl.static_range(0, num_lines, LINES):
            total += line_products(row, words, scales, bytes_, panel, begin, PANEL, LINES)
    else:
        for begin in range(0, num_lines, LINES):
            total += line_products(row, words, scales, bytes_, panel, begin, PANEL, LINES)
    value = finish(tl.sum(total, 0), floats, panel, PANEL)
    column = block * 16 + tl.arange(0, 16)
    tl.store(outputs + pair.to(tl.int64) * HIDDEN + column, value, mask=column < HIDDEN)
