"""Guards what is noted of expert threads on demand: whole calls, true times, nothing while it is off."""

from __future__ import annotations

import time

import numpy as np
import pytest

from moebius.kernels import SPAN_FIELDS, SPAN_KINDS, ExpertEngine
from tests.helpers.moe_golden import load_layer, random_expert

HIDDEN, INTERMEDIATE, THREADS = 64, 96, 2
ROWS = np.array([[2, 3], [3, 5], [2, -1]], np.int32)


@pytest.fixture(scope="module")
def engine() -> ExpertEngine:
    rng = np.random.default_rng(0)
    engine = ExpertEngine(
        HIDDEN, INTERMEDIATE, 4, 3, expert_begin=2, weight_format="int8", num_threads=THREADS
    )
    load_layer(engine, 1, {expert: random_expert(rng, HIDDEN, INTERMEDIATE) for expert in range(2, 6)})
    return engine


def forward(engine: ExpertEngine) -> np.ndarray:
    hidden = np.random.default_rng(1).standard_normal((len(ROWS), HIDDEN), dtype=np.float32)
    return engine.forward(1, hidden, ROWS, np.ones(ROWS.shape, np.float32))


def columns(spans: np.ndarray) -> dict[str, np.ndarray]:
    return dict(zip(SPAN_FIELDS, spans.T, strict=True))


def test_spans_of_calls_and_tasks(engine: ExpertEngine) -> None:
    """Each chosen expert has its rows and its global id, each span lies within its call, clocks are ours."""
    before = time.monotonic_ns()
    engine.start_trace(1000)
    forward(engine)
    forward(engine)
    spans, dropped = engine.stop_trace()
    after = time.monotonic_ns()
    found = columns(spans)
    assert dropped == 0
    assert set(found["layer"]) == {1}
    assert (before <= found["begin_ns"]).all()
    assert (found["begin_ns"] <= found["end_ns"]).all()
    assert (found["end_ns"] <= after).all()
    kinds = np.array(SPAN_KINDS)[found["kind"]]
    calls = spans[kinds == "call"]
    assert (calls[:, :5] == [0, THREADS, 1, -1, 3]).all()
    assert len(calls) == 2
    gate_up = kinds == "gate_up"
    assert {*zip(found["expert"][gate_up], found["rows"][gate_up], strict=True)} == {(2, 2), (3, 2), (5, 1)}
    assert "down" in kinds
    tasks = spans[kinds != "call"]
    assert (tasks[:, 1] < THREADS).all()
    inside = [((calls[:, 5] <= begin) & (end <= calls[:, 6])).any() for begin, end in tasks[:, 5:]]
    assert all(inside)


def test_nothing_is_noted_while_it_is_off(engine: ExpertEngine) -> None:
    """Results are the same bits, and what ran before the start or after the end is no part of it."""
    plain = forward(engine)
    engine.start_trace(1000)
    with pytest.raises(ValueError, match="traced already"):
        engine.start_trace(1000)
    assert np.array_equal(forward(engine), plain)
    once = len(engine.stop_trace()[0])
    assert once > 0
    forward(engine)
    spans, dropped = engine.stop_trace()
    assert (spans.shape, dropped) == ((0, len(SPAN_FIELDS)), 0)
    engine.start_trace(1000)
    assert engine.stop_trace()[0].shape == (0, len(SPAN_FIELDS))


def test_bound_keeps_the_first_and_counts_the_others(engine: ExpertEngine) -> None:
    """Memory is bounded: of each thread, and of the calls, a limited number is kept."""
    engine.start_trace(1)
    for _ in range(5):
        forward(engine)
    spans, dropped = engine.stop_trace()
    found = columns(spans)
    assert np.bincount(found["worker"]).max() == 1
    assert dropped >= 4
    calls = found["kind"] == 0
    assert found["begin_ns"][calls] <= found["begin_ns"].min()


def test_time_is_counted_by_layer(engine: ExpertEngine) -> None:
    """All of the engine's time belongs to the layers that were computed."""
    forward(engine)
    stats = engine.stats()
    by_layer = stats.layer_busy_nanoseconds
    assert by_layer[0] == by_layer[2] == 0
    assert int(by_layer[1]) * 1e-9 == pytest.approx(stats.busy_seconds, rel=1e-6)
