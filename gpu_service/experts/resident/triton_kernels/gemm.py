"""GEMMs of many rows with packed experts; `PANEL` is a `PanelFormat`.

`gate_up_tiles` and `down_tiles` are tiles on tensor cores over blocks of pairs that share an expert. Weights
are dequantised in registers, group scales included, and rounded once to the type of the rows, as in
`dense.py`. Few rows: `rows.py`.
"""

from __future__ import annotations

import triton.language as tl

from gpu_service.ops.triton.jit import jit, jit_for_any
from gpu_service.ops.triton.panel_elements import add_product, element_place, finish_tile


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


@jit_for_any("count")
def gate_up_tiles(  # type: ignore[no-untyped-def]
    x, words, gate_scales, scales, bytes_, grids, floats, pairs, block_slots, intermediate, count, alpha,
    limit, TOP_K: tl.constexpr, EXPERT_BYTES: tl.constexpr, ORDER_AT: tl.constexpr,
    INTERMEDIATE_COLUMNS: tl.constexpr, GATE: tl.constexpr, PANEL: tl.constexpr, GATE_STEP: tl.constexpr,
    UP_AT: tl.constexpr, UP_STEP: tl.constexpr, ACTIVATION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
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
    for begin in range(0, PANEL.k, CHUNK):
        k = begin + tl.arange(0, CHUNK)
        wanted = held[:, None] & (k < PANEL.k)[None, :]
        place = element_place(words, order, k, PANEL)
        rows = tl.load(x + row[:, None] + place[None, :], mask=wanted, other=0.0).to(TYPE)
        if IS_GATED:
            g = add_product(
                g, rows, words, gate_scales, bytes_, grids, gate, column, begin, GATE, CHUNK, TYPE, PRECISION
            )
        u = add_product(
            u, rows, words, scales, bytes_, grids, up, column, begin, PANEL, CHUNK, TYPE, PRECISION
        )
    if IS_GATED:
        g = finish_tile(g, floats, gate, column, GATE)
    u = finish_tile(u, floats, up, column, PANEL)
    value = activate(g, u, alpha, limit, ACTIVATION)
    target = intermediate + pair.to(tl.int64)[:, None] * INTERMEDIATE_COLUMNS + channel[None, :]
    tl.store(target, value.to(intermediate.dtype.element_ty), mask=held[:, None] & inside[None, :])


@jit_for_any("count")
def down_tiles(  # type: ignore[no-untyped-def]
    intermediate, words, scales, bytes_, grids, floats, pairs, block_slots, outputs, count,
    EXPERT_BYTES: tl.constexpr, DOWN_AT: tl.constexpr, HIDDEN: tl.constexpr,
    INTERMEDIATE_COLUMNS: tl.constexpr,
    PANEL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
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
