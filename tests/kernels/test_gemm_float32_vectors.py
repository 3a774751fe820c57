"""Activations, scatter, conversions and row quantising at the scalar, AVX2 and AVX-512 levels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from moebius import _kernels
from moebius import _kernels_testing as testing
from tests.tolerances import ACTIVATION_FLOAT32

LEVELS = [name for name in _kernels.supported_isas() if name in ("scalar", "avx2", "avx512")]
ACTIVATIONS = ["silu", "silu_clamped", "gpt_oss", "relu2", "gelu_tanh", "clamped_silu"]
ALPHA, LIMIT = 1.702, 7.0


def golden(activation: str, gate: NDArray[np.float32], up: NDArray[np.float32]) -> NDArray[np.float64]:
    """Returns the formulas of product.h in float64."""
    g, u = gate.astype(np.float64), up.astype(np.float64)
    if activation in ("silu_clamped", "gpt_oss", "clamped_silu"):
        u = np.clip(u, -LIMIT, LIMIT)
    if activation in ("gpt_oss", "clamped_silu"):
        g = np.minimum(g, LIMIT)
    alpha = float(np.float32(ALPHA)) if activation == "gpt_oss" else 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        swish: NDArray[np.float64] = g / (1 + np.exp(-alpha * g))
    if activation == "silu_clamped":
        swish = np.minimum(swish, LIMIT)
    if activation == "gelu_tanh":
        with np.errstate(over="ignore", invalid="ignore"):
            swish = g / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
    if activation == "relu2":
        swish, u = np.maximum(u, 0.0), np.maximum(u, 0.0)
    result: NDArray[np.float64] = swish * (u + 1 if activation == "gpt_oss" else u)
    return result


def allowed(activation: str, gate: NDArray[np.float32], up: NDArray[np.float32]) -> NDArray[np.float64]:
    """Returns the error allowed of each value by itself; where GELU leaves next to nothing of a gate, of a
    part of what went in.

    There a rounding of the power's argument, which grows with the gate's cube, is many of the result.
    """
    size = np.abs(golden(activation, gate, up))
    if activation == "gelu_tanh":
        size = size + 1e-4 * np.abs(gate.astype(np.float64) * up)
    return ACTIVATION_FLOAT32 * size + 1e-30


def interleave(activation: str, gate: NDArray[np.float32], up: NDArray[np.float32]) -> NDArray[np.float32]:
    """[rows, columns] each -> 16 gate, 16 up, 16 gate, ... as the gate and up panels give them."""
    if activation == "relu2":
        return up
    rows = gate.shape[0]
    return np.stack([gate.reshape(rows, -1, 16), up.reshape(rows, -1, 16)], axis=2).reshape(rows, -1)


def activate(
    isa: str, activation: str, gate: NDArray[np.float32], up: NDArray[np.float32]
) -> NDArray[np.float32]:
    result: NDArray[np.float32] = testing.activate(
        isa, activation, ALPHA, LIMIT, interleave(activation, gate, up), False
    )
    return result


def round_to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("isa", LEVELS)
def test_activations(isa: str, activation: str) -> None:
    """Activations are close to float64 over ordinary and large gates, each value by itself."""
    rng = np.random.default_rng(0)
    for spread in (1.0, 30.0):
        gate = (spread * rng.standard_normal((3, 320))).astype(np.float32)
        up = (spread * rng.standard_normal((3, 320))).astype(np.float32)
        expected = golden(activation, gate, up)
        error = np.abs(activate(isa, activation, gate, up) - expected)
        assert (error <= allowed(activation, gate, up)).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("isa", LEVELS)
def test_activations_of_extreme_values(isa: str, activation: str) -> None:
    """NaN passes; huge gates neither overflow in exp nor leave more than zero on the negative side."""
    extremes = np.array([np.nan, 1e38, -1e38, 100.0, -100.0, 88.7, -88.7, 0.0, -0.0, 1e-38], np.float32)
    gate = np.resize(extremes, (1, 16))
    ones = np.ones_like(gate)
    result = activate(isa, activation, gate, ones)
    if activation == "relu2":
        result = activate(isa, activation, ones, gate)
        gate, ones = ones, gate
    expected = golden(activation, gate, ones)
    assert (np.isnan(result) == np.isnan(expected)).all()
    finite = np.isfinite(expected) & (expected < 3e38)
    assert (np.abs(result - expected)[finite] <= allowed(activation, gate, ones)[finite]).all()
    up_nan = np.where(np.arange(16) == 3, np.float32(np.nan), np.float32(1))[None]
    assert np.isnan(activate(isa, activation, np.ones_like(up_nan), up_nan)).tolist()[0] == [
        i == 3 for i in range(16)
    ]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("isa", LEVELS)
def test_bfloat16_activations_round_the_float32_ones(isa: str, activation: str) -> None:
    """Values are the very same float32 ones rounded to nearest even; NaN stays NaN."""
    rng = np.random.default_rng(1)
    gate, up = (rng.standard_normal((2, 160)).astype(np.float32) for _ in range(2))
    up[0, 7] = np.nan
    exact = activate(isa, activation, gate, up)
    rounded = testing.activate(isa, activation, ALPHA, LIMIT, interleave(activation, gate, up), True)
    nan = np.isnan(exact)
    np.testing.assert_array_equal(rounded[~nan], round_to_bfloat16(exact)[~nan])
    assert np.isnan((rounded[nan].astype(np.uint32) << 16).view(np.float32)).all()


@pytest.mark.parametrize("isa", LEVELS)
def test_scatter_adds_and_touches_nothing_else(isa: str) -> None:
    """Repeated rows add up in order; rows and columns that are not named keep their bits."""
    rng = np.random.default_rng(2)
    for columns in (1, 7, 8, 15, 16, 17, 40):
        result = rng.standard_normal((4, 48)).astype(np.float32)
        ids = np.array([2, 0, 2, 5], np.uint32)
        weights = rng.standard_normal(4).astype(np.float32)
        output = rng.standard_normal((7, columns)).astype(np.float32)
        expected = output.astype(np.float64)
        np.add.at(expected, ids, weights[:, None].astype(np.float64) * result[:, :columns])
        before = output.copy()
        testing.scatter(isa, result, ids, weights, output)
        np.testing.assert_allclose(output, expected, rtol=0, atol=1e-6)
        untouched = [1, 3, 4, 6]
        assert output[untouched].tobytes() == before[untouched].tobytes()


@pytest.mark.parametrize("isa", LEVELS)
def test_conversions_of_every_16_bit_pattern(isa: str) -> None:
    """bfloat16 and float16 -> float32 exactly, and back; any count."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    from_bfloat16 = testing.bfloat16_to_float32(isa, patterns)
    np.testing.assert_array_equal(from_bfloat16.view(np.uint32), patterns.astype(np.uint32) << 16)
    np.testing.assert_array_equal(
        testing.float16_to_float32(isa, patterns), patterns.view(np.float16).astype(np.float32)
    )
    number = ~np.isnan(from_bfloat16)
    np.testing.assert_array_equal(testing.float32_to_bfloat16(isa, from_bfloat16)[number], patterns[number])
    for count in range(40):
        values = from_bfloat16[0x3F00 : 0x3F00 + count] * np.float32(1.001)
        np.testing.assert_array_equal(testing.float32_to_bfloat16(isa, values), round_to_bfloat16(values))


