"""Packing: every checkpoint form -> panels -> weights bit for bit; the fast packer against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius import _kernels
from tests.helpers.quantised_sources import ENCODERS, Quantised, random_weights

# (rows, cols): whole panels and tiles, ragged both ways, one element's worth, groups that end early.
SHAPES = [(16, 64), (32, 256), (48, 640), (8, 8), (40, 136), (136, 72), (24, 2880)]


def encode(name: str, rows: int, cols: int, seed: int = 0) -> Quantised:
    return ENCODERS[name](random_weights(np.random.default_rng(seed), rows, cols))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
@pytest.mark.parametrize("name", ENCODERS)
def test_unpacked_is_what_the_checkpoint_means(name: str, shape: tuple[int, int]) -> None:
    """No value is rounded on the way: pack, unpack, compare bits with numpy's dequantisation."""
    quantised = encode(name, *shape)
    assert _kernels.unsupported_reason(quantised.format, quantised.source) == ""
    packed = _kernels.pack_matrix(quantised.format, quantised.source)
    unpacked = _kernels.unpack_matrix(quantised.format, packed, *shape)
    np.testing.assert_array_equal(unpacked, quantised.weights)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
@pytest.mark.parametrize("name", ENCODERS)
def test_dequantised_is_what_the_checkpoint_means(name: str, shape: tuple[int, int]) -> None:
    """The requantiser's input is the same weights."""
    quantised = encode(name, *shape)
    np.testing.assert_array_equal(_kernels.dequantise_matrix(quantised.source), quantised.weights)


@settings(deadline=None)
@given(
    name=st.sampled_from(sorted(ENCODERS)),
    rows=st.integers(1, 9).map(lambda n: 8 * n),
    cols=st.integers(1, 50).map(lambda n: 8 * n),
    seed=st.integers(0, 1 << 30),
)
def test_fast_and_reference_packers_agree(name: str, rows: int, cols: int, seed: int) -> None:
    """Vector loops write the bytes that the element-by-element reference writes, padding included."""
    quantised = encode(name, rows, cols, seed)
    fast = _kernels.pack_matrix(quantised.format, quantised.source)
    reference = _kernels.pack_matrix(quantised.format, quantised.source, reference=True)
    np.testing.assert_array_equal(fast, reference)
