"""Quantisation types of GGUF: sizes of their blocks, and the values blocks stand for.

A type stores a row as blocks of `weights` values in `nbytes` bytes. What they stand for is what the package
`gguf` decodes: by its own arithmetic, or faster by that of `decoders`, which also has types that the package
does not decode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.gguf.decoders import DECODERS

# As safetensors headers spell what needs no arithmetic.
FLOAT_TYPES: Mapping[str, str] = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
# Whole numbers, of which few architectures have tables.
INTEGER_TYPES: Mapping[str, str] = {"I32": "I32"}
# Those that are quantised, as far as published files have them and the package decodes them.
QUANTISED_TYPES = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "Q1_0", "Q2_0"),
    *("MXFP4", "NVFP4"),
)
# Types that the package does not decode, or does not know: number, weights and bytes of a block.
_NEWER_TYPES: Mapping[str, tuple[int, int, int]] = {"Q1_0": (41, 128, 18), "Q2_0": (42, 64, 18)}
# Values decoded at a time: what the arithmetic needs besides its result stays in a core's cache.
_CHUNK = 1 << 17


@dataclass(frozen=True, slots=True)
class BlockType:
    """Filled by `block_type`."""

    name: str
    weights: int
    nbytes: int

    @property
    def is_float(self) -> bool:
        """Returns whether it stores floats as they are."""
        return self.name in FLOAT_TYPES

    @property
    def is_integer(self) -> bool:
        """Returns whether it stores whole numbers as they are."""
        return self.name in INTEGER_TYPES

    def pieces(self, count: int) -> Iterator[slice]:
        """Yields slices of `count` blocks, such that arithmetic on one stays in a core's cache."""
        step = max(1, _CHUNK // self.weights)
        yield from (slice(begin, begin + step) for begin in range(0, count, step))

    def dequantise(self, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Maps uint8 `[rows, blocks * nbytes]` to float32 `[rows, blocks * weights]`."""
        rows, width = blocks.shape
        flat = blocks.reshape(-1, self.nbytes)
        output = np.empty((len(flat), self.weights), np.float32)
        decode = DECODERS.get(self.name)
        if decode is None:
            from gguf import GGMLQuantizationType, quants  # here: most processes need none of it

            decode = partial(quants.dequantize, qtype=GGMLQuantizationType[self.name])
        for piece in self.pieces(len(flat)):
            output[piece] = decode(flat[piece])
        return output.reshape(rows, width // self.nbytes * self.weights)


@cache
def _block_types() -> Mapping[int, BlockType]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    found: dict[int, BlockType] = {}
    for name in (*FLOAT_TYPES, *INTEGER_TYPES, *QUANTISED_TYPES):
        if name in _NEWER_TYPES:
            number, weights, nbytes = _NEWER_TYPES[name]
        else:
            number = GGMLQuantizationType[name].value
            weights, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
        found[number] = BlockType(name, weights, nbytes)
    return found


def unusable(kind: object, tensor: str) -> CheckpointError:
    """The error for a tensor of a type that no weight is read of."""
    return CheckpointError(
        f"tensor {tensor!r} is of GGUF type {kind}; allowed: {', '.join((*FLOAT_TYPES, *QUANTISED_TYPES))}"
    )


def block_type(number: int, tensor: str) -> BlockType:
    """Returns the type of that number. Raises CheckpointError naming the tensor and the types there are."""
    found = _block_types().get(number)
    if found is None:
        from gguf import GGMLQuantizationType

        known = {kind.value: kind.name for kind in GGMLQuantizationType}
        raise unusable(known.get(number, number), tensor)
    return found
