"""The two phases put rows, experts and columns where they belong: every number of rows, activation and
mixture of formats gives what the packed weights mean, whatever kernel the plan takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moebius import _kernels_testing as testing
from moebius.kernels import ExpertEngine, Isa, supported_isas
from moebius.kernels.weight_formats import split_gate_up
from tests.helpers.moe_golden import Routed, from_bfloat16, random_rows, relative_error, to_bfloat16
from tests.helpers.packed_experts import Shape, packed_golden, quantised, root_mean_square_error
from tests.tolerances import (
    EXPERTS_BFLOAT16,
    EXPERTS_BFLOAT16_FEW_ROWS,
    EXPERTS_FLOAT32,
    EXPERTS_W8A8,
    EXPERTS_W8A8_STEPS,
)

ROWS = [1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 33, 64, 100, 300]


def rows_of(shape: Shape, count: int, top_k: int = 3) -> Routed:
    """Returns the ids from -1 to one beyond the last expert: some rows choose nothing held here, some an
    expert twice.
    """
    return random_rows(np.random.default_rng(count), count, shape.hidden, top_k, (-1, shape.experts + 1))


def run(engine: ExpertEngine, routed: Routed) -> np.ndarray:
    return engine.forward(0, routed.hidden_states, routed.topk_ids, routed.topk_weights)


def bfloat16_bound(rows: int) -> float:
    return EXPERTS_BFLOAT16 if rows >= 30 else EXPERTS_BFLOAT16_FEW_ROWS


def narrowed(routed: Routed) -> tuple[Routed, np.ndarray]:
    """Returns the request with rows rounded to bfloat16, and their bits."""
    bits = to_bfloat16(routed.hidden_states)
    return Routed(from_bfloat16(bits), routed.topk_ids, routed.topk_weights), bits


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("hidden", [128, 100])  # used in place, or copied and padded
def test_any_number_of_rows(rows: int, hidden: int) -> None:
    """float32 rows are exact; bfloat16 rows cost the rounding of the activation at most."""
    shape = Shape(hidden, 72, 5, "int4_g32", "bfloat16")
    engine = shape.engine(num_threads=3)
    routed = rows_of(shape, rows)
    assert relative_error(run(engine, routed), packed_golden(engine, shape, routed)) <= EXPERTS_FLOAT32
    narrow, bits = narrowed(routed)
    output = engine.forward(0, bits, routed.topk_ids, routed.topk_weights)
    wanted = packed_golden(engine, shape, narrow)
    assert root_mean_square_error(output, wanted) <= bfloat16_bound(rows)


def placed(values: np.ndarray, offset: int) -> np.ndarray:
    """Returns a copy that begins `offset` bytes after a 64-byte boundary."""
    raw = np.empty(values.nbytes + 128, np.uint8)
    begin = -raw.ctypes.data % 64 + offset
    copy = raw[begin : begin + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[:] = values
    return copy


@pytest.mark.parametrize("rows", [1, 2, 7, 30, 90])
@pytest.mark.parametrize(
    "hidden", [192, 1024]
)  # 1024: copied for many rows, which would collide in the cache
def test_rows_in_place(rows: int, hidden: int) -> None:
    """Rows that are aligned and need no padding are used where they lie, with the same result."""
    shape = Shape(hidden, 32, 3, "bfloat16", "bfloat16")
    engine = shape.engine(num_threads=2)
    routed = rows_of(shape, rows)
    for values in (routed.hidden_states, narrowed(routed)[1]):
        results = [
            engine.forward(0, placed(values, offset), routed.topk_ids, routed.topk_weights)
            for offset in (0, 16)
        ]
        np.testing.assert_array_equal(*results)
    assert relative_error(run(engine, routed), packed_golden(engine, shape, routed)) <= EXPERTS_FLOAT32


@pytest.mark.parametrize("rows", [1, 3, 40, 300])
def test_float16_rows(rows: int) -> None:
    """float16 rows are widened exactly."""
    shape = Shape(96, 40, 4, "fp8_channel", "float32")
    engine = shape.engine(num_threads=2)
    routed = rows_of(shape, rows)
    halves = routed.hidden_states.astype(np.float16)
    wide = Routed(halves.astype(np.float32), routed.topk_ids, routed.topk_weights)
    output = engine.forward(0, halves, routed.topk_ids, routed.topk_weights)
    np.testing.assert_array_equal(output, run(engine, wide))
    assert relative_error(output, packed_golden(engine, shape, wide)) <= EXPERTS_FLOAT32


@pytest.mark.parametrize("rows", ROWS)
def test_quantised_rows(rows: int) -> None:
    """W8A8 computes with rows and activations rounded to their 127 steps, and with nothing coarser.

    Few activations are quantised by each thread, many in a phase of their own: one result.
    """
    shape = Shape(200, 120, 5, "int8_w8a8", "int8_w8a8")
    engine = shape.engine(num_threads=2)
    routed = rows_of(shape, rows)
    output = run(engine, routed)
    stepped = packed_golden(engine, shape, routed, quantised)
    assert root_mean_square_error(output, stepped) <= EXPERTS_W8A8_STEPS
    assert root_mean_square_error(output, packed_golden(engine, shape, routed)) <= EXPERTS_W8A8
    narrow, bits = narrowed(routed)
    from_bits = engine.forward(0, bits, routed.topk_ids, routed.topk_weights)
    np.testing.assert_array_equal(from_bits, run(engine, narrow))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "activation", ["silu", "silu_clamped", "gpt_oss", "relu2", "gelu_tanh", "clamped_silu"]
)
def test_activations_and_biases(activation: str, has_bias: bool) -> None:
    """Every activation, its clamps reached, with and without biases of all three matrices."""
    shape = Shape(64, 50, 4, "float32", "int8", activation, has_bias, alpha=1.3, limit=0.75)
    engine = shape.engine(num_threads=2)
    for rows in (1, 40):
        routed = rows_of(shape, rows)
        assert relative_error(run(engine, routed), packed_golden(engine, shape, routed)) <= EXPERTS_FLOAT32
        narrow, bits = narrowed(routed)
        output = engine.forward(0, bits, routed.topk_ids, routed.topk_weights)
        assert root_mean_square_error(output, packed_golden(engine, shape, narrow)) <= bfloat16_bound(rows)


def test_clamps_per_layer() -> None:
    """Each layer has the clamp it was given; an infinite one is none, bit by bit."""

    def engine(activation: str, limit: Any) -> ExpertEngine:
        made = ExpertEngine(
            64, 50, 4, 3, weight_format="float32", activation=activation, limit=limit, num_threads=2
        )
        for layer in range(3):
            testing.fill_random(made.backend, layer, 1)
        return made

    clamped, plain = engine("silu_clamped", [np.inf, 0.1, 0.4]), engine("silu", 7.0)
    shape = Shape(64, 50, 4, "float32", "float32", "silu_clamped")
    routed = rows_of(shape, 9)

    def run_layer(made: ExpertEngine, layer: int) -> Any:
        return made.forward(layer, routed.hidden_states, routed.topk_ids, routed.topk_weights)

    np.testing.assert_array_equal(run_layer(clamped, 0), run_layer(plain, 0))
    for layer, limit in ((1, 0.1), (2, 0.4)):
        golden = packed_golden(clamped, replace(shape, limit=limit), routed)
        assert relative_error(run_layer(clamped, layer), golden) <= EXPERTS_FLOAT32
        assert relative_error(run_layer(plain, layer), golden) > 0.01


@pytest.mark.parametrize(
    ("gate_up", "down"), [("int8_w8a8", "bfloat16"), ("mxfp4", "int8_w8a8"), ("fp8_block", "nvfp4")]
)
def test_mixed_formats(gate_up: str, down: str) -> None:
    """gate and up in one format and down in another, with rows of different types between them."""
    shape = Shape(256, 144, 3, gate_up, down)
    engine = shape.engine(num_threads=2)
    routed = rows_of(shape, 20)
    bound = EXPERTS_W8A8 if "int8_w8a8" in (gate_up, down) else EXPERTS_FLOAT32
    assert root_mean_square_error(run(engine, routed), packed_golden(engine, shape, routed)) <= bound


# With what rows are quantised for, what has planes, what is widened and what has mins.
APART = {
    "iq2_xxs_grid_products+int6_g16_products": "iq3_s_grid_products",
    "mxfp4+bfloat16": "int8_w8a8",
    "int4_g32+int8_g32_f16": "int4_g32",
    "fp8_block+int4_g32_mins_products": "nvfp4",
}


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("gate_up", APART)
def test_gate_and_up_of_different_formats(gate_up: str, isa: Isa) -> None:
    """Each keeps its own, whatever rows its kernels take; sizes with padding, with biases and without."""
    has_bias = "mxfp4" in gate_up
    activation = "gpt_oss" if has_bias else "silu"
    shape = Shape(200, 72, 4, gate_up, APART[gate_up], activation, has_bias)
    engine = shape.engine(num_threads=2, isa=isa)
    engine.calibrate()
    names = set(zip(("gate", "up"), split_gate_up(gate_up), strict=True)) | {("down", shape.down)}
    assert {(row.matrix, row.format) for row in engine.plan()} == names
    w8a8 = EXPERTS_W8A8 if "w8a8" in shape.down else 0.0
    for rows in (1, 5, 40):
        routed = rows_of(shape, rows)
        wanted = packed_golden(engine, shape, routed)
        assert root_mean_square_error(run(engine, routed), wanted) <= max(EXPERTS_FLOAT32, w8a8)
        narrow, bits = narrowed(routed)
        output = engine.forward(0, bits, routed.topk_ids, routed.topk_weights)
        bound = max(bfloat16_bound(rows), w8a8)
        assert root_mean_square_error(output, packed_golden(engine, shape, narrow)) <= bound


def test_gate_and_up_have_rows_that_serve_both() -> None:
    """A kernel that computes gate's format alone, from rows in bfloat16, has up take float32 ones alone."""
    shape = Shape(192, 96, 4, "int4_g32+int8_g32_f16", "bfloat16")
    of_gate, of_up = (set(testing.gemms_for(name, "bfloat16")) for name in split_gate_up(shape.gate_up))
    routed = rows_of(shape, 40)
    narrow, bits = narrowed(routed)
    for kernel in sorted(of_gate ^ of_up):
        engine = shape.engine(num_threads=2, kernel=testing.gemm_kernel(kernel))
        output = engine.forward(0, bits, routed.topk_ids, routed.topk_weights)
        assert root_mean_square_error(output, packed_golden(engine, shape, narrow)) <= bfloat16_bound(40)
    for formats, said in (
        ("int8_w8a8+int4_g32", "both need the same rows"),
        ("int4_g32_ordered+int8_g32", "an order serves both"),
    ):
        with pytest.raises(ValueError, match=said):
            Shape(64, 32, 2, formats, "int8").empty_engine(num_threads=1)


