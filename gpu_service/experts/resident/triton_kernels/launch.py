"""Sizes of launches, by shape alone: the same for every call of that shape, so that graphs can hold them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_service.experts.resident.grouped import GroupedKernels
from gpu_service.experts.resident.panels import PAIRS_BYTES, UNPACK_FROM, UNPACKED_BYTES, LayerFormat
from gpu_service.ops.pair_panels import CACHE_LINE, MAX_PREFETCHED
from gpu_service.ops.panels import PanelFormat
from gpu_service.ops.triton.panel_sizes import EXACT_IN_BFLOAT16, has_parts
from gpu_service.ops.warpgroup_panels import WarpgroupPanels

# Up to this many token rows, a program per pair reads its expert's panels itself, in any model.
_FEWEST_ROWS = 8


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile of `tiles.py`: pairs and columns of one program, and its warps."""

    rows: int
    columns: int
    warps: int


def few_rows(kind: LayerFormat, num_experts: int, top_k: int) -> int:
    """Returns token rows up to which a program per pair reads its expert's panels; above, pairs are grouped.

    On an H200 (128 experts, 8 chosen) 16 rows took 0.68 to 0.93 of the time of tiles in 4 and 8 bits, 24 rows
    0.87 to 1.12, and in bfloat16 32 rows 0.45: `python -m tests.gpu.time_resident`.
    """
    per_expert = 2 if min(panels.bits for panels in kind.panels) >= 16 else 1
    return max(_FEWEST_ROWS, per_expert * num_experts // top_k)


def few_grouped_rows(kind: LayerFormat) -> int:
    """Returns the same where `ops/grouped_panels` computes more rows: from when on it was faster on an H200.

    Of 4 and 8 rows pairs took 31 and 54 us in 4 bits, 46 and 86 with products, 55 and 106 in NVFP4, 43 and 76
    in FP8; rows that share an expert 40 and 51, 58 and 85, 65 and 82, 64 and 80.
    """
    if any(panels.group_size == 16 for panels in kind.panels):
        return 5
    return 6 if min(panels.bits for panels in kind.panels) < 8 else 8


def prefetched_lines(kind: LayerFormat, pairs: int) -> int:
    """Returns cache lines of down that a program of the gate and up products prefetches; 0: there are too
    many.
    """
    down = kind.layout.down_panels * kind.down.panel_bytes
    return 0 if pairs * down > MAX_PREFETCHED else down // kind.layout.intermediate_blocks // CACHE_LINE


# Highest first.
_TILES = (Tile(128, 64, 8), Tile(64, 64, 4), Tile(32, 64, 4), Tile(16, 64, 4), Tile(16, 32, 4))


# Where codes are multiplied part by part (`panel_parts.py`): those that were fastest on an H200.
_PART_TILES = (Tile(32, 128, 8), Tile(16, 64, 4))


def tile(pairs: int, num_experts: int, by_parts: bool) -> Tile:
    """Returns a tile about as high as an expert has pairs when routing is even."""
    mean = max(1, pairs // num_experts)
    if by_parts:
        return _PART_TILES[mean <= 8]
    if mean <= 16:
        return _TILES[3]
    if mean <= 32:
        return _TILES[2]
    return _TILES[1] if mean <= 128 else _TILES[0]


def row_tiles(pairs: int, num_experts: int, bits: int) -> int:
    """Returns of how many tiles of eight rows blocks of grouped rows are, when routing is even.

    Higher blocks decode codes less often and hold more in registers: worth it early where codes are wide.
    """
    mean = pairs / num_experts
    if mean <= 8:
        return 1
    return 4 if mean > (32 if bits < 8 else 12) else 2


def with_smaller(chosen: Tile) -> tuple[Tile, ...]:
    """The tile, then those for devices that it does not fit on."""
    return chosen, *(tile for tile in _TILES if tile.rows * tile.columns < chosen.rows * chosen.columns)


# Pairs of each expert that between them launch both kinds of `chosen_warpgroups` in every format.
_WARPGROUP_PAIRS = (12, 32, 80)


def sizes_to_warm_up(num_experts: int, top_k: int, few_rows: int, max_rows: int, by_parts: bool) -> list[int]:
    """Row counts up to `max_rows` that between them launch every kernel which any such count does."""
    largest: dict[Tile, int] = {}
    rows = min(max_rows, few_rows + 1)
    while rows <= max_rows:
        largest[tile(rows * top_k, num_experts, by_parts)] = rows
        rows *= 2
    if max_rows > few_rows:
        largest[tile(max_rows * top_k, num_experts, by_parts)] = max_rows
    # Where weights are unpacked, by each kind of tile.
    unpacked = [
        -(-pairs * num_experts // top_k)
        for pairs in (
            *_WARPGROUP_PAIRS,
            UNPACK_FROM,
            HIGH_TILE_FROM,
            UNPACK_GROUPED_FROM,
        )
    ]
    unpacked = [rows for rows in unpacked if few_rows < rows <= max_rows]
    return [min(few_rows, max_rows), *sorted({*largest.values(), *unpacked})]


# From this many pairs of each expert on, tiles have 128 of them.
HIGH_TILE_FROM = 128
# From this many on, weights are unpacked that `ops/grouped_panels` multiplies as well. On an H200 (128
# experts of 2048 x 768 in 4 bits) 64 took 500 us grouped and 895 unpacked, 128 took 905 and 956.
UNPACK_GROUPED_FROM = 144


@dataclass(frozen=True, slots=True)
class DenseTile:
    """A tile of `dense.py`: pairs and columns of one program, k that it takes at once, warps, loads in
    advance.
    """

    rows: int
    columns: int
    chunk: int
    warps: int
    stages: int


# The best first; later ones are for devices with less shared memory.
_DENSE_TILES = (
    DenseTile(128, 256, 64, 8, 3),
    DenseTile(128, 128, 64, 8, 3),
    DenseTile(64, 128, 64, 4, 3),
    DenseTile(64, 64, 32, 4, 2),
)


def dense_tiles(pairs: int, num_experts: int) -> tuple[DenseTile, ...]:
    """Returns the tiles to choose from for `pairs` pairs of all experts, the best first."""
    return _DENSE_TILES if pairs >= HIGH_TILE_FROM * num_experts else _DENSE_TILES[2:]


def by_parts(rows: torch.dtype, *panels: PanelFormat) -> bool:
    """Returns whether tiles of all these panels multiply codes, and only then apply scales."""
    return rows == torch.bfloat16 and all(map(has_parts, panels))


def chosen_warpgroups(kind: LayerFormat, grouped: GroupedKernels, pairs: float) -> WarpgroupPanels | None:
    """Returns which of `ops/warpgroup_panels` computes `pairs` pairs of each expert; None: none was faster.

    On an H200 (128 experts of 2048 x 768), in microseconds grouped, by blocks of 64 and of 128 rows:
    4 bits and 16 pairs 186, 183, 308, 32 pairs 286, 196, 284, 256 pairs 1836, 812, 711; Q6_K and 8 pairs
    287, 279, 419, 48 pairs 862, 458, 379; bfloat16 and 32 pairs 410, 494, 401.
    """
    some_from, many_from = 16, 80
    if min(panels.bits for panels in kind.panels) >= 16:
        some_from = many_from = 32
    elif any(panels.mins or panels.group_size == 16 or panels.scale == "products" for panels in kind.panels):
        some_from, many_from = 12, 44
    if pairs < some_from:
        return None
    return grouped.some if pairs < many_from else grouped.many


def unpacks(kind: LayerFormat, rows: torch.dtype, pairs: int, num_experts: int, is_grouped: bool) -> bool:
    """Returns whether a call unpacks weights: only to 16 bits, which rows have and codes are exact in.

    `is_grouped`: `ops/grouped_panels` would compute it.
    """
    codes = {panels.code for panels in kind.panels}
    least = UNPACK_GROUPED_FROM if is_grouped else UNPACK_FROM
    return rows.itemsize == 2 and codes <= EXACT_IN_BFLOAT16 and pairs >= least * num_experts


def unpacked_bytes(kind: LayerFormat) -> int:
    """Returns the bytes of one expert, in 16 bits."""
    gate_up = kind.gate_up_columns * kind.gate_up.k_padded
    return 2 * (gate_up + 16 * kind.layout.down_panels * kind.down.k_padded)


def experts_at_once(kind: LayerFormat) -> int:
    """Returns how many experts are unpacked together."""
    return max(1, UNPACKED_BYTES // unpacked_bytes(kind))


def parts_of(rows: int, bytes_per_row: int) -> int:
    """In how many equal parts rows are computed."""
    return max(1, -(-rows * bytes_per_row // PAIRS_BYTES))


def max_blocks(pairs: int, slots: int, rows: int) -> int:
    """Returns the number of blocks of `rows` pairs that any routing fits into."""
    return pairs // rows + min(slots, pairs)
