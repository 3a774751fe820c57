"""Every checkpoint format computes right at every instruction-set level: with each activation, odd shapes,
one expert, empty ones and skipped ids, and rows from 1 to 512, against dequantised weights in float64."""

from __future__ import annotations

import functools
import zlib

import numpy as np
import pytest

from moebius import _kernels_testing as testing
from moebius.kernels import supported_isas
from tests.helpers.moe_golden import Routed, from_bfloat16, to_bfloat16
from tests.helpers.packed_experts import Shape, root_mean_square_error
from tests.helpers.quantised_sources import ENCODERS
from tests.helpers.weight_golden import (
    Golden,
    GoldenExpert,
    golden_experts,
    golden_layer,
    largest_row_error,
    load_golden,
    row_norms,
)
from tests.tolerances import EXPERTS_BFLOAT16, EXPERTS_FLOAT32, ROUNDING_SPREADS

# hidden, intermediate, experts, bias. Multiples of 8, which some encoders need, but none of 64.
SHAPES = {
    "silu": (200, 72, 6, False),
    "silu_clamped": (72, 136, 1, True),
    "gpt_oss": (264, 56, 4, True),
    "relu2": (40, 328, 3, False),
    "gelu_tanh": (136, 88, 5, False),
    "clamped_silu": (56, 104, 2, False),
}
NOT_IN_TILES = ("float32",)
# Levels by name, and tiles kept in memory where there are none.
EMULATED = [name for name in testing.gemm_names() if name.startswith("amx_emulated")]
LEVELS = [*supported_isas(), *(["amx_emulated"] if EMULATED else [])]
# Tiles multiply bfloat16 and int8; float16 is the sum of two of them, float32 is not.
CASES = [(e, level) for e in ENCODERS for level in LEVELS if level != "amx_emulated" or e not in NOT_IN_TILES]


def shape_of(encoder: str, activation: str) -> Shape:
    hidden, intermediate, experts, has_bias = SHAPES[activation]
    name = golden_format(encoder)
    return Shape(hidden, intermediate, experts, name, name, activation, has_bias, limit=1.5)


@functools.cache
def golden_format(encoder: str) -> str:
    """Returns the packed format that an encoder is for."""
    return ENCODERS[encoder](np.ones((8, 32), np.float32)).format


@functools.cache
def experts_of(encoder: str, activation: str) -> list[GoldenExpert]:
    return golden_experts(encoder, shape_of(encoder, activation), seed=len(activation))


def route(rng: np.random.Generator, rows: int, shape: Shape) -> Routed:
    """Returns one of: any ids, all rows on one expert, one or more experts empty, half of the ids
    not held.
    """
    experts = shape.experts
    ids = {
        0: rng.integers(0, experts, (rows, 3)),
        1: np.full((rows, 3), [experts - 1, -1, experts]),
        2: rng.integers(0, max(1, experts - 2), (rows, 3)),
        3: rng.integers(-experts, experts, (rows, 3)),
    }[int(rng.integers(4))]
    hidden = rng.standard_normal((rows, shape.hidden), dtype=np.float32)
    return Routed(hidden, ids.astype(np.int32), rng.random((rows, 3), dtype=np.float32))


@functools.cache
def requests_of(encoder: str, activation: str) -> list[tuple[Routed, Golden, Golden]]:
    """Returns requests with their goldens from float32 rows and from rows rounded to bfloat16.

    Over all formats and activations every row count in the list below comes up, and random ones as well.
    """
    rng = np.random.default_rng(zlib.crc32(f"{encoder} {activation}".encode()))
    some = [1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33]
    found = []
    for rows in (int(rng.choice(some)), int(rng.integers(34, 150)), *([512] if rng.random() < 0.2 else [])):
        routed = route(rng, rows, shape_of(encoder, activation))
        narrow = Routed(
            from_bfloat16(to_bfloat16(routed.hidden_states)), routed.topk_ids, routed.topk_weights
        )
        goldens = [
            golden_layer(experts_of(encoder, activation), shape_of(encoder, activation), each)
            for each in (routed, narrow)
        ]
        found.append((routed, goldens[0], goldens[1]))
    return found


def check_float32(output: np.ndarray, golden: Golden, shape: Shape) -> None:
    """Exact, or for W8A8 off by what its steps cost."""
    if shape.gate_up == "int8_w8a8":
        check_rounding(output, golden, golden.int8_rounding)
    else:
        assert largest_row_error(output, golden.output) <= EXPERTS_FLOAT32


def check_rounding(output: np.ndarray, golden: Golden, expected: np.ndarray) -> None:
    """No row is further off than a few times what independent roundings give it on average."""
    errors = row_norms(output - golden.output)
    assert (errors <= ROUNDING_SPREADS * expected + EXPERTS_FLOAT32 * row_norms(golden.output)).all()


def check_bfloat16(output: np.ndarray, golden: Golden, shape: Shape) -> None:
    """Off by the rounding of the activation: each row by its own, all together by the known bound."""
    if shape.gate_up == "int8_w8a8":
        return check_float32(output, golden, shape)
    check_rounding(output, golden, golden.bfloat16_rounding)
    if len(output) > 33 and golden.output.any():
        assert root_mean_square_error(output, golden.output) <= EXPERTS_BFLOAT16
    return None


def options_at(level: str, shape: Shape) -> list[dict[str, object]]:
    """Returns the options of engines at the level; emulated kernels are never a choice: each that knows the
    format is forced.
    """
    if level != "amx_emulated":
        return [{"isa": level}]
    rows = "int8" if shape.gate_up == "int8_w8a8" else "bfloat16"
    names = [name for name in testing.gemms_for(shape.gate_up, rows) if name.startswith(level)]
    return [{"kernel": testing.gemm_kernel(name)} for name in names]


@pytest.mark.parametrize(("encoder", "level"), CASES)
def test_format_at_level(encoder: str, level: str) -> None:
    """float32 and bfloat16 requests of several sizes with each activation."""
    for activation in SHAPES:
        shape = shape_of(encoder, activation)
        for options in options_at(level, shape):
            engine = shape.empty_engine(num_threads=2, **options)
            load_golden(engine, experts_of(encoder, activation), shape)
            for routed, exact, narrow in requests_of(encoder, activation):
                arguments = (routed.topk_ids, routed.topk_weights)
                check_float32(engine.forward(0, routed.hidden_states, *arguments), exact, shape)
                output = engine.forward(0, to_bfloat16(routed.hidden_states), *arguments)
                check_bfloat16(output, narrow, shape)


@pytest.mark.parametrize("encoder", ["bfloat16", "fp8_block", "compressed_int4_g32", "mxfp4", "nvfp4"])
def test_bfloat16_bound_of_real_widths(encoder: str) -> None:
    """With the width and number of experts that real models have every single row is within the bound."""
    shape = Shape(256, 768, 8, golden_format(encoder), golden_format(encoder))
    experts = golden_experts(encoder, shape, seed=0)
    engine = shape.empty_engine(num_threads=2)
    load_golden(engine, experts, shape)
    for rows in (1, 20):
        rng = np.random.default_rng(rows)
        bits = to_bfloat16(rng.standard_normal((rows, 256), dtype=np.float32))
        ids = np.tile(np.arange(8, dtype=np.int32), (rows, 1))
        routed = Routed(from_bfloat16(bits), ids, rng.uniform(0.05, 0.2, (rows, 8)).astype(np.float32))
        output = engine.forward(0, bits, routed.topk_ids, routed.topk_weights)
        assert largest_row_error(output, golden_layer(experts, shape, routed).output) <= EXPERTS_BFLOAT16
