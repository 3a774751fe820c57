"""What cannot be packed is refused with a message that names the argument, its value and what is allowed."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from moebius import _kernels
from moebius.kernels.source import SourceMatrix
from tests.helpers.quantised_sources import ENCODERS, random_weights

WEIGHTS = random_weights(np.random.default_rng(8), 32, 256)
CODES = np.zeros((32, 256), np.uint8)
WORDS = np.zeros((32, 32), np.int32)
SCALES = np.ones((32, 8), np.float16)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"codes": CODES}, "source.code: uint8 elements need it"),
        ({"codes": CODES, "code": "int9"}, "source.code: 'int9' is unknown; allowed: bfloat16, float16"),
        ({"codes": CODES, "code": "bfloat16"}, "'bfloat16' can not be read from elements of dtype uint8"),
        ({"codes": CODES.astype(np.int64)}, "source.codes: its dtype is int64; allowed: float32"),
        ({"codes": CODES[0]}, "source.codes: it has 1 dimensions; it must have 2"),
        ({"codes": WORDS, "layout": "awq"}, "source.layout: 'awq' is unknown; allowed: awq_int4"),
        ({"codes": CODES, "layout": "awq_int4"}, "source.codes: its dtype is uint8; allowed: int32 uint32"),
        ({"codes": WORDS.T, "layout": "awq_int4"}, "source.codes: it must be contiguous along its last axis"),
        ({"codes": CODES, "layout": "mxfp4", "cols": 513}, "source.cols: 513; it must be 1 to 512"),
        (
            {"codes": CODES, "code": "int4", "group_size": 32},
            "source.scales: group_size is 32 but they are None",
        ),
        ({"codes": CODES, "code": "int4", "scales": SCALES}, "source.group_size: it is 0"),
        (
            {"codes": CODES, "code": "int4", "scales": SCALES[:, :7], "group_size": 32},
            "source.scales: its shape is [32, 7]; it must be at least [32, 8]",
        ),
        (
            {"codes": CODES, "code": "int4", "scales": CODES, "group_size": 32},
            "source.scale_type: uint8 scales need it: e8m0 or e4m3",
        ),
        (
            {"codes": CODES, "code": "int4", "scales": SCALES, "scale_type": "bfloat16", "group_size": 32},
            "'bfloat16' can not be read from scales of dtype float16",
        ),
        (
            {"codes": CODES, "code": "float8", "scales": SCALES, "group_size": 32, "zeros": CODES},
            "zero points need int4 elements with group scales",
        ),
        ({"codes": WEIGHTS, "bias": np.ones(31, np.float32)}, "source.bias: it must have shape [32]"),
        (
            {"codes": WEIGHTS, "column_scale": np.ones(32)},
            "source.column_scale: it must be a numpy array of float32",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_inconsistent_sources(source: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        _kernels.dequantise_matrix(SourceMatrix(**source))


@pytest.mark.parametrize(
    ("encoder", "format_name", "reason"),
    [
        ("float32", "bfloat16", "its elements are float32, the format's bfloat16"),
        ("bfloat16", "float16", "its elements are bfloat16, the format's float16"),
        ("compressed_int4_g32", "mxfp4", "its elements are int4, the format's float4"),
        ("compressed_int4_g32", "int4_g64", "its group size is 32, the format's 64"),
        ("compressed_int4_g32", "int4_g32_f16", "it has bfloat16 scales, the format float16"),
        ("compressed_int4_g32_zeros", "int4_g32", "it has zero points, the format none"),
        ("fp8_channel", "fp8_block", "it has a scale per column or tensor, the format none"),
        ("fp8_block", "fp8_channel", "its group size is 128, the format's 0"),
        ("mxfp4", "nvfp4", "its group size is 32, the format's 16"),
    ],
)
def test_unsupported_reasons_are_named(encoder: str, format_name: str, reason: str) -> None:
    """unsupported_reason says why, and packing refuses with the same words instead of rounding."""
    source = ENCODERS[encoder](WEIGHTS).source
    assert _kernels.unsupported_reason(format_name, source) == reason
    with pytest.raises(ValueError, match=f"can not be packed as {format_name} exactly: {re.escape(reason)}"):
        _kernels.pack_matrix(format_name, source)


def test_a_slice_that_cuts_a_panel_between_blocks() -> None:
    """Rows from 8 of a 128-row block on: a panel would need two scales where the layout has one."""
    source = SourceMatrix(
        CODES,
        code="float8",
        scales=np.ones((1, 2), np.float32),
        group_size=128,
        scale_rows=128,
        scale_row_begin=8,
    )
    message = (
        "scales of 128 rows, from row 8 of a block on, do not give all columns of a panel the same scale"
    )
    with pytest.raises(ValueError, match=message):
        _kernels.pack_matrix("fp8_block", source)


def test_unknown_formats_and_wrong_sizes() -> None:
    with pytest.raises(ValueError, match="weight format 'int3' is unknown; allowed: float32, bfloat16"):
        _kernels.panel_layout("int3", 64)
    with pytest.raises(ValueError, match="k is 0; it must be 1 to"):
        _kernels.panel_layout("float32", 0)
    with pytest.raises(ValueError, match=r"packed has 64 bytes; float32 of \[16, 64\] has 4096"):
        _kernels.unpack_matrix("float32", np.zeros(64, np.uint8), 16, 64)


def test_a_bias_needs_its_place() -> None:
    """An expert without biases refuses a source with one, naming the matrix."""
    up = SourceMatrix(WEIGHTS, bias=np.ones(32, np.float32))
    with pytest.raises(ValueError, match="up: source matrix: it has a bias, the packed matrix none"):
        _kernels.pack_expert("float32", "float32", WEIGHTS, up, WEIGHTS.T)


def test_expert_shapes() -> None:
    with pytest.raises(ValueError, match=r"down has shape \[32, 256\]; it must be \[256, 32\]"):
        _kernels.pack_expert("float32", "float32", WEIGHTS, WEIGHTS, WEIGHTS)