@pytest.mark.parametrize("isa", LEVELS)
def test_rounding_to_bfloat16(isa: str) -> None:
    """Random bits, halves to even, infinity, overflow to infinity; every NaN stays NaN."""
    bits = np.random.default_rng(3).integers(0, 1 << 32, 4099, np.uint64).astype(np.uint32)
    bits[:5] = [0x3F808000, 0x3F818000, 0x7F800000, 0x7F7FFFFF, 0x7F800001]
    values = bits.view(np.float32)
    rounded = testing.float32_to_bfloat16(isa, values)
    nan = np.isnan(values)
    np.testing.assert_array_equal(rounded[~nan], round_to_bfloat16(values)[~nan])
    assert np.isnan(testing.bfloat16_to_float32(isa, rounded)[nan]).all()


@pytest.mark.parametrize("isa", LEVELS)
@settings(deadline=None)
@given(row=hnp.arrays(np.float32, st.integers(1, 70), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_quantised_rows(isa: str, row: NDArray[np.float32]) -> None:
    """The scale is max / 127 and codes are value / scale rounded to nearest even: off by half at most."""
    codes, scale = testing.quantise_row(isa, row)
    largest = np.abs(row).max()
    if largest < np.float32(127 * 2.0**-126):
        assert scale == 1.0
        assert not codes.any()
        return
    assert np.float32(scale) == largest / np.float32(127)
    np.testing.assert_array_equal(codes, np.rint(row / np.float32(scale)).astype(np.int8))
    assert np.abs(codes.astype(np.int32)).max() == 127


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 15, 16, 36])
def test_a_row_with_nan_or_infinity_gets_a_nan_scale(isa: str, bad: float, position: int) -> None:
    """Quantised results of such a row must not look finite; and the count finds it."""
    row = np.ones(37, np.float32)
    assert testing.count_nonfinite(isa, row) == 0
    row[position] = bad
    assert np.isnan(testing.quantise_row(isa, row)[1])
    assert testing.count_nonfinite(isa, row) == 1


@pytest.mark.parametrize("isa", LEVELS)
def test_count_of_nonfinite_values(isa: str) -> None:
    """Any mix, any length."""
    rng = np.random.default_rng(4)
    for count in range(70):
        values = rng.choice(np.array([1.0, 3e38, 0.0, np.nan, np.inf, -np.inf], np.float32), count)
        assert testing.count_nonfinite(isa, values) == int((~np.isfinite(values)).sum())
