"""Random numbers of the types that checkpoints store, at a nanosecond each.

A value is looked up in a table of 65536 quantiles of the normal distribution, already rounded to the stored
type: 16 random bits choose the entry. That is several times faster than drawing normals and rounding them.
"""

from __future__ import annotations

import functools
import statistics
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_ENTRIES = 65536
# Of the codes that `int4_words` draws, minus 8: the sum of two numbers 0..7 varies by 2 * (64 - 1) / 12.
INT4_STD = 10.5**0.5
# Ordinary e4m3 codes end at 448; quantiles reach 4.2 deviations, so one deviation may be 64.
FLOAT8_STD = 64.0
_LOW_BITS = np.uint64(0x7777777777777777)
_ONES = np.uint64(0x1111111111111111)


def generator(seed: int, *key: int) -> np.random.Generator:
    """A fast stream of its own for every (seed, key), whichever thread draws from it."""
    return np.random.Generator(np.random.SFC64([seed, *key]))


@functools.cache
def _quantiles() -> NDArray[np.float32]:
    normal = statistics.NormalDist()
    return np.array([normal.inv_cdf((entry + 0.5) / _ENTRIES) for entry in range(_ENTRIES)], np.float32)


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to nearest, ties to even; finite values only."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


@functools.cache
def _bfloat16_table(std: float) -> NDArray[np.uint16]:
    return bfloat16_bits(_quantiles() * np.float32(std))


@functools.cache
def _float8_table() -> NDArray[np.uint8]:
    codes = np.arange(0x7F, dtype=np.uint8)  # 0x7f is NaN
    exponents, mantissas = codes >> 3, (codes & 7) / 8.0
    values = np.where(
        exponents == 0, mantissas * 2.0**-6, (1 + mantissas) * 2.0 ** (exponents.astype(int) - 7)
    )
    middles = (values[1:] + values[:-1]) / 2
    wanted = _quantiles() * FLOAT8_STD
    nearest = np.searchsorted(middles, np.abs(wanted)).astype(np.uint8)
    codes_of: NDArray[np.uint8] = nearest | ((wanted < 0).astype(np.uint8) << 7)
    return codes_of


def _indices(rng: np.random.Generator, count: int) -> NDArray[np.uint16]:
    words = rng.integers(0, 2**64, -(-count // 4), np.uint64)
    return words.view(np.uint16)[:count]


def bfloat16_normal(rng: np.random.Generator, shape: tuple[int, ...], std: float) -> NDArray[np.uint16]:
    """Bits of normal values of standard deviation `std`, `shape`."""
    return _bfloat16_table(std)[_indices(rng, int(np.prod(shape)))].reshape(shape)


def float8_normal(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """e4m3 codes of normal values of standard deviation FLOAT8_STD, `shape`."""
    return _float8_table()[_indices(rng, int(np.prod(shape)))].reshape(shape)


def int4_words(rng: np.random.Generator, rows: int, cols: int) -> NDArray[np.int32]:
    """Eight codes 1..15 a word, symmetric about 8 and denser there, `[rows, ceil(cols / 8)]`."""
    count = rows * -(-cols // 8)
    words = rng.integers(0, 2**64, (2, -(-count // 2)), np.uint64)
    # Sums of 0..7 and 0..7 and 1 stay within their four bits.
    summed = (words[0] & _LOW_BITS) + (words[1] & _LOW_BITS) + _ONES
    codes: NDArray[np.int32] = summed.view(np.int32)[:count].reshape(rows, -1)
    return codes
