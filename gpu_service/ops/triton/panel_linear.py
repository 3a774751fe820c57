"""Products with weights in packed panels, each read once at its packed size, and look-ups of their rows.

Few rows: a program has one panel, loads whole lines of it before it multiplies the first, and multiplies each
with all rows, in float32. More: CUDA kernels of `dense_panels`, or where they cannot tiles on tensor cores,
whose weights are dequantised in registers. Many: some features at a time are unpacked to the type of the
rows, for torch's own product.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import nn

from gpu_service.ops import dense_panels
from gpu_service.ops.panel_linear import UNPACK_FROM_ROWS, UNPACKED_BYTES, PanelPart
from gpu_service.ops.panels import PanelFormat, PanelViews, views
from gpu_service.ops.triton import panel_sizes
from gpu_service.ops.triton.jit import jit, jit_for_any, launch_fitting, overlap, wait_for_previous
from gpu_service.ops.triton.panel_elements import add_product, dequantised, finish_tile
from gpu_service.ops.triton.panel_lines import EXPONENT, finish, line_products, load_lines
from gpu_service.ops.triton.panel_unpack import unpack
from moebius.kernels.weight_formats import PANEL_COLUMNS

# Rows that a program of the row kernel multiplies, or one; above, tensor cores take at least 16.
MAX_ROWS = 4
# Rows from which on the CUDA kernels compute where they can: one row Triton's read faster than any others.
CUDA_FROM_ROWS = 2
# Rows and columns of tiles, highest first: narrow ones spread a decode step over all processors.
_TILES = ((64, 64), (32, 64), (16, 32))


@jit_for_any("num_rows", "exponent")
def panel_rows_kernel(  # type: ignore[no-untyped-def]
    x, words, scales, bytes_, grids, floats, bias, output, num_rows, num_features, x_stride, output_stride,
    exponent, PANEL: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, LINES: tl.constexpr,
    AHEAD: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (panel): 16 features of up to ROWS rows."""
    block = tl.program_id(0)
    panel = block.to(tl.int64) * PANEL.panel_bytes
    num_lines: tl.constexpr = PANEL.k_padded * PANEL.low_bits // 32
    totals = ()
    for _ in tl.static_range(ROWS):
        totals += (tl.zeros([LINES, 16], tl.float32),)  # type: ignore[assignment]
    for begin in range(0, num_lines, LINES * AHEAD):
        loaded = ()
        for n in tl.static_range(AHEAD):
            line = begin + n * LINES + tl.arange(0, LINES)
            loaded += (load_lines(words, scales, bytes_, panel, line, PANEL),)  # type: ignore[assignment]
        if begin == 0:
            wait_for_previous(OVERLAPS)
        tl.debug_barrier()
        sums = ()
        for row in tl.static_range(ROWS):
            # Rows past the last one compute it again, and are not stored.
            own = x + tl.minimum(row, num_rows - 1).to(tl.int64) * x_stride
            total = totals[row]  # type: ignore[var-annotated]
            for n in tl.static_range(AHEAD):
                line = begin + n * LINES + tl.arange(0, LINES)
                total += line_products(own, loaded[n], words, grids, 0, line, exponent, PANEL)
            sums += (total,)  # type: ignore[assignment]
        totals = sums
    feature = block * 16 + tl.arange(0, 16)
    for row in tl.static_range(ROWS):
        value = finish(tl.sum(totals[row], 0), floats, panel, PANEL)
        if HAS_BIAS:
            value += tl.load(bias + feature, mask=feature < num_features, other=0.0).to(tl.float32)
        target = output + row * output_stride + feature
        tl.store(target, value.to(output.dtype.element_ty), mask=(feature < num_features) & (row < num_rows))


