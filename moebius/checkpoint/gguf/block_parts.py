"""What packed formats keep of GGUF blocks: codes, scales and mins, without any float decoded.

A block's weights mean code * scale, or code * scale + minimum. kernels/format/gguf_blocks.cc takes the parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moebius import _kernels
from moebius.checkpoint.weight_schemes import Role


@dataclass(frozen=True, slots=True)
class BlockPart:
    """One tensor of the scheme that holds a type's blocks."""

    dtype: str  # As safetensors headers spell it.
    # Weights that an element stands for, along in.
    step: int


_WORDS, _BYTES, _HALVES = BlockPart("I32", 8), BlockPart("U8", 1), BlockPart("F16", 32)
# Products of a factor of the block and a whole number, as words of both (`SourceMatrix.scale_type`).
_OF_32, _OF_16 = BlockPart("I32", 32), BlockPart("I32", 16)

# By the type's name, then by what the scheme calls the tensor; those of a type are read of the same blocks.
BLOCK_PARTS: Mapping[str, Mapping[Role, BlockPart]] = {
    "Q4_0": {"codes": _WORDS, "scales": _HALVES},
    "Q4_1": {"codes": _WORDS, "scales": _HALVES, "mins": _HALVES},
    "Q4_K": {"codes": _WORDS, "scales": _OF_32, "mins": _OF_32},
    "Q5_0": {"codes": _BYTES, "scales": _HALVES},
    "Q5_1": {"codes": _BYTES, "scales": _HALVES, "mins": _HALVES},
    "Q5_K": {"codes": _BYTES, "scales": _OF_32, "mins": _OF_32},
    "Q6_K": {"codes": _BYTES, "scales": _OF_16},
    "Q8_0": {"codes": BlockPart("I8", 1), "scales": _HALVES},
    "Q2_K": {"codes": _BYTES, "scales": _OF_16, "mins": _OF_16},
    "Q3_K": {"codes": _BYTES, "scales": _OF_16},
    "IQ4_NL": {"codes": _BYTES, "scales": _HALVES},
    "IQ4_XS": {"codes": _BYTES, "scales": _OF_32},
    "IQ3_S": {"codes": _WORDS, "scales": _OF_32},
    "IQ3_XXS": {"codes": _WORDS, "scales": _OF_32},
    "IQ2_S": {"codes": _WORDS, "scales": _OF_16},
    "IQ2_XS": {"codes": _OF_16, "scales": _OF_16},
    "IQ2_XXS": {"codes": _OF_16, "scales": _OF_32},
    "IQ1_M": {"codes": _OF_16, "scales": _OF_16},
    "IQ1_S": {"codes": _OF_16, "scales": _OF_32},
    "TQ1_0": {"codes": _OF_16, "scales": _OF_32},
    "TQ2_0": {"codes": _BYTES, "scales": BlockPart("F16", 128)},
    "MXFP4": {"codes": BlockPart("U8", 2), "scales": BlockPart("U8", 32)},
    "NVFP4": {"codes": _BYTES, "scales": BlockPart("F8_E4M3", 16)},
}


def take_part(kind: str, role: Role, blocks: NDArray[np.uint8], output: NDArray[np.generic]) -> None:
    """Write a part of blocks uint8 `[rows, blocks * bytes]` to `output` `[rows, blocks * weights / step]`.

    Raises ValueError for a part that the type has not, and for arrays of other sizes.
    """
    _kernels.take_gguf_part(kind, role, blocks, output)
