"""Products of bfloat16 rows: with vdpbf16ps, and of rows that became integers with vpmaddwd or vpdpbusd.
Weights are decoded exactly, so sums lie about as close to the float64 product of the same rows as those of
float32 rows do, whatever rows and panels are computed together."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from moebius import _kernels_testing as testing
from moebius.kernels.weight_formats import WEIGHT_FORMATS
from tests.helpers.random_panels import PackedMatrix, bfloat16_bits, random_matrix
from tests.tolerances import GEMM_BFLOAT16, GEMM_SPLIT

NAMES = list(WEIGHT_FORMATS)
NARROW = ("int2_", "int3_", "int5_", "int6_", "iq", "tq1_")
NIBBLES = [name for name in NAMES if name.startswith((*NARROW, "int4_")) or name in ("mxfp4", "nvfp4")]
# Codes with group scales of their own columns.
GROUPED = NIBBLES + [name for name in NAMES if name.startswith("int8_g")]
FORMATS = {
    "avx2_words": [name for name in NAMES if name in GROUPED],
    "avx512_bf16_dot": [
        name
        for name in NAMES
        if name not in ("float32", "float16", "int8_w8a8") and not name.startswith(NARROW)
    ],
    "avx512_vnni_split": NIBBLES,
    "avx512_bf16_split": NIBBLES,
}
TOLERANCES = {
    "avx2_words": GEMM_SPLIT,
    "avx512_bf16_dot": GEMM_BFLOAT16,
    "avx512_vnni_split": GEMM_SPLIT,
    "avx512_bf16_split": GEMM_SPLIT,
}
CASES = pytest.mark.parametrize(
    ("kernel", "format_name"),
    [
        pytest.param(
            kernel,
            name,
            marks=pytest.mark.skipif(
                kernel not in testing.gemm_names(), reason=f"this machine cannot run {kernel}"
            ),
        )
        for kernel, names in FORMATS.items()
        for name in names
    ],
)


def run(kernel: str, matrix: PackedMatrix, rows: NDArray[np.uint16]) -> NDArray[np.float32]:
    return testing.gemm(
        kernel, matrix.format, matrix.packed, matrix.k, matrix.num_panels, matrix.has_bias, rows
    )


def random_rows(count: int, k: int, seed: int = 1) -> NDArray[np.uint16]:
    return bfloat16_bits(np.random.default_rng(seed).standard_normal((count, k)).astype(np.float32))


def values(rows: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (rows.astype(np.uint32) << 16).view(np.float32)


def relative_error(kernel: str, matrix: PackedMatrix, rows: NDArray[np.uint16]) -> float:
    golden = matrix.golden(values(rows))
    return float(np.linalg.norm(run(kernel, matrix, rows) - golden) / np.linalg.norm(golden))


def panels_from(matrix: PackedMatrix, first: int) -> PackedMatrix:
    """Returns one panel of the matrix."""
    panel_bytes = matrix.packed.size // matrix.num_panels
    columns = slice(16 * first, 16 * (first + 1))
    return PackedMatrix(
        matrix.format,
        matrix.k,
        1,
        matrix.has_bias,
        matrix.packed[first * panel_bytes : (first + 1) * panel_bytes],
        matrix.weights[columns],
        matrix.bias[columns],
    )


@pytest.mark.parametrize("kernel", sorted(set(FORMATS) & set(testing.gemm_names())))
def test_formats_are_those_listed(kernel: str) -> None:
    """Codes without more bits than bfloat16; those with group scales. So the kernels say, too."""
    assert [name for name in NAMES if kernel in testing.gemms_for(name, "bfloat16")] == FORMATS[kernel]


@CASES
def test_every_number_of_rows(kernel: str, format_name: str) -> None:
    """1 to 17, 33 and 64 rows: every row block and mixes of them."""
    matrix = random_matrix(format_name, 193, 3, has_bias=True)
    rows = random_rows(64, 193)
    for count in [*range(1, 18), 33, 64]:
        assert relative_error(kernel, matrix, rows[:count]) < TOLERANCES[kernel], count


@CASES
def test_every_number_of_panels_and_odd_k(kernel: str, format_name: str) -> None:
    """k of one, around pairs, quads, groups and paddings; 1 to 4 panels; with and without a bias."""
    for k in (1, 2, 7, 15, 16, 17, 31, 33, 63, 64, 65, 127, 130, 257, 640):
        for num_panels in (1, 2, 3, 4):
            matrix = random_matrix(format_name, k, num_panels, has_bias=num_panels % 2 == 0, seed=k)
            for count in (1, 3, 5):
                assert relative_error(kernel, matrix, random_rows(count, k)) < TOLERANCES[kernel], (
                    k,
                    num_panels,
                    count,
                )


@CASES
def test_deep_matrix(kernel: str, format_name: str) -> None:
    """A realistic depth, longer than the prefetch distance."""
    matrix = random_matrix(format_name, 2880, 2)
    for count in (1, 9):
        assert relative_error(kernel, matrix, random_rows(count, 2880)) < TOLERANCES[kernel]


@CASES
def test_bits_of_a_row_do_not_depend_on_its_company(kernel: str, format_name: str) -> None:
    """Alone or among others, with few panels or many: the same bits."""
    matrix = random_matrix(format_name, 200, 3, has_bias=True)
    rows = random_rows(29, 200)
    alone = np.concatenate(
        [
            np.concatenate([run(kernel, panels_from(matrix, p), rows[r : r + 1]) for p in range(3)], axis=1)
            for r in range(29)
        ]
    )
    for count in range(1, 30):
        assert run(kernel, matrix, rows[:count]).tobytes() == alone[:count].tobytes(), count


@CASES
def test_nan_and_infinity_of_a_row_stay_in_it(kernel: str, format_name: str) -> None:
    """A row with NaN gives NaN, one with infinity nothing finite; their neighbours keep their bits."""
    matrix = random_matrix(format_name, 96, 2)
    rows = random_rows(4, 96)
    clean = run(kernel, matrix, rows)
    rows[1, 95] = 0x7FC0
    rows[2, 0] = 0x7F80
    result = run(kernel, matrix, rows)
    assert np.isnan(result[1]).all()
    assert not np.isfinite(result[2]).any()
    assert result[[0, 3]].tobytes() == clean[[0, 3]].tobytes()
