"""Codes and scales of GGUF's types whose rows of a grid are written out: IQ1.

A block names rows of eight numbers, each -1, 0 or 1, and says where an eighth is added and where it is taken
off. Packed formats have a place in a table for each weight (`weight_formats.CODEBOOKS`), and scales as
products: the block's float16 times 2 s + 1, with the s that the block has for each group. Grids are those of
the package `gguf`, and so are the layouts of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Integers = NDArray[np.integer[Any]]
# Blocks that are taken apart at a time: what lies between stays in a core's cache.
_BLOCKS = 512


class GridParts(NamedTuple):
    """Both take blocks `[n, bytes]`."""

    codes: Callable[[Bytes], Bytes]  # To `[n, 256]`.
    # To float16 `[n, 1]` and integers of `[n, groups]`.
    scales: Callable[[Bytes], tuple[NDArray[np.float16], Integers]]


@cache
def _grid(kind: str) -> Bytes:
    """Returns `[rows, 4 or 8]`: places of the grid's numbers among the magnitudes."""
    from gguf import GGMLQuantizationType, quants  # here: most processes need none of it

    found = quants._type_traits[GGMLQuantizationType[kind]]
    found.init_grid()  # type: ignore[no-untyped-call]
    assert found.grid is not None
    rows = found.grid.reshape(found.grid_shape)
    return np.searchsorted(np.array(found.grid_map, np.float32), rows).astype(np.uint8)


def _fields(found: Integers, places: tuple[int, ...], bits: int) -> Integers:
    """Returns `[n, count * places]` of `[n, count]`: `bits` from each place on, one after the other."""
    kind = found.dtype.type
    fields = found[..., None] >> np.array(places, kind) & kind((1 << bits) - 1)
    return fields.reshape(len(found), -1)


def _factor(blocks: Bytes) -> NDArray[np.float16]:
    return np.ascontiguousarray(blocks[:, :2]).view(np.float16)


def _words(blocks: Bytes, kind: type[np.unsignedinteger]) -> Integers:
    return np.ascontiguousarray(blocks).view(kind)


def _iq1_codes(rows: Integers, shift_is_up: NDArray[np.bool_]) -> Bytes:
    """Each eight weights are a row, an eighth more or less."""
    codes: Bytes = _grid("IQ1_S")[rows].reshape(len(rows), 32, 8)
    codes |= (shift_is_up.astype(np.uint8) << 2)[..., None]
    return codes.reshape(len(rows), 256)


def _iq1_s_codes(blocks: Bytes) -> Bytes:
    words = _words(blocks[:, 34:50], np.uint16)
    rows = blocks[:, 2:34] | _fields(words, (0, 3, 6, 9), 3) << np.uint16(8)
    return _iq1_codes(rows, np.repeat(words < 0x8000, 4, axis=1))


def _iq1_m_codes(blocks: Bytes) -> Bytes:
    nibbles = _fields(blocks[:, 32:48], (0, 4), 4).astype(np.uint16)
    return _iq1_codes(blocks[:, :32] | (nibbles & 7) << 8, nibbles < 8)


def _iq1_m_scales(blocks: Bytes) -> tuple[NDArray[np.float16], Integers]:
    """The factor's bits are the highest nibbles of four words."""
    words = _words(blocks[:, 48:56], np.uint16)
    bits = np.bitwise_or.reduce((words & 0xF000) >> np.array([12, 8, 4, 0], np.uint16), axis=1)
    return bits.astype(np.uint16)[:, None].view(np.float16), _fields(words, (0, 3, 6, 9), 3)


GRID_PARTS: Mapping[str, GridParts] = {
    "IQ1_S": GridParts(
        _iq1_s_codes, lambda blocks: (_factor(blocks), _words(blocks[:, 34:50], np.uint16) >> 12 & 7)
    ),
    "IQ1_M": GridParts(_iq1_m_codes, _iq1_m_scales),
}


def take_grid_part(kind: str, role: str, blocks: Bytes, output: NDArray[np.generic]) -> None:
    """Fills `output` as `block_parts.take_part`, of a type in `GRID_PARTS`.

    Raises ValueError for arrays of other sizes.
    """
    from gguf import GGMLQuantizationType, quants

    nbytes = quants._type_traits[GGMLQuantizationType[kind]].type_size
    if blocks.shape[1] % nbytes:
        raise ValueError(f"rows of {blocks.shape[1]} bytes; they have to be whole blocks of {nbytes} bytes")
    flat = np.ascontiguousarray(blocks).reshape(-1, nbytes)
    width = output.nbytes // max(len(flat), 1)
    target = output.reshape(-1).view(np.uint8)
    for begin in range(0, len(flat), _BLOCKS):
        part = flat[begin : begin + _BLOCKS]
        if role == "codes":
            found: Integers = GRID_PARTS[kind].codes(part)
        else:
            factor, steps = GRID_PARTS[kind].scales(part)
            found = factor.view(np.uint16).astype(np.int32) | (steps.astype(np.int32) * 2 + 1) << 16
        if found[0].nbytes != width or output.nbytes != len(flat) * width:
            wanted = len(flat) * found[0].nbytes
            raise ValueError(f"output has {output.nbytes} bytes; it must be C-contiguous and have {wanted}")
        target[begin * width : (begin + len(part)) * width] = found.view(np.uint8).reshape(-1)
