"""The packed layout as documented: a numpy unpacker and arithmetic written from the documentation alone agree
with the C++ packer for every format, so that a GPU kernel written from it will too."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius import _kernels
from moebius.packed_layout import (
    ExpertLayout,
    PanelLayout,
    unpack_bias,
    unpack_codes,
    unpack_expert,
    unpack_matrix,
)
from moebius.weight_formats import WEIGHT_FORMATS, weight_format
from tests.helpers.quantised_sources import ENCODERS, random_weights

SHAPES = [(16, 64), (40, 136), (8, 8), (24, 2880)]


def test_names_are_those_of_the_kernels() -> None:
    """Two lists of formats in two languages stay one."""
    assert list(WEIGHT_FORMATS) == _kernels.weight_format_names()


@given(st.sampled_from(sorted(WEIGHT_FORMATS)), st.integers(1, 9000), st.booleans())
def test_offsets_are_those_of_the_kernels(name: str, k: int, has_bias: bool) -> None:
    """Python and C++ place every section at the same byte, each at a multiple of 64."""
    layout = PanelLayout(weight_format(name), k, has_bias)
    offsets = _kernels.panel_layout(name, k, has_bias)
    assert {field: getattr(layout, field) for field in offsets} == offsets
    assert all(value % 64 == 0 for field, value in offsets.items() if field != "groups")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
@pytest.mark.parametrize("name", ENCODERS)
def test_numpy_unpacks_what_the_kernels_pack(name: str, shape: tuple[int, int]) -> None:
    """The documentation is enough to read a packed checkpoint back, bit for bit."""
    quantised = ENCODERS[name](random_weights(np.random.default_rng(1), *shape))
    packed = _kernels.pack_matrix(quantised.format, quantised.source)
    layout = PanelLayout(weight_format(quantised.format), shape[1])
    np.testing.assert_array_equal(unpack_matrix(layout, packed, shape[0]), quantised.weights)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinite and NaN scales are among the random bytes
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_any_bytes_mean_the_same_in_both_languages(name: str) -> None:
    """Every code, scale and zero point, NaN and infinity included, decodes to the same value."""
    layout = PanelLayout(weight_format(name), 1000, has_bias=True)
    packed = np.random.default_rng(2).integers(0, 256, 2 * layout.panel_bytes, np.uint8)
    ours = unpack_matrix(layout, packed, 32)
    np.testing.assert_array_equal(ours, _kernels.unpack_matrix(name, packed, 32, 1000, has_bias=True))
    panels = packed.reshape(2, -1)
    biases = np.concatenate([unpack_bias(layout, panel) for panel in panels])
    np.testing.assert_array_equal(biases, _kernels.unpack_bias(name, packed, 32, 1000))


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(sorted(ENCODERS)),
    rows=st.integers(1, 6),
    cols=st.integers(1, 30),
    bias=st.booleans(),
)
def test_padding_is_zero(name: str, rows: int, cols: int, bias: bool) -> None:
    """Columns beyond the last row have zero weights and biases; elements beyond k are zero bits (int4: 8)."""
    quantised = ENCODERS[name](random_weights(np.random.default_rng(3), 8 * rows, 8 * cols))
    layout = PanelLayout(weight_format(quantised.format), 8 * cols, bias)
    packed = _kernels.pack_matrix(quantised.format, quantised.source, has_bias=bias)
    all_columns = -(-8 * rows // 16) * 16
    assert not unpack_matrix(layout, packed, all_columns)[8 * rows :].any()
    for panel in packed.reshape(-1, layout.panel_bytes):
        beyond = unpack_codes(layout, panel)[8 * cols :]
        assert (beyond == (8 if layout.format.code == "int4" else 0)).all()
        assert not unpack_bias(layout, panel).any()


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "up_alone"])
@pytest.mark.parametrize("down", ["bfloat16", "int8", "mxfp4"])
def test_expert_is_read_back(gated: bool, down: str) -> None:
    """Gate, up and down lie where the documentation says, also when down has a format of its own."""
    rng = np.random.default_rng(4)
    encode_up = ENCODERS["compressed_int4_g32"]
    gate, up = encode_up(random_weights(rng, 40, 72)), encode_up(random_weights(rng, 40, 72))
    lower = ENCODERS[down](random_weights(rng, 72, 40))
    packed, squared_error, _ = _kernels.pack_expert(
        up.format, lower.format, gate.source if gated else None, up.source, lower.source
    )
    layout = ExpertLayout(
        PanelLayout(weight_format(up.format), 72), PanelLayout(weight_format(lower.format), 40), gated
    )
    assert packed.nbytes == layout.expert_bytes
    assert squared_error == 0
    read = unpack_expert(layout, packed)
    assert (read[0] is not None) == gated
    for weights, expected in zip(read, (gate.weights, up.weights, lower.weights), strict=True):
        if weights is not None:
            np.testing.assert_array_equal(weights, expected)
