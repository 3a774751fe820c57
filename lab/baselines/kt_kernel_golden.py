"""What a layer of the baseline should give: proof that it was handed the weights and rows it is timed
with.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lab.baselines.kt_kernel_formats import PeerFormat, Source
from lab.bench.kernels_inputs import Routing

FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float8_values() -> NDArray[np.float32]:
    """Returns [256] values of e4m3fn; NaN where it has none."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent.astype(float) - 7)
    )
    size[codes & 127 == 127] = np.nan
    return np.where(codes & 128, -size, size).astype(np.float32)


def dequantise(form: PeerFormat, source: Source, expert: int, rows: int, columns: int) -> NDArray[np.float32]:
    """Returns [rows, columns] of one expert."""
    count = rows * columns
    if form.source_bits == 16:
        return from_bfloat16(source.weights[expert * count : (expert + 1) * count]).reshape(rows, columns)
    if form.source_bits == 8:
        codes = source.weights[expert * count : (expert + 1) * count]
        weights = float8_values()[codes].reshape(rows, columns)
    else:
        pairs = source.weights[expert * count // 2 : (expert + 1) * count // 2]
        nibbles = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(rows, columns)
        weights = FLOAT4[nibbles] if "FP4" in form.method else nibbles.astype(np.float32) - 8
    scaled: NDArray[np.float32] = weights * _scale_of_each(form, source, expert, rows, columns)
    return scaled


def _scale_of_each(
    form: PeerFormat, source: Source, expert: int, rows: int, columns: int
) -> NDArray[np.float32]:
    assert source.scales is not None
    scales, size = source.scales[expert], form.group_size
    if form.scales == "block":
        spread: NDArray[np.float32] = np.repeat(np.repeat(scales, size, axis=0), size, axis=1)
        return spread[:rows, :columns]
    if form.scales == "channel":
        per_row: NDArray[np.float32] = scales[:, None].astype(np.float32)
        return per_row
    return np.repeat(from_bfloat16(scales), size, axis=1)


def layer_row(
    form: PeerFormat, sources: list[Source], hidden_states: NDArray[np.uint16], call: Routing, inner: int
) -> NDArray[np.float32]:
    """Returns [hidden_size] float32: row 0 of a call, by the definition of the layer."""
    row = from_bfloat16(hidden_states[0])
    hidden = len(row)
    output = np.zeros(hidden, dtype=np.float32)
    for expert, weight in zip(call.topk_ids[0].tolist(), call.topk_weights[0], strict=True):
        gate = dequantise(form, sources[0], expert, inner, hidden) @ row
        up = dequantise(form, sources[1], expert, inner, hidden) @ row
        with np.errstate(over="ignore"):
            activation = gate / (1 + np.exp(-gate)) * up
        output += weight * (dequantise(form, sources[2], expert, hidden, inner) @ activation)
    return output
