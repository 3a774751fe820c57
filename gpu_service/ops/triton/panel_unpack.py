"""Panels back to plain matrices, for products of many rows; `PANEL` is a `PanelFormat`."""

from __future__ import annotations

import triton.language as tl

from gpu_service.ops.triton.jit import jit_for_any
from gpu_service.ops.triton.panel_elements import dequantised, element_place


@jit_for_any("first")
def unpack(  # type: ignore[no-untyped-def]
    words, scales, bytes_, grids, floats, output, first, EXPERT_BYTES: tl.constexpr, AT: tl.constexpr,
    ORDER_AT: tl.constexpr, GATED: tl.constexpr, PANEL: tl.constexpr, PANELS: tl.constexpr,
    LINES: tl.constexpr, SCALED: tl.constexpr, TURN: tl.constexpr = -1,
):  # fmt: skip
    """Program (slot - first, panel of PANELS): 16 features of output [slots, PANELS * 16, PANEL.k_padded].

    GATED: panels alternate between gate and up. TURN: they are gate's (0) or up's (1) alone, and of the
    output's 2 * PANELS * 16 features every second one is theirs. Columns of an ordered format get back their
    places in rows.
    SCALED: scales of whole columns are applied, too.
    """
    slot, index = tl.program_id(0).to(tl.int64), tl.program_id(1)
    panel = (first + slot) * EXPERT_BYTES + AT + index * PANEL.panel_bytes
    order = ((first + slot) * EXPERT_BYTES + ORDER_AT) // 4
    per_word: tl.constexpr = 32 // PANEL.low_bits
    column = tl.arange(0, 16)
    feature = index // 2 * 32 + column * 2 + index % 2 if GATED else index * 16 + column
    EVERY: tl.constexpr = 2 if TURN >= 0 else 1
    if TURN >= 0:
        feature = feature * 2 + TURN
    target = output + (slot * (EVERY * PANELS * 16) + feature) * PANEL.k_padded
    num_lines: tl.constexpr = PANEL.k_padded // per_word
    for begin in range(0, num_lines, LINES):
        line = begin + tl.arange(0, LINES)
        value = dequantised(words, scales, bytes_, grids, panel, line, column[None, :], PANEL)
        k = begin * per_word + tl.arange(0, LINES * per_word)
        plain = tl.reshape(value, [LINES * per_word, 16])
        if SCALED and PANEL.column_scale:
            plain *= tl.load(floats + (panel + PANEL.column_scale_offset) // 4 + column)[None, :]
        if PANEL.k != PANEL.k_padded:
            plain = tl.where((k < PANEL.k)[:, None], plain, 0.0)
        plain = tl.trans(plain).to(output.dtype.element_ty)
        place = element_place(words, order, k, PANEL)
        if PANEL.ordered:
            # Slots without an expert, which are never read, are unpacked as well: they may hold any numbers.
            place = tl.where((place >= 0) & (place < PANEL.k_padded), place, k)
        tl.store(target[:, None] + place[None, :], plain)
