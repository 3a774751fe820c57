"""The packed layout as documented: a numpy unpacker and arithmetic written from the documentation alone agree
with the C++ packer for every format, so that a GPU kernel written from it will too."""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius import _kernels
from moebius.kernels.weight_formats import (
    GRID_UNITS,
    WEIGHT_FORMATS,
    expert_layout,
    gate_up_format,
    panel_layout,
    weight_format,
)
from tests.helpers.numpy_unpack import (
    grid_words,
    scale_bits,
    unpack_bias,
    unpack_codes,
    unpack_expert,
    unpack_matrix,
)
from tests.helpers.quantised_sources import ENCODERS, random_weights

SHAPES = [(16, 64), (40, 136), (8, 8), (24, 2880)]


# Formats stated a second time: code, bits, scale, group size, and what else there is.
STATED = {
    "float32": ("float32", 32, None, 0),
    "fp8_block": ("float8", 8, "float32", 128, "panel_scale"),
    "fp8_g32": ("float8", 8, "float32", 32),
    "fp8_g128": ("float8", 8, "float32", 128),
    "mxfp8": ("float8", 8, "e8m0", 32),
    "fp8_channel": ("float8", 8, None, 0, "column_scale"),
    "int8_w8a8": ("int8", 8, None, 0, "column_scale", "quantised_rows"),
    "int8_g32_mins": ("int8", 8, "float16", 32, "mins"),
    "int4_g64_zeros": ("int4", 4, "bfloat16", 64, "zeros"),
    "int4_g16_f16": ("int4", 4, "float16", 16),
    "int4_g32_mins_products": ("int4", 4, "products", 32, "mins"),
    "int6_g16_products": ("int6", 6, "products", 16),
    "int5_g32_mins_products": ("int5", 5, "products", 32, "mins"),
    "int3_g16_products": ("int3", 3, "products", 16),
    "int2_g16_mins_products": ("int2", 2, "products", 16, "mins"),
    "int2_g128_f16": ("int2", 2, "float16", 128),
    "iq4_g32_products": ("iq4", 4, "products", 32),
    "iq4_g32_f16": ("iq4", 4, "float16", 32),
    "iq3_xxs_grid_products": ("iq3_xxs", 3, "products", 32),
    "iq2_xxs_grid_products": ("iq2_xxs", 2, "products", 32),
    "iq3_s_grid_products": ("iq3_s", 3, "products", 32),
    "iq2_xs_grid_products": ("iq2_xs", 2, "products", 16),
    "iq2_s_grid_products": ("iq2_s", 2, "products", 16),
    "iq1_s_grid_products": ("iq1_s", 1, "products", 32),
    "iq1_m_grid_products": ("iq1_m", 1, "products", 16),
    "tq1_products": ("tq1", 1, "products", 32),
    "mxfp4": ("float4", 4, "e8m0", 32),
    "nvfp4": ("float4", 4, "e4m3", 16, "column_scale"),
}


@pytest.mark.parametrize("name", STATED)
def test_formats_are_what_their_names_say(name: str) -> None:
    """A name means the same in every version: files that were packed by another one are read by it."""
    found = weight_format(name)
    flags = ("panel_scale", "zeros", "mins", "column_scale", "quantised_rows")
    stated = (found.code, found.bits, found.scale, found.group_size, *(f for f in flags if getattr(found, f)))
    assert stated == STATED[name]


@pytest.mark.parametrize(
    ("name", "k", "has_bias", "stated"),
    [
        ("bfloat16", 100, False, (128, 0, 4096, 4096, 4096, 4096, 4096, 4096)),
        ("fp8_block", 300, True, (320, 3, 5120, 5184, 5184, 5184, 5184, 5248)),
        ("int4_g32_zeros", 136, True, (192, 5, 1536, 1728, 1856, 1856, 1856, 1920)),
        ("int8_g32_mins", 64, False, (64, 2, 1024, 1088, 1088, 1152, 1152, 1152)),
        # A factor for each of three groups: nothing more divides 96 and 256. Then 8 groups share one.
        ("int4_g32_mins_products", 96, False, (128, 3, 1024, 1216, 1216, 1408, 1408, 1408)),
        ("int4_g32_mins_products", 512, False, (512, 16, 4096, 4416, 4416, 4736, 4736, 4736)),
        ("int3_g16_products", 128, False, (128, 8, 768, 960, 960, 960, 960, 960)),
        ("nvfp4", 72, False, (128, 5, 1024, 1152, 1152, 1152, 1216, 1216)),
    ],
)
def test_sections_lie_where_stated(name: str, k: int, has_bias: bool, stated: tuple[int, ...]) -> None:
    """k padded, groups, offsets of scales, zeros, mins, column scale and bias, then the panel's bytes."""
    found = panel_layout(name, k, has_bias)
    offsets = (found.scales_offset, found.zeros_offset, found.mins_offset, found.column_scale_offset)
    assert (found.k_padded, found.groups, *offsets, found.bias_offset, found.panel_bytes) == stated


