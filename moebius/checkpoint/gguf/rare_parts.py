"""Parts of the GGUF types Q2_K, Q3_K, IQ4_NL and IQ4_XS, for `block_parts`; see there.

Codes of IQ4 types become int8 by a code book of whole numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moebius.checkpoint.gguf.decoders import Bytes, Floats, float16_factors

Signed = NDArray[np.int8]

# What the 16 codes of IQ4 types mean: `kvalues_iq4nl` of ggml.
_IQ4 = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)  # fmt: skip


def iq4_codes(blocks: Bytes) -> Signed:
    """Of blocks that end in groups of 16 bytes: 16 columns in the low nibbles, 16 more in the high ones."""
    count = len(blocks)
    packed = blocks[:, -(blocks.shape[1] // 16 * 16) :].reshape(count, -1, 1, 16)
    nibbles = np.concatenate((packed & 15, packed >> 4), axis=2)
    return _IQ4[nibbles].reshape(count, -1)


def iq4_xs_scales(blocks: Bytes) -> Floats:
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


def _words(codes: Bytes) -> NDArray[np.int32]:
    """Eight to a word in column order."""
    flat = codes.reshape(-1, 256)
    return (flat[:, 0::2] | (flat[:, 1::2] << np.uint8(4))).view(np.int32)


def q2_k_codes(blocks: Bytes) -> NDArray[np.int32]:
    """0 to 3, in 64 bytes behind the scales."""
    return _words(_two_bits(blocks[:, 16:80]))


def q2_k_scales(blocks: Bytes) -> Floats:
    """A factor behind the codes times 16 whole numbers of 4 bits."""
    return float16_factors(blocks[:, 80:82]) * (blocks[:, :16] & 15)


def q2_k_mins(blocks: Bytes) -> Floats:
    """Likewise, with the factor behind that one and the bytes' high bits; negative."""
    return -float16_factors(blocks[:, 82:84]) * (blocks[:, :16] >> 4)


def q3_k_codes(blocks: Bytes) -> NDArray[np.int32]:
    """-4 to 3, plus 8: two low bits, and a third in 32 bytes before them, which is 4 more.

    Bit 4h + q of these is that of quarter q of half h.
    """
    places = np.arange(8, dtype=np.uint8).reshape(2, 4, 1)
    third = (blocks[:, None, None, :32] >> places & np.uint8(1)) << np.uint8(2)
    return _words((_two_bits(blocks[:, 32:96]) | third) + np.uint8(4))


def q3_k_scales(blocks: Bytes) -> Floats:
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
