"""Every instruction set computes routed experts right, for every shape: <= 1e-5 of a float64 reference.

bfloat16 weights keep the same bound against the rounded weights; the rounding itself, which no kernel
can undo, costs about 3e-3 of random weights' result and is bounded too."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.kernels import ExpertEngine, Isa, supported_isas
from tests.helpers.moe_golden import (
    from_bfloat16,
    golden,
    load_layer,
    random_expert,
    random_rows,
    relative_error,
    to_bfloat16,
)

ISAS: tuple[Isa, ...] = supported_isas()  # type: ignore[assignment]


@pytest.mark.parametrize("isa", ISAS)
@settings(deadline=None, database=None)
@given(data=st.data())
def test_any_shape_matches_float64_reference(isa: Isa, data: st.DataObject) -> None:
    """Odd widths, one expert, no rows, ids of other servers and -1, any thread count."""
    hidden = data.draw(st.integers(1, 150))
    intermediate = data.draw(st.integers(1, 70))
    count = data.draw(st.integers(1, 5))
    begin = data.draw(st.sampled_from([0, 3]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    experts = {begin + e: random_expert(rng, hidden, intermediate) for e in range(count)}
    routed = random_rows(rng, data.draw(st.integers(0, 40)), hidden, data.draw(st.integers(1, 4)), (-1, 9))
    engine = ExpertEngine(
        hidden,
        intermediate,
        count,
        1,
        expert_begin=begin,
        weight_format="float32",
        num_threads=data.draw(st.integers(1, 3)),
        isa=isa,
    )
    load_layer(engine, 0, experts)
    output = engine.forward(0, routed.hidden_states, routed.topk_ids, routed.topk_weights)
    assert output.shape == routed.hidden_states.shape
    assert output.dtype == np.float32
    assert relative_error(output, golden(routed, experts)) <= 1e-5


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 13, 17, 64, 512])
def test_all_rows_on_one_expert(isa: Isa, rows: int) -> None:
    """Every size of row block is right, and many blocks in a row are."""
    rng = np.random.default_rng(rows)
    experts = {e: random_expert(rng, 72, 40) for e in range(2)}
    routed = random_rows(rng, rows, 72, 1, (1, 2))
    engine = ExpertEngine(72, 40, 2, 1, weight_format="float32", num_threads=2, isa=isa)
    load_layer(engine, 0, experts)
    output = engine.forward(0, routed.hidden_states, routed.topk_ids, routed.topk_weights)
    assert relative_error(output, golden(routed, experts)) <= 1e-5


@pytest.mark.parametrize("isa", ISAS)
def test_wide_layer(isa: Isa) -> None:
    """Long sums keep their accuracy: hidden size 4096."""
    rng = np.random.default_rng(1)
    experts = {0: random_expert(rng, 4096, 96)}
    routed = random_rows(rng, 3, 4096, 1, (0, 1))
    engine = ExpertEngine(4096, 96, 1, 1, weight_format="float32", num_threads=2, isa=isa)
    load_layer(engine, 0, experts)
    output = engine.forward(0, routed.hidden_states, routed.topk_ids, routed.topk_weights)
    assert relative_error(output, golden(routed, experts)) <= 1e-5


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("source", ["float32", "bfloat16"])
def test_bfloat16_weights(isa: Isa, source: str) -> None:
    """Packing as bfloat16 costs only the rounding of the weights, done to nearest even, whatever was
    loaded.
    """
    rng = np.random.default_rng(2)
    exact = {e: random_expert(rng, 100, 52) for e in range(4)}
    rounded = {e: tuple(from_bfloat16(to_bfloat16(m)) for m in ms) for e, ms in exact.items()}
    routed = random_rows(rng, 21, 100, 3, (0, 4))
    engine = ExpertEngine(100, 52, 4, 1, weight_format="bfloat16", num_threads=2, isa=isa)
    for e, matrices in exact.items():
        gate, up, down = (m if source == "float32" else to_bfloat16(m) for m in matrices)
        engine.load_expert(0, e, gate, up, down)
    output = engine.forward(0, routed.hidden_states, routed.topk_ids, routed.topk_weights)
    assert relative_error(output, golden(routed, rounded)) <= 1e-5  # type: ignore[arg-type]
    assert relative_error(output, golden(routed, exact)) <= 5e-3


@pytest.mark.parametrize("isa", ISAS)
def test_bfloat16_rows_and_checkpoint(isa: Isa) -> None:
    """bfloat16 hidden states, and bfloat16 weights widened to float32, are exact conversions."""
    rng = np.random.default_rng(3)
    exact = {e: random_expert(rng, 64, 24) for e in range(2)}
    rounded = {e: tuple(from_bfloat16(to_bfloat16(m)) for m in ms) for e, ms in exact.items()}
    routed = random_rows(rng, 5, 64, 2, (0, 2))
    bits = to_bfloat16(routed.hidden_states)
    narrow = ExpertEngine(64, 24, 2, 1, weight_format="float32", num_threads=1, isa=isa)
    wide = ExpertEngine(64, 24, 2, 1, weight_format="float32", num_threads=1, isa=isa)
    for e in exact:
        gate, up, down = (to_bfloat16(m) for m in exact[e])
        narrow.load_expert(0, e, gate, up, down)
        wide.load_expert(0, e, *rounded[e])
    from_bits = narrow.forward(0, bits, routed.topk_ids, routed.topk_weights)
    from_floats = wide.forward(0, from_bfloat16(bits), routed.topk_ids, routed.topk_weights)
    np.testing.assert_array_equal(from_bits, from_floats)
    assert np.abs(from_bits).max() > 0


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scale", [1e-30, 30.0, 200.0, 1e6])
def test_silu_over_the_whole_range(isa: Isa, scale: float) -> None:
    """Gates far beyond exp's range saturate to 0 and to themselves, without NaN or infinity."""
    gates = np.linspace(-scale, scale, 64, dtype=np.float32)
    one = np.ones((64, 1), np.float32)
    engine = ExpertEngine(1, 64, 1, 1, weight_format="float32", num_threads=1, isa=isa)
    engine.load_expert(0, 0, gates[:, None], one, np.ones((1, 64), np.float32))
    output = engine.forward(
        0, np.ones((1, 1), np.float32), np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)
    )
    wide = gates.astype(np.float64)
    wanted = np.sum(wide * np.where(wide < -700, 0.0, 1 / (1 + np.exp(-np.clip(wide, -700, None)))))
    assert abs(float(output[0, 0]) - wanted) <= 1e-5 * np.abs(wide).max()
    assert engine.stats().nonfinite_outputs == 0
