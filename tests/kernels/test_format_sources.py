"""Sources in other shapes: slices, transposes, interleaved rows, wider elements, special values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moebius import _kernels
from moebius.kernels.source import SourceMatrix
from tests.helpers.quantised_sources import (
    ENCODERS,
    Quantised,
    bfloat16_bits,
    bfloat16_values,
    float8_values,
    random_weights,
)

ROWS, COLS = 64, 384


def encode(name: str, rows: int = ROWS, cols: int = COLS) -> Quantised:
    return ENCODERS[name](random_weights(np.random.default_rng(5), rows, cols))


def packed_weights(
    format_name: str, source: SourceMatrix | NDArray[Any], rows: int, cols: int
) -> NDArray[Any]:
    packed = _kernels.pack_matrix(format_name, source)
    np.testing.assert_array_equal(packed, _kernels.pack_matrix(format_name, source, reference=True))
    return _kernels.unpack_matrix(format_name, packed, rows, cols)


def check(format_name: str, source: SourceMatrix | NDArray[Any], expected: NDArray[Any]) -> None:
    """Packed by both packers and dequantised, the source means `expected`."""
    np.testing.assert_array_equal(packed_weights(format_name, source, *expected.shape), expected)
    np.testing.assert_array_equal(_kernels.dequantise_matrix(source), expected)


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "bfloat16", "float8", "int8"], ids=lambda dtype: str(dtype)
)
@pytest.mark.parametrize("view", ["transposed", "interleaved", "reversed", "interleaved_transposed"])
def test_strided_sources(dtype: str, view: str) -> None:
    """Any strides mean what numpy says they mean: fused and transposed experts need no copy."""
    rng = np.random.default_rng(6)
    numpy_dtype = {"bfloat16": "uint16", "float8": "uint8"}.get(dtype, dtype)
    shape = {"transposed": (200, 41), "interleaved": (82, 200), "reversed": (41, 200)}.get(view, (200, 82))
    stored = rng.integers(0, 120, shape).astype(numpy_dtype)
    codes = {
        "transposed": stored.T,
        "interleaved": stored[1::2],
        "reversed": stored[::-1, ::-1],
        "interleaved_transposed": stored[:, ::2].T,
    }[view]
    source = SourceMatrix(codes, code="float8" if dtype == "float8" else None)
    values = {"bfloat16": bfloat16_values, "float8": float8_values}.get(dtype, lambda x: x.astype(np.float32))
    format_name = {"float8": "fp8_channel"}.get(dtype, dtype)
    check(format_name, source, values(codes))  # type: ignore[operator]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_widen_exactly(dtype: str) -> None:
    """Every 16-bit pattern as float32: normal, subnormal, infinite; NaN stays NaN."""
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(64, 1024)
    stored = bits.view(np.float16) if dtype == "float16" else bits
    expected = stored.astype(np.float32) if dtype == "float16" else bfloat16_values(bits)
    check("float32", SourceMatrix(stored), expected)
    check(dtype, SourceMatrix(stored), expected)


def test_every_float8_and_scale_byte() -> None:
    """All 256 codes and all 256 e4m3 and e8m0 scales are what OCP defines, NaN included."""
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    check("fp8_channel", SourceMatrix(codes, code="float8"), float8_values(codes))
    ones = np.full((256, 8), 0x22, np.uint8)  # e2m1 code 2 is 1.0
    scales = np.arange(256, dtype=np.uint8)[:, None]
    powers = np.ldexp(np.float32(1), np.minimum(np.arange(256) - 127, 127)).astype(np.float32)
    powers[255] = np.nan
    mxfp4 = SourceMatrix(ones, "mxfp4", scales=scales, scale_type="e8m0", group_size=32)
    check("mxfp4", mxfp4, np.repeat(powers[:, None], 16, 1))
    nvfp4 = SourceMatrix(ones, "nvfp4", scales=scales, scale_type="e4m3", group_size=16)
    check("nvfp4", nvfp4, np.repeat(float8_values(scales), 16, 1))


def test_gptq_zero_wraps() -> None:
    """Version 1 stores zero - 1 in four bits: a stored 15 means zero point 0."""
    words = np.full((1, 8), 0x76543210, np.int32)
    zeros = np.full((1, 1), -1, np.int32)
    scales = np.ones((1, 8), np.float16)
    source = SourceMatrix(words, "gptq_int4", scales=scales, group_size=32, zeros=zeros, zeros_offset=1)
    check("int4_g32_zeros_f16", source, np.tile(np.arange(8, dtype=np.float32), (8, 1)))


def test_symmetric_source_in_a_format_with_zeros() -> None:
    """Exact: its zero points are all 8."""
    quantised = encode("compressed_int4_g32")
    check("int4_g32_zeros", quantised.source, quantised.weights)


@pytest.mark.parametrize(
    "name",
    [
        "compressed_int4_g32",
        "int4_g32_mins",
        "int8_g128",
        "mxfp4",
        "nvfp4",
        "fp8_block",
        "int8",
        "bfloat16",
    ],
)
def test_row_slices(name: str) -> None:
    """Rows 32..63 by views of the arrays: what a fused checkpoint tensor or an expert split hands over."""
    quantised = encode(name)
    source = quantised.source
    rows = slice(32, 64)
    per_row: dict[str, Any] = {
        "codes": source.codes[rows],
        "scales": source.scales[rows]
        if source.scales is not None and source.scale_rows == 1
        else source.scales,
        "mins": None if source.mins is None else source.mins[rows],
        "column_scale": None if source.column_scale is None else source.column_scale[rows],
        "scale_row_begin": 32 if source.scale_rows > 1 else 0,
    }
    check(quantised.format, replace(source, **per_row), quantised.weights[rows])


def test_column_slice_at_group_boundaries() -> None:
    """Columns 128..255 of k, as a tensor-parallel split of down cuts them."""
    quantised = encode("awq_int4_g128")
    source = quantised.source
    assert source.scales is not None
    assert source.zeros is not None
    cut = replace(source, codes=source.codes[128:256], scales=source.scales[1:2], zeros=source.zeros[1:2])
    check(quantised.format, cut, quantised.weights[:, 128:256])


def test_plain_four_bit_codes_with_zeros() -> None:
    """One code a byte, the form the requantiser hands to the packer."""
    rng = np.random.default_rng(7)
    codes = rng.integers(0, 16, (20, 130)).astype(np.uint8)
    zeros = rng.integers(0, 16, (20, 5)).astype(np.uint8)
    scales = rng.random((20, 5)).astype(np.float16)
    spread = [np.repeat(values.astype(np.float32), 32, 1)[:, :130] for values in (zeros, scales)]
    source = SourceMatrix(codes, code="int4", scales=scales, group_size=32, zeros=zeros)
    check("int4_g32_zeros_f16", source, (codes.astype(np.float32) - spread[0]) * spread[1])


@pytest.mark.parametrize("scale_dtype", ["bfloat16", "e8m0"])
def test_block_scales_widen(scale_dtype: str) -> None:
    """fp8 blocks whose scales are bfloat16 or powers of two become float32 scales exactly."""
    quantised = encode("fp8_block", 48, 256)
    powers = np.array([[120, 124]], np.uint8)
    values = np.ldexp(np.float32(1), powers.astype(np.int32) - 127).astype(np.float32)
    scales: NDArray[Any] = powers if scale_dtype == "e8m0" else bfloat16_bits(values)
    source = replace(quantised.source, scales=scales, scale_type="e8m0" if scale_dtype == "e8m0" else None)
    expected = float8_values(quantised.tensors["weight"]) * np.repeat(values, 128, 1)
    check("fp8_block", source, expected)


def test_one_int4_scale_for_a_whole_row() -> None:
    """Channel-wise int4 is grouped int4 whose scales repeat: a broadcast view, nothing copied or rounded."""
    rng = np.random.default_rng(9)
    codes = rng.integers(0, 16, (24, 200)).astype(np.uint8)
    scales = rng.random((24, 1)).astype(np.float16)
    source = SourceMatrix(codes, code="int4", scales=np.broadcast_to(scales, (24, 2)), group_size=128)
    check("int4_g128_f16", source, (codes.astype(np.float32) - 8) * scales.astype(np.float32))


def test_biases() -> None:
    """Biases follow their columns, padding has none."""
    bias = np.arange(1, 21, dtype=np.float32)
    source = SourceMatrix(np.zeros((20, 64), np.float32), bias=bias)
    packed = _kernels.pack_matrix("float32", source)
    np.testing.assert_array_equal(_kernels.unpack_bias("float32", packed, 20, 64), bias)


def test_experts_packed_in_parts_are_the_same() -> None:
    """Threads that share an expert write the bytes that one thread writes."""
    up, down = encode("awq_int4_g32", 72, 96), encode("mxfp4", 96, 72)
    whole = _kernels.pack_expert(up.format, down.format, up.source, up.source, down.source)
    for parts in (2, 3, 50):
        shared = _kernels.pack_expert(up.format, down.format, up.source, up.source, down.source, parts=parts)
        np.testing.assert_array_equal(shared[0], whole[0])


def test_experts_packed_at_once_are_the_same() -> None:
    """Each as it is packed alone, with its checksum; nothing is written where numbers or sizes do not fit."""
    up, down = encode("awq_int4_g32", 72, 96), encode("mxfp4", 96, 72)
    gates = [up.source, encode("awq_int4_g32", 72, 96).source]
    experts = [(gate, up.source, down.source) for gate in gates]
    wanted = [_kernels.pack_expert(up.format, down.format, *expert) for expert in experts]
    into = [np.zeros_like(packed) for packed, _, _ in wanted]
    found = _kernels.pack_experts(up.format, down.format, experts, into=into, seeds=[7, 8])
    for (packed, *errors), memory, one, seed in zip(wanted, into, found, (7, 8), strict=True):
        np.testing.assert_array_equal(memory, packed)
        assert one == (_kernels.weight_digest(packed, seed), *errors)
    for others, seeds in ((into[:1], [7, 8]), (into, [7]), ([into[0], into[1][1:]], [7, 8])):
        with pytest.raises(ValueError, match=r"experts 2|into: "):
            _kernels.pack_experts(up.format, down.format, experts, into=others, seeds=seeds)


def test_copies_have_checksums_of_their_own() -> None:
    """What a checksum is of is the copy; sizes have to fit, and memory to be of bytes that can be written."""
    sources = [np.arange(count, dtype=np.uint8) for count in (5, 200)]
    targets = [np.zeros_like(source) for source in sources]
    digests = _kernels.copy_weights(sources, targets, [1, 2])
    for source, target, digest, seed in zip(sources, targets, digests, (1, 2), strict=True):
        np.testing.assert_array_equal(source, target)
        assert digest == _kernels.weight_digest(target, seed)
    with pytest.raises(ValueError, match="into: 5 bytes, but the expert takes 200"):
        _kernels.copy_weights(sources, [targets[0], targets[0]], [1, 2])
    targets[1].flags.writeable = False
    with pytest.raises(ValueError, match="not writeable"):
        _kernels.copy_weights(sources, targets, [1, 2])
    assert _kernels.copy_weights([], [], []) == []


def test_factors_are_of_blocks() -> None:
    """A source that was cut inside of blocks has their factors; one with others than panels hold is refused.

    So are words without their type.
    """
    quantised = ENCODERS["int4_g32_mins_products"](random_weights(np.random.default_rng(1), 16, 512))
    source = quantised.source
    assert source.scales is not None
    assert source.mins is not None
    for columns in (range(128, 256), range(64, 128), range(192, 384), range(512)):
        groups = slice(columns.start // 32, columns.stop // 32)
        part = replace(
            source,
            codes=np.ascontiguousarray(source.codes[:, columns.start : columns.stop]),
            scales=source.scales[:, groups],
            mins=source.mins[:, groups],
        )
        packed = _kernels.pack_matrix(quantised.format, part)
        found = _kernels.unpack_matrix(quantised.format, packed, 16, len(columns), False)
        np.testing.assert_array_equal(found, quantised.weights[:, columns.start : columns.stop])
    cut = replace(source, scales=source.scales[:, 4:12], mins=source.mins[:, 4:12], cols=256)
    with pytest.raises(
        ValueError, match=r"groups 3 and 4 of row 0 have two factors.* multiples of 256 columns"
    ):
        _kernels.pack_matrix(quantised.format, cut)
    with pytest.raises(ValueError, match="int32 scales need it: products"):
        _kernels.unsupported_reason(quantised.format, replace(source, scale_type=None))
    assert "it has products scales" in _kernels.unsupported_reason("int4_g32_mins", source)


def test_mins_are_neither_lost_nor_made_up() -> None:
    """Where the format or the source has none the reason says so; arrays unlike the scales are refused."""
    quantised = encode("int4_g32_mins")
    source = quantised.source
    assert source.mins is not None
    assert "it has mins" in _kernels.unsupported_reason("int4_g32_f16", source)
    assert "it has no mins" in _kernels.unsupported_reason(quantised.format, replace(source, mins=None))
    for wrong in (source.mins[:, :-1], source.mins.astype(np.float32), source.mins[:, ::-1]):
        with pytest.raises(ValueError, match="mins"):
            _kernels.unsupported_reason(quantised.format, replace(source, mins=wrong))
