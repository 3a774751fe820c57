"""The formats of packed weights, and where the sections of packed panels lie, as `kernels/format` says.

A matrix [out, in] is stored as panels of 16 output features ("columns"), each holding all of k = in. Inside a
panel, every section beginning at a multiple of 64 bytes:

    codes         k_padded x 16 elements in 32-bit words: a line of 64 bytes is one word of each column. From
                  bit 0 on, a column's word holds
                      32-bit elements   k
                      16-bit elements   k, k+1
                      8-bit elements    k, k+1, k+2, k+3
                      4-bit elements    k, k+2, k+4, k+6, k+1, k+3, k+5, k+7
                  Elements of 2, 3, 5 and 6 bits lie in planes: 32 k take as many lines as one has bits. Eight
                  vectors stand for them, each of a byte for four k of a column: vector 2i for k + 8i + 0, 4,
                  1, 5 and vector 2i + 1 for k + 8i + 2, 6, 3, 7. First come the low 4 bits (of 5 and 6) or 2
                  bits (of 2 and 3), then what is left. A line holds 2 vectors of 4 bits, 4 of 2 bits, or 8
                  of one bit: the first at bit 0 of every byte, the next above it.
                  Rows of a grid: 32 k take three lines (iq3) or two (iq2). iq3_xxs and iq2_xxs: first come
                  numbers of rows, one a byte, for 4 k each (iq3_xxs: two lines) or 8. A word of the last line
                  has 7 bits of signs for 8 k each, the eighth of which makes the number of ones even, and s
                  in bits 28 to 31. iq2_xs and iq2_s: 16 bits for 8 k, a number in the lower 9 (10), signs
                  above: 7, as before, or the first 6. iq3_s: lines 0 and 2 have for 16 k each three numbers,
                  in bits 0 to 8, 10 to 18 and 23 to 31, sign 15 in bit 9 and 11 to 14 in bits 19 to 22; line
                  1 the fourth numbers, in bits 0 to 8 and 23 to 31, and signs 4 to 10 in bits 9 to 15 and 16
                  to 22. iq1_s and iq1_m: one line, and a uint16 in the section of signs; of 16 k two numbers
                  of 11 bits, the first and 5 bits of the second in half a word, 6 bits in a byte of the
                  uint16. Its bits 6 and 7 say of iq1_m whether the first and the second 8 k are an eighth
                  less, not more; of iq1_s bits 6, 7 and 14 of the uint16 are s, and bit 15 says it of all
                  tq1: one line, a uint16 in the section of signs and 4 bits after these. Bytes hold five
                  digits -1, 0 or 1 to the base of 3: a byte is a signed number of 256ths, the nearest to the
                  fraction that they make, so that a third of its range is the first one's, and the byte times
                  3 has the next one there. Of 32 k the word's four bytes have k and k + 4, 8, 12, 16, the
                  uint16's two k + 20 and k + 22, 24, 26, 28, and the 4 bits two k of 2 bits each
    scales        [groups][16] of the format's scale type; [groups] where one scale serves the whole panel.
                  "products": [groups / factor_groups][16] float16, rounded up; then, from the next multiple
                  of 64 bytes on, [groups][16] int8; a scale is the product of both. int2 with mins has 4 bits
                  of the scale and, above, 4 of the minimum in an int8, and mins have the factors alone. Of
                  int3 the int8 is -32 to 31: of 32 more come first the low 4 bits, [groups / 2][16] bytes,
                  the even group's below the odd one's, then the high 2 bits, [groups / 4][16]. Of
                  tq1 it is 1, which is not stored. Of
                  rows of a grid the int8 is 2 s + 1: iq3_xxs, iq2_xxs and iq1_s have the factors alone, iq1_m
                  [groups / 4][16] bytes of the low 2 bits of s, then [groups / 8][16] of the high bit, the
                  others [groups / 2][16] bytes, s of the even group below that of the odd one
    signs         [k_padded / 32][16] bytes, of iq2_s signs 6 and 7 of each 8 k, of iq3_s 0 to 3 of each 16;
                  uint16 of iq1 and tq1, of tq1 then [k_padded / 64][16] bytes, the even 32 k's 4 bits below
    zeros         [groups][16] uint8
    mins          [groups][16] of the scale type
    column_scale  [16] float32
    bias          [16] float32

A section that the format lacks takes no bytes. k is padded to a multiple of 64, columns to whole panels. The
same layout serves every instruction set, and GPUs. Names, sizes and offsets are read from the extension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from moebius import _kernels
from moebius.kernels.source import Code, ScaleType

PANEL_COLUMNS = _kernels.PANEL_COLUMNS


@dataclass(frozen=True)
class WeightFormat:
    """How the weights of a matrix are stored; filled from `weight_formats()` of the extension.

    weight[column, k] = value(code) * scale[column, k // group_size] * column_scale[column], an int4 code
    meaning code - 8, or code - zero[column, k // group_size]; of int2, int3, int5 and int6 2, 4, 16 and 32
    are subtracted. With mins, of the scales' type, it is code * scale + min[column, k // group_size]. Codes
    of iq types are places in a table of `CODEBOOKS`, or numbers of rows of a `grid`, with signs.
    """

    name: str
    code: Code
    bits: int  # Of one code; lines of 32 k where it is of a grid.
    # None: no group scales; group_size is 0 then.
    scale: ScaleType | None
    group_size: int
    # One group scale for all columns of a panel.
    panel_scale: bool
    zeros: bool
    mins: bool
    column_scale: bool
    quantised_rows: bool  # Rows are quantised to int8 before they are multiplied (W8A8).
    # Columns (k) are sorted by group; the packed expert says where each was: GPTQ's order of activations.
    ordered: bool


# What the codes of GGUF's IQ types mean (kernels/format/codebooks.h).
CODEBOOKS: Mapping[Code, tuple[float, ...]] = {
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}
# What is subtracted from codes where there are neither zero points nor mins.
CODE_MIDDLES: Mapping[Code, int] = {"int2": 2, "int3": 4, "int4": 8, "int5": 16, "int6": 32}

# Codes whose weights are rows of a grid, and what a row's whole numbers are times.
GRID_UNITS: Mapping[Code, float] = {
    "iq3_xxs": 0.5,
    "iq3_s": 1.0,
    "iq2_xxs": 0.125,
    "iq2_xs": 0.125,
    "iq2_s": 0.125,
    "iq1_s": 0.125,
    "iq1_m": 0.125,
    "tq1": 1.0,  # Without a grid.
}

WEIGHT_FORMATS = {name: WeightFormat(name, **fields) for name, fields in _kernels.weight_formats().items()}


@cache
def grid(code: Code) -> NDArray[np.uint8]:
    """Returns `[rows, 4 or 8]`: magnitudes of neighbours, of a code of `GRID_UNITS`, in its unit.

    Of iq1 they are int8, and one unit more or less is meant.
    """
    return _kernels.grid_rows(code)


# The end of the names of formats of gate and up whose columns are sorted by group.
_ORDERED = "_ordered"


def ordered_format(name: str) -> str:
    """The name of a format of group scales with its columns sorted; of no format none."""
    return f"{name}{_ORDERED}" if name else ""


def weight_format(name: str) -> WeightFormat:
    """Returns the format of a name. Raises ValueError listing the names."""
    base = name.removesuffix(_ORDERED)
    if base not in WEIGHT_FORMATS:
        raise ValueError(f"weight format {name!r} is unknown; allowed: {', '.join(WEIGHT_FORMATS)}")
    found = WEIGHT_FORMATS[base]
    return found if base == name else replace(found, name=name, ordered=True)


# Between the formats of gate and up where they differ.
_BETWEEN = "+"


def gate_up_format(gate: str, up: str) -> str:
    """Returns the name of gate's and up's formats together: the name of both, or "gate's+up's"; "" where one
    has none.
    """
    if gate == up or not (gate and up):
        return up if gate else ""
    return f"{gate}{_BETWEEN}{up}"


def split_gate_up(name: str) -> tuple[str, str]:
    """Returns the formats of gate and of up that `gate_up_format` named."""
    gate, _, up = name.partition(_BETWEEN)
    return gate, up or gate


@dataclass(frozen=True)
class PanelLayout(WeightFormat):
    """A format applied to matrices of `k` inputs: the sections of one panel, in bytes from its begin.

    Filled by `panel_layout`. What a format lacks has the offset where it would be.
    """

    k: int
    has_bias: bool
    k_padded: int
    # Of `group_size` along k; 0 without group scales.
    groups: int
    # Of scales that are products: groups that share a factor, and bytes from a section's factors to its int8.
    factor_groups: int
    whole_offset: int
    # Of whole numbers with fewer than 8 bits that lie by themselves: bits of each in the bytes from
    # whole_offset on, and in those from whole_high_offset on; else 0.
    whole_low_bits: int
    whole_high_bits: int
    whole_high_offset: int
    # Their int8 hold 4 bits of the scale and, above, 4 of the minimum, and the mins' section has none.
    joined: bool
    scales_offset: int
    signs_offset: int
    zeros_offset: int
    mins_offset: int
    column_scale_offset: int
    bias_offset: int
    panel_bytes: int


@dataclass(frozen=True)
class PackedExpertLayout:
    """One expert: gate and up panels alternating (gate 0, up 0, gate 1, ...), down panels, an order if any.

    Without a gate the up panels stand alone; where gate and up differ in format, all gate panels come before
    all up panels. Filled by `expert_layout`; offsets and sizes in bytes.
    """

    # k is the hidden size.
    gate: PanelLayout
    gate_up: PanelLayout  # Of up alone where `mixed`, else of both.
    # k is the intermediate size.
    down: PanelLayout
    gated: bool
    panels_per_column_block: int  # 2; without a gate 1.
    # Blocks of 16 intermediate channels.
    intermediate_blocks: int
    down_panels: int
    # Gate and up differ in format. Panel i of gate lies at i * gate_step, that of up at
    # up_offset + i * up_step.
    mixed: bool
    gate_step: int
    up_offset: int
    up_step: int
    down_offset: int
    # int32 [k of gate and up] where they are `ordered`: element i that meets their panels is element order[i]
    # of the row.
    order_offset: int
    expert_bytes: int


@cache
def panel_layout(name: str, k: int, has_bias: bool = False) -> PanelLayout:
    """Returns the panels of a format. Raises ValueError for an unknown name, or k < 1."""
    return PanelLayout(**asdict(weight_format(name)), **_kernels.panel_layout(name, k, has_bias))


@cache
def expert_layout(
    gate_up: str,
    down: str,
    hidden_size: int,
    intermediate_size: int,
    has_bias: bool = False,
    gated: bool = True,
) -> PackedExpertLayout:
    """Returns experts whose gate and up (`gate_up_format`), and whose down matrices are packed in these
    formats.

    Raises ValueError for an unknown name, a size below 1, or two formats of gate and up of which one is
    ordered or has quantised rows.
    """
    gate, up = split_gate_up(gate_up)
    panels = (
        panel_layout(gate, hidden_size, has_bias),
        panel_layout(up, hidden_size, has_bias),
        panel_layout(down, intermediate_size, has_bias),
    )
    sizes = _kernels.expert_layout(gate_up, down, hidden_size, intermediate_size, gated, has_bias)
    return PackedExpertLayout(*panels, **sizes)
