"""Stored numbers as numpy has them: floats of types that numpy lacks, and bytes in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.reader import Array

_BYTES_PER_WORD = 4


def as_float32(array: Array, dtype: str) -> NDArray[np.float32]:
    """Returns stored floats, exactly. bfloat16 is float32's upper half, e8m0 its exponent."""
    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    if dtype in ("F8_E8M0", "U8"):
        return np.ldexp(np.float32(1), array.astype(np.int32) - 127).astype(np.float32)
    return array.astype(np.float32)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Returns the bits of the nearest bfloat16, to even between two; of finite values only."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded: NDArray[np.uint16] = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return rounded


def _is_not_finite(array: Array) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = ~np.isfinite(array)
    return found


# By safetensors dtype, for the arrays of bits in which some of them come.
_NOT_FINITE: Mapping[str, Callable[[NDArray[Any]], NDArray[np.bool_]]] = {
    "F32": _is_not_finite,
    "F16": _is_not_finite,
    "BF16": lambda bits: (bits & 0x7F80) == 0x7F80,
    "F8_E4M3": lambda bits: (bits & 0x7F) == 0x7F,
    "F8_E8M0": lambda bits: bits == 0xFF,
    "U8": lambda bits: bits == 0xFF,
}


# The first bits after those of the largest finite number, of types that hold NaN or infinity.
_FIRST_NOT_FINITE: Mapping[str, int] = {
    "F32": 0x7F800000,
    "F16": 0x7C00,
    "BF16": 0x7F80,
    "F8_E4M3": 0x7F,
}
# By the type that values are rounded to and their own: the first bits that become infinite.
_FIRST_ROUNDED: Mapping[tuple[str, str], int] = {
    ("bfloat16", "F32"): 0x7F7F8000,
    ("float16", "F32"): 0x477FF000,
    ("float16", "BF16"): 0x4780,
}


def check_values(array: Array, dtype: str, name: str, rounded: str = "") -> None:
    """Raises CheckpointError when weights are NaN or infinite, as stored or once `rounded`.

    `rounded`: "bfloat16" or "float16"; with any other name they stay as they are.

    At about the speed of memory: bits of floats are ordered as integers are, so that the two largest, with
    and without sign, tell; other types have no such values.
    """
    stored = _FIRST_NOT_FINITE.get(dtype)
    if stored is None or not array.size:
        return
    size = array.dtype.itemsize
    sign = 1 << (8 * size - 1)
    # Bits of the largest magnitude.
    positive, negative = int(array.view(f"i{size}").max()), int(array.view(f"u{size}").max())
    largest = max(positive, negative - sign)
    if largest >= stored:
        raise CheckpointError(f"tensor {name!r} holds NaN or infinite values; finite ones are allowed")
    if largest >= _FIRST_ROUNDED.get((rounded, dtype), stored):
        most = " (at most 65504; --dtype bfloat16 holds more)" if rounded == "float16" else ""
        raise CheckpointError(f"tensor {name!r} holds values that {rounded} has no finite number for{most}")


def check_finite(array: Array, dtype: str, name: str) -> None:
    """Raises CheckpointError when a scale or bias is NaN or infinite: results would be."""
    if _NOT_FINITE[dtype](array).any():
        raise CheckpointError(
            f"tensor {name!r} holds scales that are NaN or infinite; finite ones are allowed"
        )


def product_factors(words: Array) -> NDArray[np.float16]:
    """The factors of scales that are products, see `kernels_source.SourceMatrix.scale_type`."""
    return words.astype(np.uint16).view(np.float16)


def unpack_nibbles(words: Array, axis: int) -> NDArray[np.uint8]:
    """Returns uint8 0 to 15, contiguous, from int32 words `[m, n]` of eight along `axis`, the first in the
    low bits.

    At about the speed of memory: whole matrices of experts go through here.
    """
    rows, columns = words.shape
    if axis == 1:
        pairs = np.ascontiguousarray(words).view(np.uint8).reshape(rows, columns, _BYTES_PER_WORD)
        codes = np.empty((rows, columns, _BYTES_PER_WORD, 2), np.uint8)
        np.bitwise_and(pairs, 15, out=codes[..., 0])
        np.right_shift(pairs, 4, out=codes[..., 1])
        return codes.reshape(rows, -1)
    codes = np.empty((rows, 8, columns), np.uint8)
    for place in range(8):
        shifted = words.view(np.uint32) >> np.uint32(4 * place)
        np.bitwise_and(shifted, np.uint32(15), out=codes[:, place], casting="unsafe")
    return codes.reshape(-1, columns)


def unpack_bytes(words: Array, transposed: bool) -> NDArray[np.int8]:
    """Returns int8 `[out, in]` from int32 words of four values + 128 along in, the first in the lowest bits.

    words: `[out, in / 4]`, or `[in / 4, out]` when transposed.
    """
    codes = np.ascontiguousarray(words).view(np.uint8)
    if transposed:
        inner, out = words.shape
        codes = codes.reshape(inner, out, _BYTES_PER_WORD).transpose(1, 0, 2)
        codes = codes.reshape(out, inner * _BYTES_PER_WORD)
    return (codes ^ np.uint8(0x80)).view(np.int8)
