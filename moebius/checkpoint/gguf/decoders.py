"""Values of the types that published files are mostly made of, ten times as fast as the package `gguf`.

Every function takes uint8 `[blocks, bytes of a block]` and returns float32 `[blocks, weights]`, the package's
values bit by bit: the same operations in the same order, into memory that is written once. Q1_0 and Q2_0,
which the package does not decode, are ggml's. Layouts of blocks:
ggml-common.h of https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def _float16_factors(blocks: Bytes) -> Floats:
    """Decodes float16 factors, `[blocks, factors]`."""
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    """Decodes factor; 16 bytes of two codes from 0 to 15, which mean -8 to 7."""
    codes = blocks[:, 2:]
    values = np.empty((len(blocks), 32), np.float32)
    np.subtract(codes & 15, np.float32(8), out=values[:, :16])
    np.subtract(codes >> 4, np.float32(8), out=values[:, 16:])
    values *= _float16_factors(blocks[:, :2])
    return values


def _q8_0(blocks: Bytes) -> Floats:
    """Decodes a float16 factor, then 32 int8."""
    return np.multiply(blocks[:, 2:].view(np.int8), _float16_factors(blocks[:, :2]), dtype=np.float32)


def _q1_0(blocks: Bytes) -> Floats:
    """Decodes a float16 factor; a bit for each of 128 weights, lowest bits first: the factor, or its
    negative.
    """
    bits = np.unpackbits(np.ascontiguousarray(blocks[:, 2:]), axis=1, bitorder="little")
    values: Floats = np.where(bits, np.float32(1), np.float32(-1))
    values *= _float16_factors(blocks[:, :2])
    return values


def _q2_0(blocks: Bytes) -> Floats:
    """Decodes a float16 factor; 64 codes of two bits, lowest bits first, which mean -1 to 2."""
    codes = blocks[:, 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    values: Floats = np.subtract(codes.reshape(len(blocks), 64), np.float32(1), dtype=np.float32)
    values *= _float16_factors(blocks[:, :2])
    return values


def _scales_and_mins(blocks: Bytes) -> tuple[Floats, Floats]:
    """Returns the scales and mins of Q4_K and Q5_K, `[blocks, 8]` each: what codes are multiplied by, and
    less by then.

    Products of the two factors and of whole numbers 6 bits wide, exact in float32. Of these 12 bytes hold
    the first four whole, and of the others two bits next to them.
    """
    packed = blocks[:, 4:16]
    low, high, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((low & 63, (rest & 15) | ((low >> 2) & 0x30)), axis=1)
    mins = np.concatenate((high & 63, (rest >> 4) | ((high >> 2) & 0x30)), axis=1)
    factors = _float16_factors(blocks[:, :4])
    return factors[:, :1] * scales, factors[:, 1:] * mins


def _scaled(values: Floats, blocks: Bytes) -> Floats:
    """Decodes codes `[blocks, 8, 32]` times their scales less their mins, in place."""
    scales, mins = _scales_and_mins(blocks)
    values *= scales[:, :, None]
    values -= mins[:, :, None]
    return values.reshape(len(values), 256)


def _q4_k(blocks: Bytes) -> Floats:
    """Decodes two factors; scales and minima of 8 groups; 4 x 32 bytes, each of a group's code and the next
    one's.
    """
    count = len(blocks)
    codes = blocks[:, 16:].reshape(count, 4, 32)
    values = np.empty((count, 4, 2, 32), np.float32)
    values[:, :, 0], values[:, :, 1] = codes & 15, codes >> 4
    return _scaled(values.reshape(count, 8, 32), blocks)


def _q5_k_codes(blocks: Bytes) -> Bytes:
    """Returns the codes of Q5_K, 0 to 31: those of Q4_K, with the fifth bits of all groups in 32 bytes before
    them.

    `[blocks, 8, 32]`.
    """
    count = len(blocks)
    fifth, low = blocks[:, None, 16:48], blocks[:, 48:].reshape(count, 4, 32)
    codes = np.empty((count, 8, 32), np.uint8)
    np.bitwise_and(fifth >> np.arange(8, dtype=np.uint8)[:, None], 1, out=codes)
    codes <<= 4
    codes[:, 0::2] |= low & 15
    codes[:, 1::2] |= low >> 4
    return codes


def _q5_k(blocks: Bytes) -> Floats:
    return _scaled(_q5_k_codes(blocks).astype(np.float32), blocks)


def _q6_k_codes(blocks: Bytes) -> Bytes:
    """Decodes two halves of 64 low bytes and 32 high ones: 0 to 63, which mean -32 to 31, `[blocks, 2, 4,
    32]`.

    In a half, low nibbles of the two 32 bytes are quarters 0 and 1, high ones 2 and 3, and bits 2q and 2q + 1
    of the high bytes are quarter q's.
    """
    count = len(blocks)
    low = blocks[:, :128].reshape(count, 2, 2, 32)
    high = blocks[:, 128:192].reshape(count, 2, 1, 32)
    codes = np.empty((count, 2, 4, 32), np.uint8)
    codes[:, :, :2], codes[:, :, 2:] = low & 15, low >> 4
    codes |= ((high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]) & 3) << 4
    return codes


def _q6_k_scales(blocks: Bytes) -> Floats:
    """Decodes 16 int8 after the codes times the factor after them, `[blocks, 16]`."""
    return _float16_factors(blocks[:, 208:]) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)


def _q6_k(blocks: Bytes) -> Floats:
    values = np.subtract(_q6_k_codes(blocks), np.float32(32)).reshape(len(blocks), 16, 16)
    values *= _q6_k_scales(blocks)[:, :, None]
    return values.reshape(len(blocks), 256)


# By the type's name; the package decodes the others.
DECODERS: Mapping[str, Callable[[Bytes], Floats]] = {
    "Q1_0": _q1_0,
    "Q2_0": _q2_0,
    "Q4_0": _q4_0,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
