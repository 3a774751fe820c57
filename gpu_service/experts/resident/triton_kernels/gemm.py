"""GEMMs of many rows with packed experts; `PANEL` is a `PanelFormat`.

`gate_up_tiles` and `down_tiles` are tiles on tensor cores over blocks of pairs that share an expert. Weights
are dequantised in registers, group scales included, and rounded once to the type of the rows, as in
`dense.py`; of 4 bits, codes are multiplied and sums scaled (`panel_parts.py`). Few rows: `rows.py`.
"""

from __future__ import annotations

import triton.language as tl

from gpu_service.ops.triton.jit import jit, jit_for_any
from gpu_service.ops.triton.panel_elements import add_product, element_place, finish_tile
from gpu_service.ops.triton.panel_parts import add_part, load_part, part_codes


@jit
def activate(gate, up, alpha, limit, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Computes what `gpu_service.experts.local_client` says, in float32; relu2 has no gate and ignores it."""
    if ACTIVATION == "silu":
        value = gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "silu_clamped":
        gate = tl.minimum(gate * tl.sigmoid(gate), limit)
        value = gate * tl.minimum(tl.maximum(up, -limit), limit)
    elif ACTIVATION == "gelu_tanh":
        # The tanh form of GELU, by the logistic function.
        value = gate * tl.sigmoid(gate * (1.5957691216057308 + 0.0713548162726 * gate * gate)) * up
    elif ACTIVATION == "relu2":
        up = tl.maximum(up, 0.0)
        value = up * up
    elif ACTIVATION == "clamped_silu":
        gate = tl.minimum(gate, limit)
        value = gate * tl.sigmoid(gate) * tl.minimum(tl.maximum(up, -limit), limit)
    else:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        value = (up + 1) * gate * tl.sigmoid(alpha * gate)
    return value


@jit
def slot_of(ids, slot_of_expert, pair):  # type: ignore[no-untyped-def]
    """Returns the slot of a (row, choice) pair's expert; negative: none."""
    expert = tl.load(ids + pair)
    slot = tl.load(slot_of_expert + tl.maximum(expert, 0))
    return tl.where(expert >= 0, slot, -1)


@jit
def gate_up_parts(  # type: ignore[no-untyped-def]
    g, u, x, held, words, gate_scales, scales, bytes_, gate, up, column, order, bases,
    GATE: tl.constexpr, PANEL: tl.constexpr, PART: tl.constexpr, IS_GATED: tl.constexpr,
    BY_PAIRS: tl.constexpr,
):  # fmt: skip
    """Returns g and u [M, N] plus the products of the rows that begin at x [M] with gate and up."""
    g_part = load_part(words, gate_scales, bytes_, gate, column, 0, GATE, PART)
    u_part = load_part(words, scales, bytes_, up, column, 0, PANEL, PART)
    g_codes = part_codes(g_part[0], g_part[1], bases, GATE, BY_PAIRS)
    u_codes = part_codes(u_part[0], u_part[1], bases, PANEL, BY_PAIRS)
    g_scale, g_min, u_scale, u_min = g_part[2], g_part[3], u_part[2], u_part[3]
    g_part = load_part(words, gate_scales, bytes_, gate, column, PART, GATE, PART)
    u_part = load_part(words, scales, bytes_, up, column, PART, PANEL, PART)
    rows = rows_of(x, held, words, order, 0, PANEL, PART)
    for begin in range(0, PANEL.k, PART):
        next_rows = rows_of(x, held, words, order, begin + PART, PANEL, PART)
        after_g = load_part(words, gate_scales, bytes_, gate, column, begin + 2 * PART, GATE, PART)
        after_u = load_part(words, scales, bytes_, up, column, begin + 2 * PART, PANEL, PART)
        next_g_codes = part_codes(g_part[0], g_part[1], bases, GATE, BY_PAIRS)
        next_u_codes = part_codes(u_part[0], u_part[1], bases, PANEL, BY_PAIRS)
        if IS_GATED:
            g = add_part(g, rows, g_codes, g_scale, g_min, GATE)
        u = add_part(u, rows, u_codes, u_scale, u_min, PANEL)
        rows, g_codes, u_codes = next_rows, next_g_codes, next_u_codes
        g_scale, g_min, u_scale, u_min = g_part[2], g_part[3], u_part[2], u_part[3]
        g_part, u_part = after_g, after_u
    return g, u


@jit
def down_parts(  # type: ignore[no-untyped-def]
    total, x, held, words, scales, bytes_, panel, column, bases, PANEL: tl.constexpr, PART: tl.constexpr,
    BY_PAIRS: tl.constexpr,
):  # fmt: skip
    """Returns total [M, N] plus the products of the rows that begin at x [M] with down."""
    part = load_part(words, scales, bytes_, panel, column, 0, PANEL, PART)
    codes, scale, minimum = part_codes(part[0], part[1], bases, PANEL, BY_PAIRS), part[2], part[3]
    part = load_part(words, scales, bytes_, panel, column, PART, PANEL, PART)
    rows = rows_of(x, held, words, 0, 0, PANEL, PART)
    for begin in range(0, PANEL.k, PART):
        next_rows = rows_of(x, held, words, 0, begin + PART, PANEL, PART)
        after = load_part(words, scales, bytes_, panel, column, begin + 2 * PART, PANEL, PART)
        next_codes = part_codes(part[0], part[1], bases, PANEL, BY_PAIRS)
        total = add_part(total, rows, codes, scale, minimum, PANEL)
        rows, codes, scale, minimum, part = next_rows, next_codes, part[2], part[3], after
    return total


@jit
def rows_of(x, held, words, order, begin, PANEL: tl.constexpr, LENGTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns [M, LENGTH]: what the rows that begin at x [M] have for k from `begin`; 0 past the last k."""
    k = begin + tl.arange(0, LENGTH)
    wanted = held[:, None] & (k < PANEL.k)[None, :]
    return tl.load(x[:, None] + element_place(words, order, k, PANEL)[None, :], mask=wanted, other=0.0)


@jit_for_any("count", "bases")
def gate_up_tiles(  # type: ignore[no-untyped-def]
    x, words, gate_scales, scales, bytes_, grids, floats, pairs, block_slots, intermediate, count, alpha,
    limit, bases, TOP_K: tl.constexpr, EXPERT_BYTES: tl.constexpr, ORDER_AT: tl.constexpr,
    INTERMEDIATE_COLUMNS: tl.constexpr, GATE: tl.constexpr, PANEL: tl.constexpr, GATE_STEP: tl.constexpr,
    UP_AT: tl.constexpr, UP_STEP: tl.constexpr, ACTIVATION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
    PART: tl.constexpr, BY_PAIRS: tl.constexpr,
):  # fmt: skip
    """Program (block of M pairs, N intermediate channels): intermediate [pairs, INTERMEDIATE_COLUMNS]."""
    slot = tl.load(block_slots + tl.program_id(0))
    if slot < 0:
        return
    pair = tl.load(pairs + tl.program_id(0) * M + tl.arange(0, M))
    held = pair < count
    channel = tl.program_id(1) * N + tl.arange(0, N)
    inside = channel < INTERMEDIATE_COLUMNS
    # Programs past the last panel compute the last one again and store nothing.
    block, column = tl.minimum(channel // 16, INTERMEDIATE_COLUMNS // 16 - 1), channel % 16
    IS_GATED: tl.constexpr = ACTIVATION != "relu2"
    gate = slot.to(tl.int64) * EXPERT_BYTES + block * GATE_STEP
    up = slot.to(tl.int64) * EXPERT_BYTES + UP_AT + block * UP_STEP
    row = (pair // TOP_K).to(tl.int64) * PANEL.k
    order = (slot.to(tl.int64) * EXPERT_BYTES + ORDER_AT) // 4
    g = tl.zeros([M, N], tl.float32)
    u = tl.zeros([M, N], tl.float32)
    if PART:
        g, u = gate_up_parts(
            g, u, x + row, held, words, gate_scales, scales, bytes_, gate, up, column, order, bases,
            GATE, PANEL, PART, IS_GATED, BY_PAIRS,
        )  # fmt: skip
    else:
        for begin in range(0, PANEL.k, CHUNK):
            k = begin + tl.arange(0, CHUNK)
            wanted = held[:, None] & (k < PANEL.k)[None, :]
            place = element_place(words, order, k, PANEL)
            rows = tl.load(x + row[:, None] + place[None, :], mask=wanted, other=0.0).to(TYPE)
            if IS_GATED:
                g = add_product(
                    g, rows, words, gate_scales, bytes_, grids, gate, column, begin, GATE, CHUNK, TYPE,
                    PRECISION,
                )  # fmt: skip
            u = add_product(
                u, rows, words, scales, bytes_, grids, up, column, begin, PANEL, CHUNK, TYPE, PRECISION
            )
    if IS_GATED:
        g = finish_tile(g, floats, gate, column, GATE)
    u = finish_tile(u, floats, up, column, PANEL)
    value = activate(g, u, alpha, limit, ACTIVATION)
    target = intermediate + pair.to(tl.int64)[:, None] * INTERMEDIATE_COLUMNS + channel[None, :]
    tl.store(target, value.to(intermediate.dtype.element_ty), mask=held[:, None] & inside[None, :])


@jit_for_any("count", "bases")
def down_tiles(  # type: ignore[no-untyped-def]
    intermediate, words, scales, bytes_, grids, floats, pairs, block_slots, outputs, count, bases,
    EXPERT_BYTES: tl.constexpr, DOWN_AT: tl.constexpr, HIDDEN: tl.constexpr,
    INTERMEDIATE_COLUMNS: tl.constexpr,
    PANEL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, TYPE: tl.constexpr,
    PRECISION: tl.constexpr, PART: tl.constexpr, BY_PAIRS: tl.constexpr,
):  # fmt: skip
    """Program (block of M pairs, N columns): outputs float32 [pairs, HIDDEN], not yet weighted."""
    slot = tl.load(block_slots + tl.program_id(0))
    if slot < 0:
        return
    pair = tl.load(pairs + tl.program_id(0) * M + tl.arange(0, M))
    held = pair < count
    feature = tl.program_id(1) * N + tl.arange(0, N)
    block, column = tl.minimum(feature // 16, (HIDDEN - 1) // 16), feature % 16
    panel = slot.to(tl.int64) * EXPERT_BYTES + DOWN_AT + block * PANEL.panel_bytes
    row = pair.to(tl.int64) * INTERMEDIATE_COLUMNS
    total = tl.zeros([M, N], tl.float32)
    if PART:
        total = down_parts(
            total,
            intermediate + row,
            held,
            words,
            scales,
            bytes_,
            panel,
            column,
            bases,
            PANEL,
            PART,
            BY_PAIRS,
        )
    else:
        for begin in range(0, PANEL.k, CHUNK):
            k = begin + tl.arange(0, CHUNK)
            wanted = held[:, None] & (k < PANEL.k)[None, :]
            rows = tl.load(intermediate + row[:, None] + k[None, :], mask=wanted, other=0.0).to(TYPE)
            total = add_product(
                total, rows, words, scales, bytes_, grids, panel, column, begin, PANEL, CHUNK, TYPE, PRECISION
            )
    total = finish_tile(total, floats, panel, column, PANEL)
    target = outputs + pair.to(tl.int64)[:, None] * HIDDEN + feature[None, :]
    tl.store(target, total, mask=held[:, None] & (feature < HIDDEN)[None, :])
