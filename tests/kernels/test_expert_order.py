"""Invariant: experts packed with sorted columns compute what their checkpoint's order of columns means.

GPTQ's act-order: gate's and up's columns are sorted by group, and rows meet them in the order that each
packed expert says. Nothing of the goldens passes through C++.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moebius import _kernels
from moebius import _kernels_testing as testing
from moebius.kernels import supported_isas
from moebius.kernels.source import SourceMatrix
from moebius.kernels.weight_formats import expert_layout, weight_format
from tests.helpers.moe_golden import Routed, from_bfloat16, to_bfloat16
from tests.helpers.numpy_unpack import unpack_expert
from tests.helpers.packed_experts import Shape
from tests.helpers.quantised_sources import ENCODERS, Quantised, random_weights
from tests.helpers.weight_golden import (
    GoldenExpert,
    golden_experts,
    golden_layer,
    largest_row_error,
    load_golden,
    row_norms,
)
from tests.tolerances import EXPERTS_FLOAT32, ROUNDING_SPREADS

ENCODED = ("gptq_int4_g32", "gptq_int4_g64_symmetric", "int8_g128")
EMULATED = [name for name in testing.gemm_names() if name.startswith("amx_emulated_bfloat16")]


def ordered_experts(encoder: str, shape: Shape) -> list[GoldenExpert]:
    """Returns experts of the shape, whose gate and up have one random order for each expert."""
    experts = []
    for number, expert in enumerate(golden_experts(encoder, shape, seed=7)):
        order = np.random.default_rng(number).permutation(shape.hidden).astype(np.uint32)
        gate = None if expert.gate is None else with_order(expert.gate, order)
        experts.append(replace(expert, gate=gate, up=with_order(expert.up, order)))
    return experts


def with_order(matrix: Quantised, order: np.ndarray) -> Quantised:
    """Returns the same columns, sorted from those of a checkpoint: column c is its column order[c]."""
    return replace(
        matrix,
        source=replace(matrix.source, order=order),
        weights=np.ascontiguousarray(matrix.weights[:, np.argsort(order)]),
    )


def shape_of(encoder: str, activation: str = "silu") -> Shape:
    """Returns the widths that are multiples of nothing."""
    name = ENCODERS[encoder](np.ones((8, 32), np.float32)).format
    return Shape(200, 72, 5, f"{name}_ordered", name, activation, limit=1.5)


def request(rows: int, shape: Shape) -> Routed:
    """Some choices belong to no server; a row has several experts."""
    rng = np.random.default_rng(rows)
    hidden = from_bfloat16(to_bfloat16(rng.standard_normal((rows, shape.hidden), dtype=np.float32)))
    ids = rng.integers(-1, shape.experts, (rows, 3)).astype(np.int32)
    return Routed(hidden, ids, rng.random((rows, 3), dtype=np.float32))


@pytest.mark.parametrize("level", [*supported_isas(), *EMULATED])
@pytest.mark.parametrize("encoder", ENCODED)
def test_rows_meet_columns_in_each_experts_order(encoder: str, level: str) -> None:
    """At every level, with one row, a few, and more than rows are kept prepared; with and without a gate."""
    options = {"kernel": testing.gemm_kernel(level)} if level in EMULATED else {"isa": level}
    for activation in ("silu", "relu2"):
        shape = shape_of(encoder, activation)
        experts = ordered_experts(encoder, shape)
        engine = shape.empty_engine(num_threads=2, **options)
        load_golden(engine, experts, shape)
        for rows in (1, 3, 40, 300):
            routed = request(rows, shape)
            golden = golden_layer(experts, shape, routed)
            arguments = (routed.topk_ids, routed.topk_weights)
            exact = engine.forward(0, routed.hidden_states, *arguments)
            assert largest_row_error(exact, golden.output) <= EXPERTS_FLOAT32
            rounded = engine.forward(0, to_bfloat16(routed.hidden_states), *arguments)
            allowed = ROUNDING_SPREADS * golden.bfloat16_rounding
            errors = row_norms(rounded - golden.output)
            assert (errors <= allowed + EXPERTS_FLOAT32 * row_norms(golden.output)).all()


def test_the_order_lies_behind_the_matrices() -> None:
    """The order lies where kernels/format/panel_layout.h says."""
    shape = shape_of("gptq_int4_g32")
    expert = ordered_experts("gptq_int4_g32", shape)[2]
    assert expert.gate is not None
    packed, error, _ = _kernels.pack_expert(
        shape.gate_up, shape.down, expert.gate.source, expert.up.source, expert.down.source, parts=3
    )
    assert error == 0
    layout = expert_layout(shape.gate_up, shape.down, shape.hidden, shape.intermediate)
    plain = expert_layout(shape.down, shape.down, shape.hidden, shape.intermediate)
    assert layout.gate_up.ordered
    assert not layout.down.ordered
    assert layout.order_offset == plain.expert_bytes
    assert layout.expert_bytes == plain.expert_bytes + 832  # 200 words, in whole lines
    order = packed[layout.order_offset :].view(np.uint32)[: shape.hidden]
    np.testing.assert_array_equal(order, expert.up.source.order)
    for found, matrix in zip(unpack_expert(layout, packed), (expert.gate, expert.up), strict=False):
        assert found is not None
        np.testing.assert_array_equal(found, matrix.weights)


def test_experts_without_an_order_keep_that_of_their_columns() -> None:
    """A layer may have some experts whose columns were never sorted."""
    shape = shape_of("gptq_int4_g32")
    experts = golden_experts("gptq_int4_g32", shape, seed=1)
    engine = shape.empty_engine(num_threads=1)
    load_golden(engine, experts, shape)
    routed = request(4, shape)
    output = engine.forward(0, routed.hidden_states, routed.topk_ids, routed.topk_weights)
    assert largest_row_error(output, golden_layer(experts, shape, routed).output) <= EXPERTS_FLOAT32


def matrices() -> tuple[SourceMatrix, SourceMatrix]:
    """gate or up, and down."""
    encode = ENCODERS["gptq_int4_g32"]
    rng = np.random.default_rng(0)
    return encode(random_weights(rng, 16, 64)).source, encode(random_weights(rng, 64, 16)).source


@pytest.mark.parametrize(
    ("gate", "up", "formats", "said"),
    [
        (range(64), range(63, -1, -1), ("int4_g32_zeros_f16_ordered", ""), "different orders"),
        (range(64), None, ("int4_g32_zeros_f16_ordered", ""), "different orders"),
        ([0] * 64, [0] * 64, ("int4_g32_zeros_f16_ordered", ""), "each of the columns once"),
        (range(64), range(64), ("int4_g32_zeros_f16", ""), "the columns are sorted"),
        (range(64), range(64), ("int4_g32_zeros_f16_ordered", "_ordered"), "allowed for gate and up only"),
    ],
)
def test_orders_that_can_not_be_kept(gate: object, up: object, formats: tuple[str, str], said: str) -> None:
    """Nothing is packed in a wrong order, and nothing sorted is requantised as if it were not."""
    source, down = matrices()

    def ordered(order: object) -> SourceMatrix:
        return source if order is None else replace(source, order=np.array(order, np.uint32))

    with pytest.raises(ValueError, match=said):
        _kernels.pack_expert(formats[0], f"int4_g32_zeros_f16{formats[1]}", ordered(gate), ordered(up), down)
    with pytest.raises(ValueError, match="order: it must have shape"):
        _kernels.pack_matrix("int4_g32_zeros_f16", replace(source, order=np.arange(3, dtype=np.uint32)))
    with pytest.raises(ValueError, match="sorted"):
        _kernels.dequantise_matrix(ordered(range(64)))


@pytest.mark.parametrize(
    "name", ["int8_ordered", "mxfp4_ordered", "fp8_block_ordered", "int4_g32_ordered_ordered"]
)
def test_formats_that_have_no_order(name: str) -> None:
    """Integer codes with scales of groups are sorted, once; nothing else is."""
    with pytest.raises(ValueError, match="order"):
        _kernels.panel_layout(name, 64)


def test_python_reads_ordered_formats() -> None:
    """They are those without an order but for their name."""
    found, plain = weight_format("int4_g64_ordered"), weight_format("int4_g64")
    assert (found.ordered, plain.ordered) == (True, False)
    assert replace(found, name=plain.name, ordered=False) == plain