@given(st.sampled_from(sorted(WEIGHT_FORMATS)), st.integers(1, 9000), st.booleans())
def test_sections_follow_one_another(name: str, k: int, has_bias: bool) -> None:
    """Each begins at a multiple of 64 and is as large as the documentation says, in its order."""
    found = panel_layout(name, k, has_bias)
    scale_bytes = {None: 0, "float32": 4, "bfloat16": 2, "float16": 2, "e8m0": 1, "e4m3": 1, "products": 1}[
        found.scale
    ]
    scales = found.groups * scale_bytes * (1 if found.panel_scale else 16)
    if found.scale == "products":
        shared = max(found.group_size, math.gcd(k, 256)) // found.group_size
        factors = -(-found.groups // shared) * 32
        assert (found.factor_groups, found.whole_offset) == (shared, -(-factors // 64) * 64)
        wholes = scales * (found.code not in GRID_UNITS)
        fields = scale_bits(found)
        if fields[0] < 8:
            wholes = sum(-(-found.groups * bits // 8) * 16 for bits in fields)
        scales = found.whole_offset + -(-wholes // 64) * 64
    sizes = (
        found.k_padded * 16 * found.bits // 8,
        scales,
        found.k_padded // 2 * {"iq3_s": 1, "iq2_s": 1, "iq1_s": 2, "iq1_m": 2, "tq1": 2.5}.get(found.code, 0),
        found.groups * 16 * found.zeros,
        (found.whole_offset if found.joined else scales) * found.mins,
        64 * found.column_scale,
        64 * has_bias,
    )
    ends = list(itertools.accumulate(-(-size // 64) * 64 for size in sizes))
    offsets = [found.scales_offset, found.signs_offset, found.zeros_offset, found.mins_offset]
    assert [*offsets, found.column_scale_offset, found.bias_offset, found.panel_bytes] == ends
    assert (found.k, found.has_bias, found.k_padded) == (k, has_bias, -(-k // 64) * 64)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
@pytest.mark.parametrize("name", ENCODERS)
def test_numpy_unpacks_what_the_kernels_pack(name: str, shape: tuple[int, int]) -> None:
    """The documentation is enough to read a packed checkpoint back, bit for bit."""
    quantised = ENCODERS[name](random_weights(np.random.default_rng(1), *shape))
    packed = _kernels.pack_matrix(quantised.format, quantised.source)
    layout = panel_layout(quantised.format, shape[1])
    np.testing.assert_array_equal(unpack_matrix(layout, packed, shape[0]), quantised.weights)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinite and NaN scales are among the random bytes
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_any_bytes_mean_the_same_in_both_languages(name: str) -> None:
    """Every code, scale and zero point, NaN and infinity included, decodes to the same value."""
    layout = panel_layout(name, 1000, has_bias=True)
    packed = np.random.default_rng(2).integers(0, 256, 2 * layout.panel_bytes, np.uint8)
    ours = unpack_matrix(layout, packed, 32)
    np.testing.assert_array_equal(ours, _kernels.unpack_matrix(name, packed, 32, 1000, has_bias=True))
    panels = packed.reshape(2, -1)
    biases = np.concatenate([unpack_bias(layout, panel) for panel in panels])
    np.testing.assert_array_equal(biases, _kernels.unpack_bias(name, packed, 32, 1000))


@settings(deadline=None)
@given(
    name=st.sampled_from(sorted(ENCODERS)),
    rows=st.integers(1, 6),
    cols=st.integers(1, 30),
    bias=st.booleans(),
)
def test_padding_is_zero(name: str, rows: int, cols: int, bias: bool) -> None:
    """Columns beyond the last row have zero weights and biases; elements beyond k are zero bits (int4: 8;
    rows of a grid: words beyond k)."""
    quantised = ENCODERS[name](random_weights(np.random.default_rng(3), 8 * rows, 8 * cols))
    layout = panel_layout(quantised.format, 8 * cols, bias)
    packed = _kernels.pack_matrix(quantised.format, quantised.source, has_bias=bias)
    all_columns = -(-8 * rows // 16) * 16
    assert not unpack_matrix(layout, packed, all_columns)[8 * rows :].any()
    for panel in packed.reshape(-1, layout.panel_bytes):
        if layout.code in GRID_UNITS:
            beyond = grid_words(layout, panel)[-(-8 * cols // 32) :]
        else:
            beyond = unpack_codes(layout, panel)[8 * cols :]
        assert (beyond == (8 if layout.code == "int4" else 0)).all()
        assert not unpack_bias(layout, panel).any()


@pytest.mark.parametrize(
    "first", ["", "compressed_int4_g32", "int8"], ids=["up_alone", "gated", "gate_of_its_own_format"]
)
@pytest.mark.parametrize("down", ["bfloat16", "int8", "mxfp4"])
def test_expert_is_read_back(first: str, down: str) -> None:
    """Gate, up and down lie where the documentation says, also when they have formats of their own; memory of
    the caller's is written completely.
    """
    rng, gated = np.random.default_rng(4), bool(first)
    gate, up = (
        ENCODERS[name](random_weights(rng, 40, 72))
        for name in (first or "compressed_int4_g32", "compressed_int4_g32")
    )
    gate_up = gate_up_format(gate.format, up.format)
    lower = ENCODERS[down](random_weights(rng, 72, 40))
    pack = partial(
        _kernels.pack_expert, gate_up, lower.format, gate.source if gated else None, up.source, lower.source
    )
    packed, squared_error, _ = pack(parts=3)
    used = np.full(packed.nbytes, 0xA5, np.uint8)
    assert np.shares_memory(pack(into=used)[0], used)
    np.testing.assert_array_equal(used, packed)
    with pytest.raises(ValueError, match=f"into: 1 bytes, but the expert takes {packed.nbytes}"):
        pack(into=used[:1])
    layout = expert_layout(gate_up, lower.format, 72, 40, gated=gated)
    panels = 3 * (gated * layout.gate.panel_bytes + layout.gate_up.panel_bytes) + 5 * layout.down.panel_bytes
    assert layout.expert_bytes == panels
    assert packed.nbytes == layout.expert_bytes
    assert squared_error == 0
    read = unpack_expert(layout, packed)
    assert (read[0] is not None) == gated
    for weights, expected in zip(read, (gate.weights, up.weights, lower.weights), strict=True):
        if weights is not None:
            np.testing.assert_array_equal(weights, expected)
