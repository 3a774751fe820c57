"""Packed matrices of random codes and scales, made byte by byte from the documented panel layout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moebius import _kernels
from moebius.kernels.weight_formats import CODE_MIDDLES, GRID_UNITS, PanelLayout, panel_layout
from tests.helpers.numpy_unpack import scale_bits


@dataclass(frozen=True)
class PackedMatrix:
    """Filled by `random_matrix`; `weights` is what the packed bytes mean, as the reference unpacker says."""

    format: str
    k: int
    num_panels: int
    has_bias: bool
    packed: NDArray[np.uint8]  # [num_panels * panel_bytes]
    weights: NDArray[np.float32]  # [16 * num_panels, k]
    bias: NDArray[np.float32]  # [16 * num_panels]

    def golden(self, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        """rows [m, k] times the weights plus bias, in float64."""
        result: NDArray[np.float64] = rows.astype(np.float64) @ self.weights.T.astype(np.float64) + self.bias
        return result


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Truncated: good enough for made-up weights."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _codes(rng: np.random.Generator, format_name: str, count: int) -> NDArray[np.uint8]:
    """`count` bytes of codes without NaN or infinity."""
    if format_name == "float32":
        return rng.standard_normal(count // 4).astype(np.float32).view(np.uint8)
    if format_name == "bfloat16":
        return bfloat16_bits(rng.standard_normal(count // 2).astype(np.float32)).view(np.uint8)
    if format_name == "float16":
        values = rng.standard_normal(count // 2) * 10.0 ** rng.integers(-7, 2, count // 2)
        return values.astype(np.float16).view(np.uint8)
    codes = rng.integers(0, 256, count, np.uint8)
    if "fp8" in format_name:
        codes[(codes & 0x7F) == 0x7F] = 0x81
    return codes


def _scales(rng: np.random.Generator, format_name: str, count: int) -> NDArray[np.uint8]:
    """`count` bytes of group scales in the format's type, between about 0.1 and 1."""
    values = rng.uniform(0.1, 1.0, count).astype(np.float32)
    if format_name in ("fp8_block", "fp8_g32", "fp8_g128"):
        return values[: count // 4].view(np.uint8)
    if format_name in ("mxfp4", "mxfp8"):
        return rng.integers(120, 128, count, np.uint8)
    if format_name == "nvfp4":
        return rng.integers(0, 0x7F, count, np.uint8)  # subnormal ones too
    if format_name.endswith(("_f16", "_mins")):
        return values[: count // 2].astype(np.float16).view(np.uint8)
    return bfloat16_bits(values[: count // 2]).view(np.uint8)


def _products(rng: np.random.Generator, layout: PanelLayout, count: int, of_mins: bool) -> NDArray[np.uint8]:
    """`count` sections of scales or mins: float16 factors, then int8."""
    halves, whole = layout.whole_offset // 2, layout.groups * 16
    section = np.zeros((count, layout.zeros_offset - layout.scales_offset), np.uint8)
    if layout.joined and of_mins:
        section = section[:, : layout.whole_offset]
    factors, steps = rng.uniform(0.1, 1.0, (count, halves)) / 40, rng.integers(20, 64, (count, whole))
    if of_mins:
        middle = CODE_MIDDLES[layout.code]
        factors = rng.uniform(-0.011, -0.009, (count, halves)) * middle
        steps = rng.integers(42, 57, (count, whole))
    elif not layout.mins:
        # Of mins and scales together, signs are those of GGUF's: codes lie on both sides of zero.
        steps *= rng.choice(np.array([-1, 1]), (count, whole))
    if layout.joined:
        # 5 to 15 of a scale, 10 to 14 of a minimum.
        factors *= 4
        steps = rng.integers(5, 16, (count, whole)) + rng.integers(10, 15, (count, whole)) * 16
    section[:, : layout.whole_offset] = factors.astype(np.float16).view(np.uint8)
    if scale_bits(layout)[0] < 8 or layout.code == "tq1":
        rest = section[:, layout.whole_offset :]  # Signs, too.
        rest[:] = rng.integers(0, 256, rest.shape, np.uint8)
    elif layout.code not in GRID_UNITS and not (layout.joined and of_mins):
        section[:, layout.whole_offset : layout.whole_offset + whole] = steps.astype(np.uint8)
    return section.reshape(-1)


def random_matrix(
    format_name: str, k: int, num_panels: int, *, has_bias: bool = False, seed: int = 0
) -> PackedMatrix:
    """A matrix of 16 * num_panels columns (output features). Padding holds codes too: rows' zeros meet it."""
    rng = np.random.default_rng(seed)
    layout = _kernels.panel_layout(format_name, k, has_bias)
    kind = panel_layout(format_name, k, has_bias)
    panels = np.zeros((num_panels, layout["panel_bytes"]), np.uint8)
    codes_end, zeros_at = layout["scales_offset"], layout["zeros_offset"]
    mins_at = layout["mins_offset"]
    column_at, bias_at = layout["column_scale_offset"], layout["bias_offset"]
    panels[:, :codes_end] = _codes(rng, format_name, num_panels * codes_end).reshape(num_panels, -1)
    if zeros_at > codes_end:
        scales = _scales(rng, format_name, num_panels * (zeros_at - codes_end))
        if kind.scale == "products":
            scales = _products(rng, kind, num_panels, False)
        panels[:, codes_end:zeros_at] = scales.reshape(num_panels, -1)
    if mins_at > zeros_at:
        panels[:, zeros_at:mins_at] = rng.integers(0, 16, (num_panels, mins_at - zeros_at), np.uint8)
    if column_at > mins_at:
        nbytes = num_panels * (column_at - mins_at)
        middle = CODE_MIDDLES.get(kind.code, 8)
        mins = (rng.uniform(-0.625, -0.375, nbytes // 2) * middle).astype(np.float16).view(np.uint8)
        if kind.scale == "products":
            mins = _products(rng, kind, num_panels, True)
        panels[:, mins_at:column_at] = mins.reshape(num_panels, -1)
    floats = rng.uniform(0.5, 2.0, (num_panels, (layout["panel_bytes"] - column_at) // 4)).astype(np.float32)
    panels[:, column_at:] = floats.view(np.uint8)
    packed = panels.reshape(-1)
    columns = 16 * num_panels
    weights = _kernels.unpack_matrix(format_name, packed, columns, k, has_bias)
    bias = np.zeros(columns, np.float32)
    if has_bias:
        bias = np.ascontiguousarray(panels[:, bias_at : bias_at + 64]).view(np.float32).reshape(-1)
    return PackedMatrix(format_name, k, num_panels, has_bias, packed, weights, bias)
