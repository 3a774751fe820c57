"""Sizes of launches, by shape alone: the same for every call of that shape, so that graphs can hold them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from gpu_service.experts.resident.panels import PanelFormat

# Up to this many token rows, a program per pair reads its expert's panels itself; above, pairs are grouped.
FEW_ROWS = 8
# Lines of 64 bytes that a program of the row kernels loads at once.
MAX_LINES = 128
# Times that a program of the down product loads lines without a loop. Written out for the 45 times that 2880
# intermediate channels need, a kernel would take a minute to compile.
UNROLLED = 8
# Elements that tensor cores multiply exactly in bfloat16.
_EXACT_IN_BFLOAT16 = frozenset({"bfloat16", "float8", "int8", "int4", "float4"})


@dataclass(frozen=True, slots=True)
class Tile:
    """Of `tiles.py`: pairs and columns of one program, and its warps."""

    rows: int
    columns: int
    warps: int


def lines(panels: PanelFormat) -> int:
    """Lines that a program of the row kernels loads at once: as many as divide its panels evenly."""
    total = panels.k_padded * panels.bits // 32
    return min(MAX_LINES, total & -total)


def warps(lines_at_once: int) -> int:
    """Two threads for each line, of eight words each."""
    return max(1, lines_at_once // 16)


# Highest first.
_TILES = (Tile(128, 64, 8), Tile(64, 64, 4), Tile(32, 64, 4), Tile(16, 64, 4), Tile(16, 32, 4))


def tile(pairs: int, num_experts: int) -> Tile:
    """About as high as an expert has pairs when routing is even."""
    mean = max(1, pairs // num_experts)
    if mean <= 16:
        return _TILES[3]
    if mean <= 32:
        return _TILES[2]
    return _TILES[1] if mean <= 128 else _TILES[0]


def with_smaller(chosen: Tile) -> tuple[Tile, ...]:
    """The tile, then those for devices that it does not fit on."""
    return chosen, *(tile for tile in _TILES if tile.rows * tile.columns < chosen.rows * chosen.columns)


def sizes_to_warm_up(num_experts: int, top_k: int, few_rows: int, max_rows: int) -> list[int]:
    """Row counts up to `max_rows` that between them launch every kernel which any such count does."""
    largest: dict[Tile, int] = {}
    rows = min(max_rows, few_rows + 1)
    while rows <= max_rows:
        largest[tile(rows * top_k, num_experts)] = rows
        rows *= 2
    if max_rows > few_rows:
        largest[tile(max_rows * top_k, num_experts)] = max_rows
    return [min(few_rows, max_rows), *largest.values()]


def max_blocks(pairs: int, slots: int, rows: int) -> int:
    """Blocks of `rows` pairs that any routing fits into."""
    return pairs // rows + min(slots, pairs)


def multiplies_in(panels: PanelFormat, rows: torch.dtype) -> tuple[Any, str]:
    """Type of the tensor-core operands, and the precision of its float32 form."""
    if rows == torch.float32:
        return tl.float32, "ieee"
    if panels.code in _EXACT_IN_BFLOAT16:
        return tl.bfloat16, "ieee"
    # Ten bits of mantissa: what float16 has.
    return tl.float32, "tf32"
