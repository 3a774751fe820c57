"""Many rows: tiles of tensor-core products over blocks of pairs that share an expert.

Codes are multiplied as they are, which bfloat16 holds exactly, and group scales are applied to the sums of
each group in float32.
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
from gpu_service.experts.resident.triton_kernels.jit import jit_any_count
from gpu_service.ops.triton.jit import jit


@jit
def plain_tile(codes, panel, column, begin, PANEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """bfloat16 [PANEL.chunk, N] straight from memory: in pairs of k, so that it may be copied in advance."""
    k = begin + tl.arange(0, PANEL.chunk)
    place = tl.max_contiguous(tl.multiple_of(k // 2 * 32 + k % 2, 2), 2)
    return tl.load(codes + (panel // 2 + column * 2)[None, :] + place[:, None])


@jit
def decoded_tile(words, bytes_, panel, column, begin, PANEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 [PANEL.chunk, N]: codes, zero points subtracted where there are any."""
    per_word: tl.constexpr = 32 // PANEL.bits
    lines: tl.constexpr = PANEL.chunk // per_word
    line = begin // per_word + tl.arange(0, lines)
    packed = tl.load(words + (panel // 4 + column)[None, :] + line[:, None] * 16)
    shift = element_shift(tl.arange(0, per_word), PANEL)
    value = element(packed[:, None, :], shift[None, :, None], PANEL)
    value = tl.reshape(value, [PANEL.chunk, packed.shape[1]])
    if PANEL.zeros:
        at = panel + PANEL.zeros_at + (begin // PANEL.group) * 16 + column
        value -= (tl.load(bytes_ + at).to(tl.float32) + INT4_BASE)[None, :]
    elif PANEL.code == "int4":
        value -= INT4_BASE if PANEL.minimums else INT4_OFFSET
    return value


@jit
def add_product(  # type: ignore[no-untyped-def]
    total, x, words, scales, bytes_, panel, column, begin,
    PANEL: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """total [M, N] plus x [M, PANEL.chunk] times the weights of k from `begin`; `panel` int64 [N] bytes."""
    if PANEL.code == "bfloat16":
        weights = plain_tile(scales, panel, column, begin, PANEL).to(TYPE)
    else:
        weights = decoded_tile(words, bytes_, panel, column, begin, PANEL).to(TYPE)
    if PANEL.group:
        index = scale_index(panel + PANEL.scales_at, begin // PANEL.group, column, PANEL)
        scale = load_scales(scales, index, column >= 0, PANEL)
        total += tl.dot(x, weights, input_precision=PRECISION) * scale[None, :]
        if PANEL.minimums:
            index = scale_index(panel + PANEL.minimums_at, begin // PANEL.group, column, PANEL)
            minimum = load_scales(scales, index, column >= 0, PANEL)
            total += tl.sum(x.to(tl.float32), 1)[:, None] * minimum[None, :]
    else:
        total = tl.dot(x, weights, total, input_precision=PRECISION)
    return total


@jit
def finish(total, floats, panel, column, PANEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales of whole columns, and biases."""
    if PANEL.column_scale:
        total *= tl.load(floats + (panel + PANEL.column_scale_at) // 4 + column)[None, :]
    if PANEL.bias:
        total += tl.load(floats + (panel + PANEL.bias_at) // 4 + column)[None, :]
    return total


@jit_any_count
def gate_up_tiles(  # type: ignore[no-untyped-def]
    x, words, scales, bytes_, floats, pairs, block_slots, neurons, count, alpha, limit,
    TOP_K: tl.constexpr, EXPERT_BYTES: tl.constexpr, NEURON_COLUMNS: tl.constexpr, PANEL: tl.constexpr,
    ACTIVATION: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (block of M pairs, N neurons): neurons [pairs, NEURON_COLUMNS]."""
    slot = tl.load(block_slots + tl.program_id(0))
    if slot < 0:
        return
    pair = tl.load(pairs + tl.program_id(0) * M + tl.arange(0, M))
    held = pair < count
    neuron = tl.program_id(1) * N + tl.arange(0, N)
    inside = neuron < NEURON_COLUMNS
    # Programs past the last panel compute the last one again and store nothing.
    block, column = tl.minimum(neuron // 16, NEURON_COLUMNS // 16 - 1), neuron % 16
    gate = slot.to(tl.int64) * EXPERT_BYTES + block * (2 * PANEL.panel_bytes)
    up = gate + PANEL.panel_bytes
    row = (pair // TOP_K).to(tl.int64) * PANEL.k
    g = tl.zeros([M, N], tl.float32)
    u = tl.zeros([M, N], tl.float32)
    for begin in range(0, PANEL.k, PANEL.chunk):
        k = begin + tl.arange(0, PANEL.chunk)
        wanted = held[:, None] & (k < PANEL.k)[None, :]
        rows = tl.load(x + row[:, None] + k[None, :], mask=wanted, other=0.0).to(TYPE)
        g = add_product(g, rows, words, scales, bytes_, gate, column, begin, PANEL, TYPE, PRECISION)
        u = add_product(u, rows, words, scales, bytes_, up, column, begin, PANEL, TYPE, PRECISION)
    g = finish(g, floats, gate, column, PANEL)
    u = finish(u, floats, up, column, PANEL)
    value = activate(g, u, alpha, limit, ACTIVATION)
    target = neurons + pair.to(tl.int64)[:, None] * NEURON_COLUMNS + neuron[None, :]
    tl.store(target, value.to(neurons.dtype.element_ty), mask=held[:, None] & inside[None, :])


@jit_any_count
def down_tiles(  # type: ignore[no-untyped-def]
    neurons, words, scales, bytes_, floats, pairs, block_slots, outputs, count,
    EXPERT_BYTES: tl.constexpr, DOWN_AT: tl.constexpr, HIDDEN: tl.constexpr, NEURON_COLUMNS: tl.constexpr,
    PANEL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
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
    row = pair.to(tl.int64) * NEURON_COLUMNS
    total = tl.zeros([M, N], tl.float32)
    for begin in range(0, PANEL.k, PANEL.chunk):
        k = begin + tl.arange(0, PANEL.chunk)
        wanted = held[:, None] & (k < PANEL.k)[None, :]
        rows = tl.load(neurons + row[:, None] + k[None, :], mask=wanted, other=0.0).to(TYPE)
        total = add_product(total, rows, words, scales, bytes_, panel, column, begin, PANEL, TYPE, PRECISION)
    total = finish(total, floats, panel, column, PANEL)
    target = outputs + pair.to(tl.int64)[:, None] * HIDDEN + feature[None, :]
    tl.store(target, total, mask=held[:, None] & (feature < HIDDEN)[None, :])
