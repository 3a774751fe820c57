"""What share of its limit a layer of experts reaches: the `ratio` columns of docs/benchmarks.md, as they are.

The limit is the larger of bytes over bandwidth and operations over peak, so seconds = limit / ratio. A test
compares these rows with the document.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

# "Expert kernels, one MoE layer, host C" (AMX): weights of an expert, then format -> ratio at ROWS.
ROWS = (1, 4, 16, 64, 1024)
AMX_RATIOS: Mapping[str, tuple[int, Mapping[str, tuple[float, ...]]]] = {
    "qwen3-30b-a3b": (
        3 * 2048 * 768,
        {
            "bfloat16": (0.70, 0.70, 0.68, 0.70, 0.46),
            "fp8_block": (0.77, 0.81, 0.81, 0.66, 0.18),
            "int8": (0.68, 0.79, 0.73, 0.65, 0.26),
            "int8_w8a8": (0.70, 0.67, 0.70, 0.72, 0.36),
            "int4_g32": (0.63, 0.69, 0.58, 0.45, 0.12),
            "int4_g128": (0.66, 0.61, 0.67, 0.47, 0.15),
            "mxfp4": (0.67, 0.69, 0.64, 0.49, 0.19),
            "nvfp4": (0.60, 0.62, 0.57, 0.36, 0.13),
        },
    ),
    "qwen3-next-80b": (
        3 * 2048 * 512,
        {
            "bfloat16": (0.70, 0.77, 0.73, 0.81, 0.61),
            "fp8_block": (0.76, 0.77, 0.78, 0.76, 0.27),
            "int8_w8a8": (0.68, 0.72, 0.70, 0.73, 0.49),
            "int4_g32": (0.67, 0.73, 0.69, 0.56, 0.21),
            "mxfp4": (0.66, 0.70, 0.73, 0.56, 0.27),
        },
    ),
    "glm-4.7": (
        3 * 5120 * 1536,
        {
            "bfloat16": (0.70, 0.82, 0.80, 0.78, 0.58),
            "fp8_block": (0.82, 0.82, 0.76, 0.68, 0.26),
            "int8_w8a8": (0.66, 0.69, 0.68, 0.74, 0.54),
            "int4_g32": (0.74, 0.77, 0.75, 0.64, 0.17),
            "mxfp4": (0.77, 0.78, 0.76, 0.67, 0.25),
        },
    ),
    "deepseek-v3": (
        3 * 7168 * 2048,
        {
            "bfloat16": (0.88, 0.86, 0.89, 0.86, 0.56),
            "fp8_block": (0.86, 0.85, 0.79, 0.76, 0.34),
            "int8_w8a8": (0.84, 0.84, 0.82, 0.82, 0.62),
            "int4_g32": (0.78, 0.78, 0.76, 0.64, 0.20),
            "mxfp4": (0.76, 0.74, 0.76, 0.66, 0.31),
        },
    ),
    "minimax-m2": (
        3 * 3072 * 1536,
        {
            "bfloat16": (0.78, 0.79, 0.77, 0.77, 0.60),
            "fp8_block": (0.77, 0.75, 0.79, 0.71, 0.28),
            "int8_w8a8": (0.81, 0.80, 0.80, 0.76, 0.54),
            "int4_g32": (0.72, 0.76, 0.77, 0.69, 0.19),
            "mxfp4": (0.75, 0.77, 0.76, 0.69, 0.31),
        },
    ),
}
# "Expert kernels, host A" (no tiles): ratio to the best bandwidth seen, at VECTOR_ROWS; kept beyond them.
VECTOR_ROWS = (1, 4, 16)
VECTOR_RATIOS: Mapping[str, tuple[float, ...]] = {
    "bfloat16": (0.80, 0.83, 0.81),
    "fp8_block": (0.73, 0.72, 0.69),
    "int8": (0.72, 0.70, 0.50),
    "int8_w8a8": (0.72, 0.71, 0.44),
    "int4_g32": (0.41, 0.50, 0.47),
    "mxfp4": (0.50, 0.47, 0.44),
}
# Formats that were not measured take the row of one that is decoded alike.
_ALIKE = (
    ("float32", "bfloat16"),
    ("float16", "bfloat16"),
    ("fp8", "fp8_block"),
    ("int4_g128", "int4_g128"),
    ("int4", "int4_g32"),
    ("nvfp4", "nvfp4"),
    ("int8", "int8"),
)
_FALLBACK = {"int4_g128": "int4_g32", "nvfp4": "mxfp4", "int8": "int8_w8a8"}


def kernel_efficiency(weight_format: str, expert_weights: int, rows: float, has_tiles: bool) -> float:
    """Share of its limit that a layer of experts reaches at `rows` rows of a call, 0 to 1.

    `expert_weights`: of one expert; the measured shape nearest to it counts. Between measured rows the
    logarithm of rows is interpolated.
    """
    if has_tiles:
        nearest = min(AMX_RATIOS.values(), key=lambda shape: abs(math.log(shape[0] / expert_weights)))
        return _interpolated(ROWS, _row(nearest[1], weight_format), rows)
    return _interpolated(VECTOR_ROWS, _row(VECTOR_RATIOS, weight_format), rows)


def _row(table: Mapping[str, tuple[float, ...]], weight_format: str) -> tuple[float, ...]:
    if weight_format in table:
        return table[weight_format]
    alike = next((known for begin, known in _ALIKE if weight_format.startswith(begin)), "bfloat16")
    return table[alike] if alike in table else table[_FALLBACK[alike]]


def _interpolated(points: tuple[int, ...], values: tuple[float, ...], rows: float) -> float:
    if rows <= points[0]:
        return values[0]
    for index in range(1, len(points)):
        if rows <= points[index]:
            begin, end = math.log(points[index - 1]), math.log(points[index])
            share = (math.log(rows) - begin) / (end - begin)
            return values[index - 1] + share * (values[index] - values[index - 1])
    return values[-1]