def test_formats_per_layer() -> None:
    """Each layer has the formats it was given, and its own memory."""
    engine = ExpertEngine(
        64, 32, 2, 3, weight_format=["int4_g32", "bfloat16", "int4_g32"], down_format="int8", num_threads=1
    )
    for layer in range(3):
        testing.fill_random(engine.backend, layer, layer)
    routed = random_rows(np.random.default_rng(0), 7, 64, 2, (0, 2))
    sizes = [engine.packed_expert(layer, 0).size for layer in range(3)]
    assert sizes[0] == sizes[2] < sizes[1]
    for layer, gate_up in enumerate(("int4_g32", "bfloat16", "int4_g32")):
        alone = ExpertEngine(64, 32, 2, 1, weight_format=gate_up, down_format="int8", num_threads=1)
        testing.fill_random(alone.backend, 0, layer)
        output = engine.forward(layer, routed.hidden_states, routed.topk_ids, routed.topk_weights)
        np.testing.assert_array_equal(output, run(alone, routed))
    assert {(row.matrix, row.format) for row in engine.plan()} == {
        ("gate_up", "int4_g32"),
        ("gate_up", "bfloat16"),
        ("down", "int8"),
    }


def test_output_argument() -> None:
    """forward writes to the array it is given, all of it, and refuses one that does not fit."""
    shape = Shape(64, 32, 2, "bfloat16", "bfloat16")
    engine = shape.engine(num_threads=1)
    routed = rows_of(shape, 5)
    arguments = (0, routed.hidden_states, routed.topk_ids, routed.topk_weights)
    output = np.full((5, 64), np.nan, np.float32)
    assert engine.forward(*arguments, output) is output
    np.testing.assert_array_equal(output, engine.forward(*arguments))
    for wrong in (output[:4], output.astype(np.float64), output.T):
        with pytest.raises(ValueError, match="output"):
            engine.forward(*arguments, wrong)
    output.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        engine.forward(*arguments, output)


