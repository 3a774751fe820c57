"""Products of many rows: experts are unpacked to 16 bits once, then multiplied by tiles on tensor cores.

With hundreds of rows an expert the tiles of `gemm.py` would unpack the same weights again for each block of
rows, and multiply in pieces no longer than a quantisation group. Here group scales (and mins) are part of the
unpacked weights, rounded once to the rows' type; scales of whole columns and biases are applied in float32 as
there. Unpacked matrices are `[features, k_padded]`, gate and up features in turn, so that one product of a
tile has both of the same channel; experts without a gate have up features alone.
"""

from __future__ import annotations

import triton.language as tl

from gpu_service.experts.resident.triton_kernels.gemm import activate
from gpu_service.ops.triton.jit import jit, jit_for_any
from gpu_service.ops.triton.panel_elements import finish_tile


@jit
def _product(  # type: ignore[no-untyped-def]
    rows, features, K: tl.constexpr, K_PADDED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Multiplies to float32 [M, N]: pointers to M rows of K times pointers to N features of K_PADDED, the
    rest zeros.
    """
    total = tl.zeros([M, N], tl.float32)
    k = tl.arange(0, CHUNK)
    for begin in range(0, K_PADDED, CHUNK):
        if K % CHUNK == 0:
            x = tl.load(rows[:, None] + (begin + k)[None, :])
        else:
            x = tl.load(rows[:, None] + (begin + k)[None, :], mask=(begin + k < K)[None, :], other=0.0)
        weights = tl.load(features[None, :] + (begin + k)[:, None])
        total = tl.dot(x, weights, total)
    return total


@jit_for_any("count", "first")
def gate_up_dense(  # type: ignore[no-untyped-def]
    x, weights, floats, pairs, block_slots, intermediate, count, first, alpha, limit,
    TOP_K: tl.constexpr, EXPERT_BYTES: tl.constexpr, INTERMEDIATE_COLUMNS: tl.constexpr, GATE: tl.constexpr,
    PANEL: tl.constexpr, GATE_STEP: tl.constexpr, UP_AT: tl.constexpr, UP_STEP: tl.constexpr,
    ACTIVATION: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (N / 2 channels, block of M pairs): intermediate [pairs, INTERMEDIATE_COLUMNS].

    N channels where experts have no gate. Neighbours share a block, so that its rows and its expert stay
    in the cache.
    """
    slot = tl.load(block_slots + tl.program_id(1))
    if slot < 0:
        return
    pair = tl.load(pairs + tl.program_id(1) * M + tl.arange(0, M))
    held = pair < count
    IS_GATED: tl.constexpr = ACTIVATION != "relu2"
    features: tl.constexpr = (1 + IS_GATED) * INTERMEDIATE_COLUMNS
    channels: tl.constexpr = N // (1 + IS_GATED)
    # Programs past the last feature compute that one again and store nothing.
    feature = tl.minimum(tl.program_id(0) * N + tl.arange(0, N), features - 1)
    rows = x + tl.where(held, pair // TOP_K, 0).to(tl.int64) * PANEL.k
    matrix = weights + (slot - first).to(tl.int64) * (features * PANEL.k_padded)
    total = _product(rows, matrix + feature * PANEL.k_padded, PANEL.k, PANEL.k_padded, M, N, CHUNK)
    if IS_GATED:
        g, u = tl.split(tl.reshape(total, [M, channels, 2]))
    else:
        g, u = total, total
    channel = tl.program_id(0) * channels + tl.arange(0, channels)
    inside = channel < INTERMEDIATE_COLUMNS
    block, column = tl.minimum(channel // 16, INTERMEDIATE_COLUMNS // 16 - 1), channel % 16
    expert = slot.to(tl.int64) * EXPERT_BYTES
    if IS_GATED:
        g = finish_tile(g, floats, expert + block * GATE_STEP, column, GATE)
    u = finish_tile(u, floats, expert + UP_AT + block * UP_STEP, column, PANEL)
    value = activate(g, u, alpha, limit, ACTIVATION)
    target = intermediate + pair.to(tl.int64)[:, None] * INTERMEDIATE_COLUMNS + channel[None, :]
    tl.store(target, value.to(intermediate.dtype.element_ty), mask=held[:, None] & inside[None, :])


@jit_for_any("count", "first")
def down_dense(  # type: ignore[no-untyped-def]
    intermediate, weights, floats, pairs, block_slots, outputs, count, first,
    EXPERT_BYTES: tl.constexpr, DOWN_AT: tl.constexpr, HIDDEN: tl.constexpr,
    INTERMEDIATE_COLUMNS: tl.constexpr, PANEL: tl.constexpr, PANELS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (N columns, block of M pairs): outputs float32 [pairs, HIDDEN], not yet weighted."""
    slot = tl.load(block_slots + tl.program_id(1))
    if slot < 0:
        return
    pair = tl.load(pairs + tl.program_id(1) * M + tl.arange(0, M))
    held = pair < count
    column = tl.program_id(0) * N + tl.arange(0, N)
    feature = tl.minimum(column, PANELS * 16 - 1)
    rows = intermediate + tl.where(held, pair, 0).to(tl.int64) * INTERMEDIATE_COLUMNS
    matrix = weights + (slot - first).to(tl.int64) * (PANELS * 16 * PANEL.k_padded)
    total = _product(rows, matrix + feature * PANEL.k_padded, PANEL.k, PANEL.k_padded, M, N, CHUNK)
    panel = slot.to(tl.int64) * EXPERT_BYTES + DOWN_AT + (feature // 16) * PANEL.panel_bytes
    total = finish_tile(total, floats, panel, feature % 16, PANEL)
    target = outputs + pair.to(tl.int64)[:, None] * HIDDEN + column[None, :]
    tl.store(target, total, mask=held[:, None] & (column < HIDDEN)[None, :])
