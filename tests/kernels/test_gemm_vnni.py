"""W8A8 products with vpdpbusd: the scalar reference's bits, since sums of int8 products are exact."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from moebius import _kernels
from moebius import _kernels_testing as testing
from tests.helpers.random_panels import PackedMatrix, random_matrix

KERNEL = "avx512_vnni_int8"

pytestmark = pytest.mark.skipif(KERNEL not in testing.gemm_names(), reason="this machine has no AVX-512 VNNI")


def run(
    kernel: str, matrix: PackedMatrix, rows: NDArray[np.int8], scales: NDArray[np.float32]
) -> NDArray[np.float32]:
    return testing.gemm(
        kernel, matrix.format, matrix.packed, matrix.k, matrix.num_panels, matrix.has_bias, rows, scales
    )


def random_rows(count: int, k: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Returns all of int8, -128 too, which quantised rows never hold."""
    rng = np.random.default_rng(k)
    return rng.integers(-128, 128, (count, k), np.int8), rng.uniform(0.01, 1.0, count).astype(np.float32)


def test_equals_the_integer_product() -> None:
    """float32(integer sum) * (column scale * row scale) + bias, to the bit, for every row block and pair of
    panels."""
    for k in (1, 3, 63, 64, 65, 200, 1000):
        for num_panels in (1, 2, 3, 4):
            matrix = random_matrix("int8_w8a8", k, num_panels, has_bias=num_panels > 2, seed=k)
            layout = _kernels.panel_layout("int8_w8a8", k, matrix.has_bias)
            panels = matrix.packed.reshape(num_panels, -1)
            scales_at = layout["column_scale_offset"]
            column_scale = panels[:, scales_at : scales_at + 64].copy().view(np.float32).reshape(-1)
            codes = np.rint(matrix.weights / column_scale[:, None]).astype(np.int64)
            for count in (*range(1, 18), 33, 64):
                rows, scales = random_rows(count, k)
                sums = (rows.astype(np.int64) @ codes.T).astype(np.float32)
                expected = sums * (column_scale * scales[:, None]) + matrix.bias
                np.testing.assert_array_equal(run(KERNEL, matrix, rows, scales), expected)


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 17])
def test_equals_the_scalar_reference(count: int) -> None:
    """Same bits from codes, not by way of unpacked weights."""
    matrix = random_matrix("int8_w8a8", 333, 3, has_bias=True)
    rows, scales = random_rows(count, 333)
    np.testing.assert_array_equal(run(KERNEL, matrix, rows, scales), run("scalar_int8", matrix, rows, scales))


@pytest.mark.parametrize("weight", [0x80, 0x7F])
@pytest.mark.parametrize("element", [-128, -127, 127])
def test_extreme_codes_do_not_saturate(weight: int, element: int) -> None:
    """The unsigned weight and the sum taken off again reach 2^30 here."""
    k = 32768
    packed = np.full(_kernels.panel_layout("int8_w8a8", k)["panel_bytes"], weight, np.uint8)
    packed[16 * k :].view(np.float32)[:] = 1.0
    rows = np.full((3, k), element, np.int8)
    result = testing.gemm(KERNEL, "int8_w8a8", packed, k, 1, False, rows, np.ones(3, np.float32))
    assert (result == np.float32((weight - 256 if weight > 127 else weight) * element * k)).all()


def test_a_nan_scale_makes_its_row_nan() -> None:
    """How rows with NaN or infinity, which int8 cannot hold, stay visible; zeros do not hide it."""
    matrix = random_matrix("int8_w8a8", 64, 2)
    scales = np.array([1.0, np.nan, 1.0], np.float32)
    for value in (0, 1):
        result = run(KERNEL, matrix, np.full((3, 64), value, np.int8), scales)
        assert np.isnan(result[1]).all()
        assert np.isfinite(result[[0, 2]]).all()
