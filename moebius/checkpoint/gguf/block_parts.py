"""Codes, scales and mins of GGUF blocks as packed formats keep them, without any float decoded.

A block's weights mean code * scale, or code * scale + minimum. Every function takes uint8 `[blocks, bytes of
a block]` and returns `[blocks, elements]`. Layouts of blocks: ggml-common.h of
https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moebius.checkpoint.gguf.decoders import (
    Bytes,
    Floats,
    float16_factors,
    group_mins,
    group_scales,
    q5_k_codes,
    q6_k_codes,
    q6_k_scales,
)
from moebius.checkpoint.weight_schemes import Role

# uint16 of two bytes with a code each: the codes side by side in the low byte.
_FIRST, _SECOND = 0x000F, 0x00F0


@dataclass(frozen=True, slots=True)
class BlockPart:
    """One tensor of the scheme that holds a type's blocks."""

    dtype: str  # As safetensors headers spell it.
    # Weights that an element stands for, along in.
    step: int
    take: Callable[[Bytes], NDArray[Any]]


def _nibbles(pairs: NDArray[np.uint16], target: Bytes) -> None:
    """Low nibbles of bytes 0, 1, 2, ... two to a byte, the even one low, then likewise the high ones.

    pairs `[..., n]`: bytes as uint16; target `[..., 2, n]`.
    """
    target[..., 0, :] = (pairs & _FIRST) | (pairs >> 4 & _SECOND)
    target[..., 1, :] = (pairs >> 4 & _FIRST) | (pairs >> 8 & _SECOND)


def _halves(blocks: Bytes) -> Bytes:
    """16 last bytes, of columns 0 to 15 in the low nibbles and 16 to 31 in the high ones, in column order."""
    output = np.empty((len(blocks), 2, 8), np.uint8)
    _nibbles(np.ascontiguousarray(blocks[:, -16:]).view("<u2"), output)
    return output.reshape(-1, 16)


def _words_of_halves(blocks: Bytes) -> NDArray[Any]:
    return _halves(blocks).view("<i4")


def _words_of_q4_k(blocks: Bytes) -> NDArray[Any]:
    """4 x 32 bytes, each of a group's code and the next one's."""
    output = np.empty((len(blocks), 4, 2, 16), np.uint8)
    _nibbles(np.ascontiguousarray(blocks[:, 16:]).view("<u2").reshape(-1, 4, 16), output)
    return output.reshape(-1, 128).view("<i4")


def _bytes_of_q8_0(blocks: Bytes) -> NDArray[Any]:
    return blocks[:, 2:].view(np.int8)


def _five_bits(blocks: Bytes) -> Bytes:
    """32 fifth bits before 16 bytes of nibbles: codes 0 to 31."""
    codes = np.unpackbits(blocks[:, -20:-16], axis=1, bitorder="little")
    codes <<= 4
    codes[:, :16] |= blocks[:, -16:] & 15
    codes[:, 16:] |= blocks[:, -16:] >> 4
    return codes


def _bytes_of_q5_0(blocks: Bytes) -> NDArray[Any]:
    codes = _five_bits(blocks).view(np.int8)
    codes -= 16
    return codes


def _bytes_of_q5_1(blocks: Bytes) -> NDArray[Any]:
    return _five_bits(blocks).view(np.int8)


def _bytes_of_q5_k(blocks: Bytes) -> NDArray[Any]:
    return q5_k_codes(blocks).reshape(-1, 256).view(np.int8)


def _bytes_of_q6_k(blocks: Bytes) -> NDArray[Any]:
    codes = q6_k_codes(blocks).reshape(-1, 256).view(np.int8)
    codes -= 32
    return codes


def _factor(place: int) -> Callable[[Bytes], NDArray[Any]]:
    """The float16 at a byte."""

    def take(blocks: Bytes) -> NDArray[Any]:
        return np.ascontiguousarray(blocks[:, place : place + 2]).view("<f2")

    return take


def _e8m0(blocks: Bytes) -> NDArray[Any]:
    return blocks[:, :1]


def _negative_mins(blocks: Bytes) -> NDArray[Any]:
    return -group_mins(blocks)


# What the 16 codes of IQ4 types mean, which become int8: `kvalues_iq4nl` of ggml.
_IQ4 = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)  # fmt: skip


def _iq4_codes(blocks: Bytes) -> NDArray[np.int8]:
    """Of blocks that end in groups of 16 bytes: 16 columns in the low nibbles, 16 more in the high ones."""
    count = len(blocks)
    packed = blocks[:, -(blocks.shape[1] // 16 * 16) :].reshape(count, -1, 1, 16)
    nibbles = np.concatenate((packed & 15, packed >> 4), axis=2)
    return _IQ4[nibbles].reshape(count, -1)


def _iq4_xs_scales(blocks: Bytes) -> Floats:
    """A factor times eight numbers of 6 bits less 32: low bits in nibbles, two high ones before them."""
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2")
    low = np.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), axis=2).reshape(-1, 8)
    numbers = low | ((high >> np.arange(0, 16, 2, dtype=np.uint16) & 3) << 4)
    scales: Floats = float16_factors(blocks[:, :2]) * (numbers.astype(np.float32) - 32)
    return scales


