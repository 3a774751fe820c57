"""Sizes of programs that read packed panels, by the panels alone, and the types that they multiply in."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from gpu_service.ops.panels import PanelFormat
from gpu_service.ops.triton.panel_parts import PART
from moebius.kernels.weight_formats import CODE_MIDDLES, CODEBOOKS, GRID_UNITS

# Lines of 64 bytes that a program of the row kernels loads at once, of one panel and of all its panels.
MAX_LINES, MAX_LINES_OF_ALL = 128, 256
# Tiles of lines that a program loads before it multiplies the first one: what its registers hold.
MAX_AHEAD = 3
# k that a tile unpacks at once, of at most 8 bits.
MAX_CHUNK = 128
# k of each column that are unpacked together.
MAX_UNPACKED_K = 256
# Elements that tensor cores multiply exactly in bfloat16.
EXACT_IN_BFLOAT16 = frozenset(
    {"bfloat16", "float8", "int8", "float4", *CODE_MIDDLES, *CODEBOOKS, *GRID_UNITS}
)


def lines(panels: PanelFormat, num_panels: int = 1) -> int:
    """Returns the number of lines of each panel that a program of the row kernels loads at once: as many as
    divide it evenly.
    """
    total = panels.k_padded * panels.low_bits // 32
    return max(1, min(MAX_LINES, MAX_LINES_OF_ALL // num_panels, total & -total))


def ahead(panels: PanelFormat, lines_at_once: int) -> int:
    """Returns the number of tiles of `lines` that are loaded together: at most MAX_AHEAD, and a number that
    divides all.
    """
    tiles = panels.k_padded * panels.low_bits // 32 // lines_at_once
    return max(count for count in range(1, MAX_AHEAD + 1) if tiles % count == 0)


def warps(lines_at_once: int) -> int:
    """Returns the number of warps: two threads for each line, of eight words each."""
    return max(1, lines_at_once // 16)


def chunk(panels: PanelFormat) -> int:
    """Returns the k that a tile takes at once: many, since each time it waits for scales; fewer where more
    would not stay in registers.
    """
    is_small = panels.bits <= 8 and panels.code != "iq3_s"
    return min(MAX_CHUNK if is_small else 64, panels.k_padded & -panels.k_padded)


def has_parts(panels: PanelFormat) -> bool:
    """Returns whether tiles may multiply codes, and scale sums (`panel_parts.py`): 4 bits, and groups."""
    is_code = panels.bits == 4 and (panels.is_small_integer or panels.code == "float4")
    return is_code and bool(panels.group_size) and panels.group_size % PART == 0 == panels.k_padded % PART


def unpacked_lines(panels: PanelFormat) -> int:
    """Returns the lines that a program of `panel_unpack.unpack` takes at once."""
    return min(MAX_UNPACKED_K, panels.k_padded & -panels.k_padded) * panels.low_bits // 32


def multiplies_in(panels: PanelFormat, rows: torch.dtype) -> tuple[Any, str]:
    """Type of the tensor-core operands, and the precision of its float32 form."""
    if rows == torch.float32:
        return tl.float32, "ieee"
    if rows == torch.float16 and panels.code != "float32":
        # bfloat16 weights are rounded below 2^-14 only, and become infinite where float16 has no such number:
        # as dense weights are, and as those of all matrices are in transformers.
        return tl.float16, "ieee"
    if panels.code in EXACT_IN_BFLOAT16:
        return tl.bfloat16, "ieee"
    # Ten bits of mantissa: what float16 has.
    return tl.float32, "tf32"
