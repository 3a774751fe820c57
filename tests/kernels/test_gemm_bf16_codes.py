"""Every code of every format, decoded for bfloat16 products: unit rows read single weights out of a product,
and these must be the unpacked weights themselves, not close to them."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from moebius import _kernels
from moebius import _kernels_testing as testing
from tests.helpers.random_panels import random_matrix

ONE = np.uint16(0x3F80)
KERNELS = [
    name
    for name in ("avx2_words", "avx512_bf16_dot", "avx512_vnni_split", "avx512_bf16_split")
    if name in testing.gemm_names()
]

pytestmark = pytest.mark.skipif(not KERNELS, reason="this machine has no AVX2")


def kernels_for(format_name: str) -> list[str]:
    """Those of the kernels here that can read the format; skips where there are none."""
    found = [name for name in KERNELS if name in testing.gemms_for(format_name, "bfloat16")]
    if not found:
        pytest.skip(f"this machine has none of these kernels for {format_name}")
    return found  # type: ignore[return-value]


def unit_rows(k: int) -> NDArray[np.uint16]:
    return np.eye(k, dtype=np.uint16) * ONE


def read_weights(format_name: str, packed: NDArray[np.uint8], k: int, panels: int) -> NDArray[np.float32]:
    """[16 * panels, k], read by products of unit rows: by every kernel, together and one at a time, alike."""
    rows, found = unit_rows(k), []
    for kernel in kernels_for(format_name):
        found.append(testing.gemm(kernel, format_name, packed, k, panels, False, rows))
        found.append(
            np.concatenate(
                [testing.gemm(kernel, format_name, packed, k, panels, False, row[None]) for row in rows]
            )
        )
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    return found[0].T


def empty_panels(format_name: str, k: int, panels: int) -> NDArray[np.uint8]:
    """[panels, panel_bytes] of zeros, column scales of 1."""
    layout = _kernels.panel_layout(format_name, k)
    packed = np.zeros((panels, layout["panel_bytes"]), np.uint8)
    column_at, bias_at = layout["column_scale_offset"], layout["bias_offset"]
    packed[:, column_at:bias_at] = np.ones((panels, (bias_at - column_at) // 4), np.float32).view(np.uint8)
    return packed


@pytest.mark.parametrize("format_name", ["fp8_block", "fp8_channel", "int8"])
def test_all_256_codes_in_every_place(format_name: str) -> None:
    """Each of the 4 bytes of a column's word meets each code, in each column. NaN: next test."""
    k, panels = 256, 4
    packed = empty_panels(format_name, k, panels)
    codes = (np.arange(k)[:, None] + np.arange(16 * panels)[None, :]).astype(np.uint8)  # [k, columns]
    if format_name != "int8":
        codes[(codes & 0x7F) == 0x7F] = 0
        scales_at = _kernels.panel_layout(format_name, k)["scales_offset"]
        packed[:, scales_at : scales_at + 8] = np.ones(2, np.float32).view(np.uint8)
    lines = codes.reshape(k // 4, 4, panels, 16).transpose(2, 0, 3, 1)
    packed[:, : 16 * k] = lines.reshape(panels, -1)
    weights = _kernels.unpack_matrix(format_name, packed.reshape(-1), 16 * panels, k)
    assert len(np.unique(weights)) == (256 if format_name == "int8" else 253)
    np.testing.assert_array_equal(read_weights(format_name, packed.reshape(-1), k, panels), weights)


@pytest.mark.parametrize("format_name", ["fp8_block", "fp8_channel"])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_code_makes_its_column_nan(format_name: str, code: int) -> None:
    """A NaN code in any of the 4 places of a word makes its column NaN, and no other column."""
    for k in range(4):
        matrix = random_matrix(format_name, 64, 1)
        matrix.packed[4 * 5 + k] = code
        (kernel,) = kernels_for(format_name)
        result = testing.gemm(kernel, format_name, matrix.packed, 64, 1, False, unit_rows(64))
        assert np.isnan(result[:, 5]).all()
        assert np.isfinite(np.delete(result, 5, axis=1)).all()


def nibble_panels(format_name: str, k: int, panels: int) -> NDArray[np.uint8]:
    """Returns code k mod 16 at every k of every column."""
    packed = empty_panels(format_name, k, panels)
    shifts = np.array([0, 16, 4, 20, 8, 24, 12, 28], np.uint64)
    k_padded = (k + 63) // 64 * 64
    codes = (np.arange(k_padded) % 16).astype(np.uint64)
    words = (codes.reshape(-1, 8) << shifts).sum(axis=1).astype(np.uint32)  # one a line
    packed[:, : words.size * 64] = words.repeat(16).view(np.uint8)
    return packed


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("suffix", ["", "_f16"])
def test_all_int4_codes_by_all_zero_points(group: int, suffix: str) -> None:
    """Column c has zero point c: 256 differences of -15 to 15, and the symmetric -8 to 7."""
    k = group
    for format_name in (f"int4_g{group}{suffix}", f"int4_g{group}_zeros{suffix}"):
        packed = nibble_panels(format_name, k, 1)
        layout = _kernels.panel_layout(format_name, k)
        scale = np.float16(0.75).view(np.uint16) if suffix else np.uint16(0x3F40)
        packed[0, layout["scales_offset"] :][: 2 * 16].view(np.uint16)[:] = scale
        if "zeros" in format_name:
            packed[0, layout["zeros_offset"] :][:16] = np.arange(16, dtype=np.uint8)
        zeros = np.arange(16) if "zeros" in format_name else np.full(16, 8)
        expected = (np.arange(k) % 16 - zeros[:, None]) * 0.75
        np.testing.assert_array_equal(read_weights(format_name, packed.reshape(-1), k, 1), expected)


@pytest.mark.parametrize("format_name", ["mxfp4", "nvfp4"])
def test_all_e2m1_codes_by_all_scales(format_name: str) -> None:
    """256 columns, one for each e8m0 or e4m3 scale: subnormal ones and NaN included."""
    k, panels = 16, 16
    packed = nibble_panels(format_name, k, panels)
    scales_at = _kernels.panel_layout(format_name, k)["scales_offset"]
    packed[:, scales_at : scales_at + 16] = np.arange(256, dtype=np.uint8).reshape(16, 16)
    weights = _kernels.unpack_matrix(format_name, packed.reshape(-1), 256, k)
    assert np.isnan(weights).all(axis=1).sum() == (1 if format_name == "mxfp4" else 2)
    np.testing.assert_array_equal(read_weights(format_name, packed.reshape(-1), k, panels), weights)


@pytest.mark.parametrize(
    "format_name", ["bfloat16", "fp8_block", "int8", "int4_g32", "int4_g128_zeros", "mxfp4", "nvfp4"]
)
def test_random_weights_are_read_exactly(format_name: str) -> None:
    """Every line, group and panel in its place."""
    matrix = random_matrix(format_name, 200, 3, seed=4)
    np.testing.assert_array_equal(read_weights(format_name, matrix.packed, 200, 3), matrix.weights)
