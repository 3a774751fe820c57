"""How long products with dense weights take on a GPU that keeps them packed, beside those in 16 bits.

By "Dense layers as they are stored, on a GPU" of docs/benchmarks.md: times of a product there, over those of
bfloat16 weights of the same size.
"""

from __future__ import annotations

from functools import cache

# Up to this many rows, the speed of packed weights over that of bfloat16: by CUDA kernels, and by those of
# Triton for rows and in tiles, which compute what the former do not (`gpu_service.ops.dense_panels`).
_PANELS = ((1, 1.9), (4, 1.4), (16, 1.15), (127, 0.5))
_TILES = ((1, 1.9), (4, 0.7), (127, 0.2))
# Above, a product is bfloat16's, after weights have been unpacked: packed ones read and 16 bits written, at
# this share of a GPU's bandwidth.
_UNPACK_BANDWIDTH_SHARE = 0.35
_VALUE_BYTES = 2


def packed_seconds(name: str, rows: int, elements: int, bandwidth: float, plain_seconds: float) -> float:
    """Returns the time of products of `rows` rows with weights that are kept in a packed format.

    `elements`: weights; `bandwidth`: of the GPU's memory, bytes per second; `plain_seconds`: the same
    products with weights in 16 bits.
    """
    for most, speed in _PANELS if _has_kernels(name) else _TILES:
        if rows <= most:
            return plain_seconds / speed
    moved = elements * (_VALUE_BYTES + _bits(name) / 8)
    return plain_seconds + moved / (bandwidth * _UNPACK_BANDWIDTH_SHARE)


@cache
def _has_kernels(name: str) -> bool:
    from gpu_service.ops.grouped_panels import multiplies
    from gpu_service.ops.panels import panel_format

    length = 256  # of rows; any in whole blocks would do
    return multiplies(panel_format(name, length), length)


@cache
def _bits(name: str) -> float:
    """Returns the bits of a weight, scales included."""
    from gpu_service.ops.packed_weight import PackedPart, packed_bytes

    columns, rows = 4096, 16
    return packed_bytes(columns, (PackedPart(name, rows),)) * 8 / (columns * rows)
