"""W8A8 products of the scalar, AVX2 and AVX-512 levels: exact int32 sums, then row and column scales."""

from __future__ import annotations

import numpy as np
import pytest

from moebius import _kernels
from moebius import _kernels_testing as testing
from tests.helpers.random_panels import random_matrix
from tests.tolerances import GEMM_INT8

LEVELS = [
    "scalar_int8",
    *(name for name in ("avx2_int8", "avx512_int8") if name in testing.gemm_names()),
]


@pytest.mark.parametrize("kernel", LEVELS)
def test_sums_are_exact(kernel: str) -> None:
    """Only the scaling rounds: two products and, with a bias, one sum."""
    rng = np.random.default_rng(5)
    for k in (1, 3, 4, 63, 64, 65, 130, 1000):
        for num_panels in (1, 2, 3):
            for count in (1, 2, 3, 4, 5, 9, 33):
                matrix = random_matrix("int8_w8a8", k, num_panels, has_bias=count % 2 == 1, seed=k)
                rows = rng.integers(-127, 128, (count, k), np.int8)
                scales = rng.uniform(0.01, 1.0, count).astype(np.float32)
                result = testing.gemm(
                    kernel, "int8_w8a8", matrix.packed, k, num_panels, matrix.has_bias, rows, scales
                )
                golden = (rows.astype(np.float64) @ matrix.weights.T) * scales[:, None] + matrix.bias
                assert np.abs(result - golden).max() <= GEMM_INT8 * np.abs(golden).max()


@pytest.mark.parametrize("kernel", LEVELS)
def test_extreme_codes_do_not_saturate(kernel: str) -> None:
    """-128 times -127 over a deep matrix, where a saturating 16-bit sum would clip."""
    k = 7168
    layout = _kernels.panel_layout("int8_w8a8", k)
    packed = np.full(layout["panel_bytes"], 0x80, np.uint8)
    packed[layout["column_scale_offset"] :].view(np.float32)[:] = 1.0
    rows = np.full((1, k), -127, np.int8)
    result = testing.gemm(kernel, "int8_w8a8", packed, k, 1, False, rows, np.ones(1, np.float32))
    assert (result == 128 * 127 * k).all()


@pytest.mark.parametrize("kernel", LEVELS)
def test_a_nan_scale_makes_its_row_nan(kernel: str) -> None:
    """How rows with NaN or infinity, which int8 cannot hold, stay visible."""
    matrix = random_matrix("int8_w8a8", 64, 1)
    rows = np.ones((3, 64), np.int8)
    scales = np.array([1.0, np.nan, 1.0], np.float32)
    result = testing.gemm(kernel, "int8_w8a8", matrix.packed, 64, 1, False, rows, scales)
    assert np.isnan(result[1]).all()
    assert np.isfinite(result[[0, 2]]).all()
