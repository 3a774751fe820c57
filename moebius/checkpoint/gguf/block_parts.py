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

from moebius.checkpoint.gguf import rare_parts
from moebius.checkpoint.gguf.decoders import (
    Bytes,
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

    # As safetensors headers spell it.
    dtype: str
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
        "codes": BlockPart("I32", 8, rare_parts.q2_k_codes),
        "scales": BlockPart("F32", 16, rare_parts.q2_k_scales),
        "mins": BlockPart("F32", 16, rare_parts.q2_k_mins),
    },
    "Q3_K": {
        "codes": BlockPart("I32", 8, rare_parts.q3_k_codes),
        "scales": BlockPart("F32", 16, rare_parts.q3_k_scales),
    },
    "IQ4_NL": {"codes": BlockPart("I8", 1, rare_parts.iq4_codes), "scales": _SCALE},
    "IQ4_XS": {
        "codes": BlockPart("I8", 1, rare_parts.iq4_codes),
        "scales": BlockPart("F32", 32, rare_parts.iq4_xs_scales),
    },
    "MXFP4": {"codes": BlockPart("U8", 2, _halves), "scales": BlockPart("U8", 32, _e8m0)},
}