@jit_for_any("num_rows")
def panel_tiles_kernel(  # type: ignore[no-untyped-def]
    x, words, scales, bytes_, grids, floats, bias, output, num_rows, num_features, x_stride, output_stride,
    PANEL: tl.constexpr, HAS_BIAS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    TYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (N features, M rows)."""
    row = tl.program_id(1) * M + tl.arange(0, M)
    feature = tl.program_id(0) * N + tl.arange(0, N)
    held = row < num_rows
    # Features past the last panel are computed from that one, and not stored.
    block, column = tl.minimum(feature, num_features - 1) // 16, feature % 16
    panel = block.to(tl.int64) * PANEL.panel_bytes
    own = x + row.to(tl.int64)[:, None] * x_stride
    total = tl.zeros([M, N], tl.float32)
    for begin in range(0, PANEL.k, CHUNK):
        k = begin + tl.arange(0, CHUNK)
        wanted = held[:, None] & (k < PANEL.k)[None, :]
        rows = tl.load(own + k[None, :], mask=wanted, other=0.0).to(TYPE)
        total = add_product(
            total, rows, words, scales, bytes_, grids, panel, column, begin, PANEL, CHUNK, TYPE, PRECISION
        )
    total = finish_tile(total, floats, panel, column, PANEL)
    if HAS_BIAS:
        total += tl.load(bias + feature, mask=feature < num_features, other=0.0).to(tl.float32)[None, :]
    target = output + row.to(tl.int64)[:, None] * output_stride + feature[None, :]
    mask = held[:, None] & (feature < num_features)[None, :]
    tl.store(target, total.to(output.dtype.element_ty), mask=mask)


@jit
def look_up_kernel(  # type: ignore[no-untyped-def]
    ids, words, scales, bytes_, grids, floats, output, first_row, num_features,
    PANEL: tl.constexpr, LINES: tl.constexpr, IS_FIRST: tl.constexpr,
):  # fmt: skip
    """Program (id, LINES lines): the id's row of a part whose first row is `first_row`.

    IS_FIRST: zeros where the id is of another part; the others leave what is there.
    """
    place = tl.program_id(0)
    row = tl.load(ids + place) - first_row
    inside = (row >= 0) & (row < num_features)
    if inside or IS_FIRST:
        own = tl.where(inside, row, 0)
        panel = (own // 16).to(tl.int64) * PANEL.panel_bytes
        column = (own % 16).to(tl.int32) + tl.zeros([1, 1], tl.int32)
        per_word: tl.constexpr = 32 // PANEL.low_bits
        line = tl.program_id(1) * LINES + tl.arange(0, LINES)
        value = dequantised(words, scales, bytes_, grids, panel, line, column, PANEL)
        if PANEL.column_scale:
            value *= tl.load(floats + (panel + PANEL.column_scale_offset) // 4 + own % 16)
        plain = tl.where(inside, tl.reshape(value, [LINES * per_word]), 0.0)
        k = tl.program_id(1) * (LINES * per_word) + tl.arange(0, LINES * per_word)
        target = output + place.to(tl.int64) * PANEL.k + k
        tl.store(target, plain.to(output.dtype.element_ty), mask=k < PANEL.k)


def panel_linear(
    hidden_states: torch.Tensor,
    memory: torch.Tensor,
    parts: tuple[PanelPart, ...],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Computes `ops.panel_linear.panel_linear`; sums in float32.

    Few rows meet the exact weights, more those that are rounded to their type.
    """
    x = hidden_states if hidden_states.stride(-1) == 1 else hidden_states.contiguous()
    num_rows = x.shape[0]
    output = x.new_empty((num_rows, sum(part.rows for part in parts)))
    if not output.numel():
        return output
    multiply = _by_rows if num_rows <= MAX_ROWS else _by_tiles
    if num_rows >= UNPACK_FROM_ROWS:
        multiply = _unpacked
    # What is not a parameter may be what the kernel before writes.
    is_fixed = isinstance(memory, nn.Parameter) and (bias is None or isinstance(bias, nn.Parameter))
    is_some = CUDA_FROM_ROWS <= num_rows < UNPACK_FROM_ROWS and dense_panels.takes(x, bias)
    for part in parts:
        own = slice(part.first_row, part.first_row + part.rows)
        own_bias, own_output = None if bias is None else bias[own], output[:, own]
        kernels = dense_panels.dense_panels(part.panels, x.device) if is_some else None
        if kernels is not None:
            kernels.linear(x, part.memory(memory), own_bias, own_output, is_fixed)
        else:
            multiply(x, views(part.memory(memory), part.panels), part, own_bias, own_output, is_fixed)
    return output


def panel_rows(
    ids: torch.Tensor, memory: torch.Tensor, parts: tuple[PanelPart, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Computes `ops.panel_linear.panel_rows`."""
    output = torch.empty(ids.shape[0], parts[0].panels.k, dtype=dtype, device=ids.device)
    for part in parts:
        panels, found = part.panels, views(part.memory(memory), part.panels)
        lines = panel_sizes.unpacked_lines(panels)
        blocks = panels.k_padded * panels.low_bits // 32 // lines
        if ids.numel():
            look_up_kernel[(ids.shape[0], blocks)](
                ids.contiguous(),
                *found.pointers,
                output,
                part.first_row,
                part.rows,
                PANEL=panels,
                LINES=lines,
                IS_FIRST=part.first_row == 0,
                num_warps=1,
            )
    return output


def _arguments(
    x: torch.Tensor, found: PanelViews, part: PanelPart, bias: torch.Tensor | None, output: torch.Tensor
) -> tuple[Any, ...]:
    """Returns what both kernels of products begin with."""
    return (
        x,
        *found.pointers,
        found.floats if bias is None else bias,
        output,
        x.shape[0],
        part.rows,
        x.stride(0),
        output.stride(0),
    )


def _by_rows(
    x: torch.Tensor,
    found: PanelViews,
    part: PanelPart,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    is_fixed: bool,
) -> None:
    lines = panel_sizes.lines(part.panels)
    panel_rows_kernel[(part.num_panels,)](
        *_arguments(x, found, part, bias, output),
        EXPONENT,
        PANEL=part.panels,
        ROWS=1 if x.shape[0] == 1 else MAX_ROWS,
        HAS_BIAS=bias is not None,
        LINES=lines,
        AHEAD=panel_sizes.ahead(part.panels, lines),
        num_warps=panel_sizes.warps(lines),
        **overlap(x.device, is_fixed),
    )


def _by_tiles(
    x: torch.Tensor,
    found: PanelViews,
    part: PanelPart,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    is_fixed: bool,
) -> None:
    type_, precision = panel_sizes.multiplies_in(part.panels, x.dtype)

    def launch(tile: tuple[int, int]) -> None:
        rows, columns = tile
        panel_tiles_kernel[(-(-part.rows // columns), -(-x.shape[0] // rows))](
            *_arguments(x, found, part, bias, output),
            PANEL=part.panels,
            HAS_BIAS=bias is not None,
            M=rows,
            N=columns,
            CHUNK=panel_sizes.chunk(part.panels),
            TYPE=type_,
            PRECISION=precision,
            num_warps=4,
        )

    # Registers do not hold more of float32.
    is_low = x.shape[0] <= _TILES[-1][0] or x.dtype == torch.float32
    tiles = _TILES[-1:] if is_low else _TILES
    variant = tiles[0], part.panels, x.dtype, bias is None
    launch_fitting("dense panels", variant, x.device, tiles, launch)


def _unpacked(
    x: torch.Tensor,
    found: PanelViews,
    part: PanelPart,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    is_fixed: bool,
) -> None:
    panels = part.panels
    step = panels_at_once(panels, x.element_size())
    for first in range(0, part.num_panels, step):
        count = min(step, part.num_panels - first)
        own = slice(first * PANEL_COLUMNS, min((first + count) * PANEL_COLUMNS, part.rows))
        matrix = _unpack(panels, found, first, count, x.dtype)[: own.stop - own.start, : panels.k].t()
        if bias is None:
            torch.mm(x, matrix, out=output[:, own])
        else:
            torch.addmm(bias[own].to(x.dtype), x, matrix, out=output[:, own])


def panels_at_once(panels: PanelFormat, item: int) -> int:
    """Returns the number of panels that are unpacked together to values of `item` bytes."""
    return max(1, UNPACKED_BYTES // (panels.k_padded * PANEL_COLUMNS * item))


def _unpack(
    panels: PanelFormat, found: PanelViews, first: int, count: int, dtype: torch.dtype
) -> torch.Tensor:
    """Returns `[count * 16, k_padded]` of panels from `first` on."""
    matrix = torch.empty((count * PANEL_COLUMNS, panels.k_padded), dtype=dtype, device=found.bytes.device)
    # One "slot", whose panels from `first` on are those of a memory that begins there.
    begin = first * panels.panel_bytes
    rest = views(found.bytes[begin : begin + count * panels.panel_bytes], panels)
    unpack[(1, count)](
        *rest.pointers,
        matrix,
        0,
        EXPERT_BYTES=0,
        AT=0,
        ORDER_AT=0,
        GATED=False,
        PANEL=panels,
        PANELS=1,
        LINES=panel_sizes.unpacked_lines(panels),
        SCALED=True,
        TURN=-1,
        num_warps=4,
    )
    return matrix
