"""GEMMs in tiles: the loops over rows, panels, chunks of k and groups are compared with float64 on tiles kept
in memory, which run in CI; on machines with AMX the same on real tiles, whose bits equal the emulated
ones."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from moebius import _kernels
from moebius import _kernels_testing as testing
from moebius.kernels import ExpertEngine
from moebius.kernels.weight_formats import WEIGHT_FORMATS, weight_format
from tests.helpers.random_panels import PackedMatrix, bfloat16_bits, random_matrix
from tests.tolerances import GEMM_BFLOAT16, GEMM_TWO_PARTS

FORMATS = [name for name in WEIGHT_FORMATS if name not in ("float32", "int8_w8a8")]
# One and two row tiles, full and not, alone and after full blocks.
ROWS = (*range(1, 18), 31, 32, 33, 49, 64, 100)
SHAPES = [(1, 1), (7, 2), (31, 3), (33, 4), (63, 1), (65, 2), (127, 3), (130, 4), (193, 9)]

needs_bf16 = pytest.mark.skipif(
    "amx_emulated_bfloat16" not in testing.gemm_names(), reason="this machine has no AVX-512 BF16"
)
needs_amx = pytest.mark.skipif("amx" not in _kernels.supported_isas(), reason="this machine has no AMX")
LEVELS = [
    pytest.param("amx_emulated", marks=needs_bf16),
    pytest.param("amx", marks=[needs_amx, pytest.mark.amx]),
]
# (format, what follows the level in a kernel's name).
CASES = [
    (name, kernel)
    for name in FORMATS
    for kernel in ("bfloat16", "bfloat16_panels")
    if kernel == "bfloat16" or any(each.endswith(kernel) for each in testing.gemms_for(name, "bfloat16"))
]


def bound(format_name: str) -> float:
    """Products have more bits than the two parts of a weight that tiles are made of."""
    return GEMM_TWO_PARTS if weight_format(format_name).scale == "products" else GEMM_BFLOAT16


def random_rows(count: int, k: int) -> NDArray[np.uint16]:
    return bfloat16_bits(np.random.default_rng(count).standard_normal((count, k)).astype(np.float32))


def run(
    kernel: str, matrix: PackedMatrix, rows: NDArray[np.uint16], equally_spaced: bool = True
) -> NDArray[np.float32]:
    size = (matrix.k, matrix.num_panels, matrix.has_bias)
    return testing.gemm(kernel, matrix.format, matrix.packed, *size, rows, None, equally_spaced)


def relative_error(
    kernel: str, matrix: PackedMatrix, rows: NDArray[np.uint16], equally_spaced: bool = True
) -> float:
    golden = matrix.golden((rows.astype(np.uint32) << 16).view(np.float32))
    result = run(kernel, matrix, rows, equally_spaced)
    return float(np.linalg.norm(result - golden) / np.linalg.norm(golden))


def run_int8(
    kernel: str,
    matrix: PackedMatrix,
    rows: NDArray[np.int8],
    scales: NDArray[np.float32],
    equally_spaced: bool = True,
) -> NDArray[np.float32]:
    size = (matrix.k, matrix.num_panels, matrix.has_bias)
    return testing.gemm(kernel, matrix.format, matrix.packed, *size, rows, scales, equally_spaced)


def int8_rows(count: int, k: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    rng = np.random.default_rng(k + count)
    return rng.integers(-128, 128, (count, k), np.int8), rng.uniform(0.01, 1.0, count).astype(np.float32)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("format_name", "kernel"), CASES)
def test_every_number_of_rows(level: str, format_name: str, kernel: str) -> None:
    """Float32 sums of exact products, whatever blocks the rows fall into, with bias and without."""
    for has_bias in (False, True):
        matrix = random_matrix(format_name, 193, 3, has_bias=has_bias)
        for count in ROWS:
            error = relative_error(f"{level}_{kernel}", matrix, random_rows(count, 193))
            assert error < bound(format_name), count


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("format_name", "kernel"), CASES)
def test_every_number_of_panels_and_odd_k(level: str, format_name: str, kernel: str) -> None:
    """k around tiles, groups and padding; panels alone, in pairs and in more than one round."""
    for k, num_panels in SHAPES:
        matrix = random_matrix(format_name, k, num_panels, seed=k)
        for count in (3, 20, 40):
            error = relative_error(f"{level}_{kernel}", matrix, random_rows(count, k))
            assert error < bound(format_name), (k, num_panels, count)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("format_name", "kernel"), CASES)
def test_chunks_of_k_and_parts_of_rows(level: str, format_name: str, kernel: str) -> None:
    """More k than one chunk, and more rows than one part: sums go to memory and come back."""
    matrix = random_matrix(format_name, 2200, 2)
    for count in (1, 17, 35):
        assert relative_error(f"{level}_{kernel}", matrix, random_rows(count, 2200)) < bound(format_name), (
            count
        )
    matrix = random_matrix(format_name, 65, 3)
    assert relative_error(f"{level}_{kernel}", matrix, random_rows(300, 65)) < bound(format_name)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("format_name", "kernel"), CASES)
def test_rows_anywhere(level: str, format_name: str, kernel: str) -> None:
    """Rows that are not equally spaced are copied first: few rows, blocks, parts, chunks of k."""
    matrix = random_matrix(format_name, 200, 9)
    for count in (2, 17, 33, 64, 300):
        assert relative_error(f"{level}_{kernel}", matrix, random_rows(count, 200), False) < bound(
            format_name
        )
    matrix = random_matrix(format_name, 2200, 1)
    assert relative_error(f"{level}_{kernel}", matrix, random_rows(35, 2200), False) < bound(format_name)


@pytest.mark.parametrize("level", LEVELS)
def test_int8_equals_the_scalar_reference(level: str) -> None:
    """W8A8 sums are exact integers, so every bit agrees."""
    for k, num_panels in [*SHAPES, (4500, 2)]:
        matrix = random_matrix("int8_w8a8", k, num_panels, has_bias=num_panels % 2 == 0, seed=k)
        for count in (1, 2, 15, 16, 17, 33, 50):
            rows, scales = int8_rows(count, k)
            result = run_int8(f"{level}_int8", matrix, rows, scales)
            np.testing.assert_array_equal(result, run_int8("scalar_int8", matrix, rows, scales))
            result = run_int8(f"{level}_int8", matrix, rows, scales, equally_spaced=False)
            np.testing.assert_array_equal(result, run_int8("scalar_int8", matrix, rows, scales))


@pytest.mark.amx
@needs_amx
@pytest.mark.parametrize(("format_name", "kernel"), CASES)
def test_real_tiles_equal_emulated_ones(format_name: str, kernel: str) -> None:
    """What CI shows about emulated tiles holds for real ones: the same bits, denormal products included."""
    matrix = random_matrix(format_name, 330, 5, has_bias=True)
    for count in (1, 7, 16, 29, 64, 70):
        rows = random_rows(count, 330)
        rows[0, :5] = (0x0001, 0x8080, 0x7F7F, 0x0080, 0x0100)
        result = run(f"amx_{kernel}", matrix, rows)
        assert result.tobytes() == run(f"amx_emulated_{kernel}", matrix, rows).tobytes(), count


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("format_name", "kernel"), CASES)
def test_nan_and_infinity_of_a_row_stay_in_it(level: str, format_name: str, kernel: str) -> None:
    """A row with NaN gives NaN, one with infinity nothing finite; their neighbours keep their bits."""
    matrix = random_matrix(format_name, 96, 2)
    rows = random_rows(40, 96)
    clean = run(f"{level}_{kernel}", matrix, rows)
    rows[1, 95] = 0x7FC0
    rows[18, 0] = 0x7F80
    result = run(f"{level}_{kernel}", matrix, rows)
    assert np.isnan(result[1]).all()
    assert not np.isfinite(result[18]).any()
    others = [row for row in range(40) if row not in (1, 18)]
    assert result[others].tobytes() == clean[others].tobytes()


@needs_bf16
def test_kernels_by_panels_know_formats_whose_sums_are_scaled() -> None:
    """Not those whose scales or mins are part of the tiles."""
    found = {name for name, kernel in CASES if kernel == "bfloat16_panels"}
    assert {"int4_g32", "int4_g128_zeros", "int4_g64_f16", "int8_g32_f16", "fp8_block"} <= found
    assert not found & {"bfloat16", "mxfp4", "nvfp4", "int4_g32_mins", "int4_g16_f16", "fp8_channel", "int8"}
    assert not [name for name in found if name.endswith("_products")]


@needs_bf16
@pytest.mark.parametrize("format_name", [*FORMATS, "int8_w8a8"])
def test_emulated_tiles_are_never_a_choice(format_name: str) -> None:
    """They have a name for tests, but no plan takes them."""
    engine = ExpertEngine(64, 32, 2, 1, weight_format=format_name, num_threads=1)
    kernels = [row.kernel for row in engine.plan()]
    assert kernels
    assert not [name for name in kernels if "emulated" in name]
