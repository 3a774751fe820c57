"""Products of float32 rows at the scalar, AVX2 and AVX-512 levels: every format within 1e-5 of the unpacked
weights' product in float64, and a row's bits never depend on what it is computed with."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from moebius import _kernels
from moebius import _kernels_testing as testing
from moebius.kernels.weight_formats import WEIGHT_FORMATS
from tests.helpers.random_panels import PackedMatrix, random_matrix
from tests.tolerances import GEMM_FLOAT32

FORMATS = [name for name in WEIGHT_FORMATS if name != "int8_w8a8"]
LEVELS = [name for name in testing.gemm_names() if name.endswith("_float32")]
VECTOR_LEVELS = [name for name in LEVELS if name != "scalar_float32"]


def run(kernel: str, matrix: PackedMatrix, rows: NDArray[np.float32]) -> NDArray[np.float32]:
    return testing.gemm(
        kernel, matrix.format, matrix.packed, matrix.k, matrix.num_panels, matrix.has_bias, rows
    )


def random_rows(count: int, k: int, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((count, k)).astype(np.float32)


def relative_error(result: NDArray[np.float32], golden: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(result - golden) / np.linalg.norm(golden))


def panels_from(matrix: PackedMatrix, first: int, count: int) -> PackedMatrix:
    panel_bytes = matrix.packed.size // matrix.num_panels
    packed = matrix.packed[first * panel_bytes : (first + count) * panel_bytes]
    columns = slice(16 * first, 16 * (first + count))
    return PackedMatrix(
        matrix.format, matrix.k, count, matrix.has_bias, packed, matrix.weights[columns], matrix.bias[columns]
    )


@pytest.mark.parametrize("kernel", LEVELS)
@pytest.mark.parametrize("format_name", FORMATS)
def test_every_number_of_rows(format_name: str, kernel: str) -> None:
    """1 to 33 and 64 rows: every row block and every mix of them."""
    matrix = random_matrix(format_name, 129, 3, has_bias=True)
    rows = random_rows(64, 129)
    golden = matrix.golden(rows)
    for count in [*range(1, 34), 64]:
        assert relative_error(run(kernel, matrix, rows[:count]), golden[:count]) < GEMM_FLOAT32


@pytest.mark.parametrize("kernel", LEVELS)
@pytest.mark.parametrize("format_name", FORMATS)
def test_every_number_of_panels_and_odd_k(format_name: str, kernel: str) -> None:
    """k of one, around units, groups and paddings; 1 to 5 panels; with and without a bias."""
    for k in (1, 2, 7, 15, 16, 17, 31, 33, 63, 64, 65, 127, 130, 257, 640):
        for num_panels in (1, 2, 3, 4, 5):
            matrix = random_matrix(format_name, k, num_panels, has_bias=num_panels % 2 == 0, seed=k)
            for count in (1, 2, 3, 5):
                rows = random_rows(count, k)
                assert relative_error(run(kernel, matrix, rows), matrix.golden(rows)) < GEMM_FLOAT32


@pytest.mark.parametrize("kernel", VECTOR_LEVELS)
@pytest.mark.parametrize("format_name", FORMATS)
def test_more_groups_than_are_widened_at_once(format_name: str, kernel: str) -> None:
    """A matrix of realistic depth, longer than the prefetch distance."""
    matrix = random_matrix(format_name, 2880, 2)
    rows = random_rows(3, 2880)
    assert relative_error(run(kernel, matrix, rows), matrix.golden(rows)) < GEMM_FLOAT32


@pytest.mark.parametrize("kernel", LEVELS)
@pytest.mark.parametrize("format_name", FORMATS)
def test_bits_of_a_row_do_not_depend_on_its_company(format_name: str, kernel: str) -> None:
    """Alone or among others, with few panels or many: the same bits."""
    k, num_panels = 200, 5
    matrix = random_matrix(format_name, k, num_panels, has_bias=True)
    rows = random_rows(29, k)
    alone = np.concatenate(
        [run(kernel, panels_from(matrix, p, 1), rows[:1]) for p in range(num_panels)], axis=1
    )
    for count in range(1, 30):
        together = run(kernel, matrix, rows[:count])
        assert together[:1].tobytes() == alone.tobytes(), count
        last = run(kernel, panels_from(matrix, 1, 4), rows[count - 1 : count])
        assert together[count - 1 :, 16:].tobytes() == last.tobytes(), count


@pytest.mark.parametrize("kernel", LEVELS)
@pytest.mark.parametrize("format_name", FORMATS)
def test_nan_and_infinity_of_a_row_stay_in_it(format_name: str, kernel: str) -> None:
    """A row with NaN gives NaN, one with infinity nothing finite; their neighbours keep their bits."""
    matrix = random_matrix(format_name, 96, 2)
    rows = random_rows(4, 96)
    clean = run(kernel, matrix, rows)
    rows[1, 95] = np.nan
    rows[2, 0] = np.inf
    result = run(kernel, matrix, rows)
    assert np.isnan(result[1]).all()
    assert not np.isfinite(result[2]).any()
    assert result[[0, 3]].tobytes() == clean[[0, 3]].tobytes()


@pytest.mark.parametrize("kernel", LEVELS)
@pytest.mark.parametrize("format_name", ["fp8_block", "fp8_channel"])
def test_every_float8_code(format_name: str, kernel: str) -> None:
    """One code per product: all 256, exactly; a NaN code poisons its own column only."""
    k, layout = 256, _kernels.panel_layout(format_name, 256)
    packed = np.zeros(layout["panel_bytes"], np.uint8)
    packed[: 16 * k] = np.arange(256, dtype=np.uint8).reshape(64, 1, 4).repeat(16, axis=1).reshape(-1)
    packed[16 * k :].view(np.float32)[:] = 1.0
    weights = _kernels.unpack_matrix(format_name, packed, 16, k)
    assert np.isnan(weights[0, [127, 255]]).all()
    codes = packed[: 16 * k].reshape(64, 16, 4)
    codes[31, :, 3] = codes[63, :, 3] = 0
    rows = np.eye(k, dtype=np.float32)
    expected = _kernels.unpack_matrix(format_name, packed, 16, k).T
    np.testing.assert_array_equal(testing.gemm(kernel, format_name, packed, k, 1, False, rows), expected)
    codes[31, 5, 3] = 0x7F
    result = testing.gemm(kernel, format_name, packed, k, 1, False, rows)
    assert np.isnan(result[:, 5]).all()
    assert np.isfinite(np.delete(result, 5, axis=1)).all()


@pytest.mark.parametrize("kernel", LEVELS)
@pytest.mark.parametrize("format_name", ["int4_g32", "int4_g32_zeros", "mxfp4", "nvfp4", "int8", "float16"])
def test_every_code_exactly(format_name: str, kernel: str) -> None:
    """Unit rows read single weights, which must come out as the reference unpacker has them."""
    matrix = random_matrix(format_name, 256, 3, seed=3)
    result = run(kernel, matrix, np.eye(256, dtype=np.float32))
    np.testing.assert_array_equal(result, matrix.weights.T)


@pytest.mark.parametrize("kernel", LEVELS)
def test_scales_at_the_ends_of_their_types(kernel: str) -> None:
    """e8m0 0 (a subnormal float32) and 255 (NaN); e4m3 subnormals and NaN."""
    for format_name, codes in (("mxfp4", [0, 1, 254, 255]), ("nvfp4", [0, 1, 7, 8, 0x7E, 0x7F, 0x81, 0xFE])):
        layout = _kernels.panel_layout(format_name, 32)
        packed = np.zeros(layout["panel_bytes"], np.uint8)
        packed[: layout["scales_offset"]] = 0x22  # 1.0 everywhere
        scales = packed[layout["scales_offset"] : layout["zeros_offset"]]
        scales[: 16 * layout["groups"]] = np.resize(np.array(codes, np.uint8), 16 * layout["groups"])
        if format_name == "nvfp4":
            packed[layout["column_scale_offset"] :].view(np.float32)[:] = 1.0
        expected = _kernels.unpack_matrix(format_name, packed, 16, 32)[:, :1].T
        rows = np.zeros((1, 32), np.float32)
        rows[0, 0] = 1.0
        result = testing.gemm(kernel, format_name, packed, 32, 1, False, rows)
        finite = np.isfinite(expected) if format_name == "mxfp4" else np.isfinite(expected[:, :16])
        np.testing.assert_array_equal(result[finite], expected[finite])
        assert np.isnan(result[~finite]).all()


@pytest.mark.parametrize("kernel", VECTOR_LEVELS)
@pytest.mark.parametrize("format_name", FORMATS)
def test_vector_levels_agree_to_the_bit(format_name: str, kernel: str) -> None:
    """All vector widths add up in the same order."""
    matrix = random_matrix(format_name, 333, 3, has_bias=True)
    rows = random_rows(7, 333)
    assert run(kernel, matrix, rows).tobytes() == run(VECTOR_LEVELS[0], matrix, rows).tobytes()


def test_refuses_what_does_not_fit() -> None:
    """Errors name the argument, what it was and what is allowed."""
    matrix = random_matrix("bfloat16", 64, 1)
    rows = random_rows(2, 64)
    with pytest.raises(ValueError, match=r"kernel 'none' is unknown.*scalar_float32"):
        run("none", matrix, rows)
    with pytest.raises(ValueError, match=r"rows has shape \[2, 63\]; it must be \[2, 64\]"):
        run("scalar_float32", matrix, rows[:, :63])
    with pytest.raises(ValueError, match="packed has shape"):
        testing.gemm("scalar_float32", "bfloat16", matrix.packed[:-1], 64, 1, False, rows)
    with pytest.raises(ValueError, match="does not support the weight format 'int8_w8a8'"):
        testing.gemm("scalar_float32", "int8_w8a8", matrix.packed, 64, 1, False, rows)
    with pytest.raises(ValueError, match="row_scales is given"):
        testing.gemm("scalar_float32", "bfloat16", matrix.packed, 64, 1, False, rows, np.ones(2, np.float32))