@pytest.mark.parametrize("rows", [3, 200])
def test_nonfinite_values_are_counted(rows: int) -> None:
    """NaN and infinities of inputs and outputs are counted, in every type of request, and handed on."""
    shape = Shape(100, 40, 4, "bfloat16", "int8")
    routed = random_rows(np.random.default_rng(0), rows, 100, 2, (0, 4))
    routed.hidden_states[1, [0, 7, 99]] = np.nan, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        narrow = routed.hidden_states.view(np.uint32) >> 16
        requests = routed.hidden_states, narrow.astype(np.uint16), routed.hidden_states.astype(np.float16)
    for rows_as in requests:
        engine = shape.engine(num_threads=2)
        output = engine.forward(0, rows_as, routed.topk_ids, routed.topk_weights)
        assert np.isnan(output[1]).all()
        assert np.isfinite(np.delete(output, 1, axis=0)).all()
        assert (engine.stats().nonfinite_inputs, engine.stats().nonfinite_outputs) == (3, 100)
    quantised_engine = Shape(100, 40, 4, "int8_w8a8", "int8_w8a8").engine(num_threads=2)
    output = run(quantised_engine, routed)
    assert np.isnan(output[1]).all()
    assert np.isfinite(np.delete(output, 1, axis=0)).all()