def _two_bits(packed: Bytes) -> Bytes:
    """64 bytes are two halves of 32; bits 2q and 2q + 1 of a half are quarter q's of 32 columns.

    `[blocks, 2, 4, 32]`.
    """
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    found: Bytes = packed.reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)
    return found


def _words_of(codes: Bytes) -> NDArray[np.int32]:
    """Eight to a word in column order."""
    flat = codes.reshape(-1, 256)
    return (flat[:, 0::2] | (flat[:, 1::2] << np.uint8(4))).view(np.int32)


def _q2_k_codes(blocks: Bytes) -> NDArray[np.int32]:
    """0 to 3, in 64 bytes after the scales."""
    return _words_of(_two_bits(blocks[:, 16:80]))


def _q2_k_scales(blocks: Bytes) -> Floats:
    """A factor after the codes times 16 whole numbers of 4 bits."""
    return float16_factors(blocks[:, 80:82]) * (blocks[:, :16] & 15)


def _q2_k_mins(blocks: Bytes) -> Floats:
    """Likewise, with the factor after that one and the bytes' high bits; negative."""
    return -float16_factors(blocks[:, 82:84]) * (blocks[:, :16] >> 4)


def _q3_k_codes(blocks: Bytes) -> NDArray[np.int32]:
    """-4 to 3, plus 8: two low bits, and a third in 32 bytes before them, which is 4 more.

    Bit 4h + q of these is that of quarter q of half h.
    """
    places = np.arange(8, dtype=np.uint8).reshape(2, 4, 1)
    third = (blocks[:, None, None, :32] >> places & np.uint8(1)) << np.uint8(2)
    return _words_of((_two_bits(blocks[:, 32:96]) | third) + np.uint8(4))


def _q3_k_scales(blocks: Bytes) -> Floats:
    """A factor times 16 whole numbers of 6 bits less 32.

    Of 12 bytes, eight have the low bits in their nibbles, and bits 2i and 2i + 1 of the last four the high
    ones of numbers 4i to 4i + 3.
    """
    packed = blocks[:, 96:108]
    low = np.concatenate((packed[:, :8] & 15, packed[:, :8] >> 4), axis=1)
    high = packed[:, None, 8:] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    numbers = low | (high.reshape(-1, 16) << 4)
    scales: Floats = float16_factors(blocks[:, 108:110]) * (numbers.astype(np.float32) - 32)
    return scales


_SCALE, _MINIMUM = BlockPart("F16", 32, _factor(0)), BlockPart("F16", 32, _factor(2))
_K_SCALES, _K_MINS = BlockPart("F32", 32, group_scales), BlockPart("F32", 32, _negative_mins)

# By the type's name, then by what the scheme calls the tensor; those of a type are read of the same blocks.
BLOCK_PARTS: Mapping[str, Mapping[Role, BlockPart]] = {
    "Q4_0": {"codes": BlockPart("I32", 8, _words_of_halves), "scales": _SCALE},
    "Q4_1": {"codes": BlockPart("I32", 8, _words_of_halves), "scales": _SCALE, "mins": _MINIMUM},
    "Q4_K": {"codes": BlockPart("I32", 8, _words_of_q4_k), "scales": _K_SCALES, "mins": _K_MINS},
    "Q5_0": {"codes": BlockPart("I8", 1, _bytes_of_q5_0), "scales": _SCALE},
    "Q5_1": {"codes": BlockPart("I8", 1, _bytes_of_q5_1), "scales": _SCALE, "mins": _MINIMUM},
    "Q5_K": {"codes": BlockPart("I8", 1, _bytes_of_q5_k), "scales": _K_SCALES, "mins": _K_MINS},
    "Q6_K": {"codes": BlockPart("I8", 1, _bytes_of_q6_k), "scales": BlockPart("F32", 16, q6_k_scales)},
    "Q8_0": {"codes": BlockPart("I8", 1, _bytes_of_q8_0), "scales": _SCALE},
    "Q2_K": {
        "codes": BlockPart("I32", 8, _q2_k_codes),
        "scales": BlockPart("F32", 16, _q2_k_scales),
        "mins": BlockPart("F32", 16, _q2_k_mins),
    },
    "Q3_K": {
        "codes": BlockPart("I32", 8, _q3_k_codes),
        "scales": BlockPart("F32", 16, _q3_k_scales),
    },
    "IQ4_NL": {"codes": BlockPart("I8", 1, _iq4_codes), "scales": _SCALE},
    "IQ4_XS": {
        "codes": BlockPart("I8", 1, _iq4_codes),
        "scales": BlockPart("F32", 32, _iq4_xs_scales),
    },
    "MXFP4": {"codes": BlockPart("U8", 2, _halves), "scales": BlockPart("U8", 32, _e8m0)},
}
