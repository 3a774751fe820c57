"""A row's bits depend on that row alone: not on its neighbours, its position, the number of threads or the
call it came in. Greedy decoding relies on it (batch 1 = batch N, preempted = not)."""

from __future__ import annotations

import numpy as np
import pytest

from moebius.kernels import ExpertEngine, Isa, float32_isa, supported_isas
from tests.helpers.moe_golden import (
    Routed,
    from_bfloat16,
    load_layer,
    random_expert,
    random_rows,
    to_bfloat16,
)

ISAS: tuple[Isa, ...] = supported_isas()  # type: ignore[assignment]
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 100, 52, 6, 4


def engine_of(isa: Isa, weight_format: str, num_threads: int) -> ExpertEngine:
    rng = np.random.default_rng(7)
    engine = ExpertEngine(
        HIDDEN,
        INTERMEDIATE,
        EXPERTS,
        1,
        weight_format=weight_format,  # type: ignore[arg-type]
        num_threads=num_threads,
        isa=isa,
    )
    load_layer(engine, 0, {e: random_expert(rng, HIDDEN, INTERMEDIATE) for e in range(EXPERTS)})
    return engine


def run(engine: ExpertEngine, routed: Routed, rows: slice | list[int]) -> np.ndarray:
    return engine.forward(0, routed.hidden_states[rows], routed.topk_ids[rows], routed.topk_weights[rows])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("weight_format", ["float32", "bfloat16"])
def test_batch_of_any_size_equals_single_rows(isa: Isa, weight_format: str) -> None:
    """Every batch size up to 40, and any order of rows, gives each row the bits it has alone."""
    engine = engine_of(isa, weight_format, 2)
    routed = random_rows(np.random.default_rng(0), 40, HIDDEN, TOP_K, (-1, EXPERTS))
    alone = np.concatenate([run(engine, routed, slice(i, i + 1)) for i in range(40)])
    for size in range(1, 41):
        np.testing.assert_array_equal(run(engine, routed, slice(0, size)), alone[:size])
    order = list(np.random.default_rng(1).permutation(40))
    np.testing.assert_array_equal(run(engine, routed, order), alone[order])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("weight_format", ["float32", "bfloat16"])
def test_thread_count_does_not_matter(isa: Isa, weight_format: str) -> None:
    """One, two, three and seven threads give the same bits."""
    routed = random_rows(np.random.default_rng(0), 19, HIDDEN, TOP_K, (0, EXPERTS))
    results = [run(engine_of(isa, weight_format, threads), routed, slice(None)) for threads in (1, 2, 3, 7)]
    assert np.abs(results[0]).max() > 0
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("isa", ISAS)
def test_bad_neighbour_stays_alone(isa: Isa) -> None:
    """A row of NaN is counted and handed on; no other row changes."""
    engine = engine_of(isa, "float32", 2)
    routed = random_rows(np.random.default_rng(0), 9, HIDDEN, TOP_K, (0, EXPERTS))
    before = run(engine, routed, slice(None))
    assert engine.stats().nonfinite_outputs == 0
    routed.hidden_states[4, 3] = np.nan
    after = run(engine, routed, slice(None))
    assert np.isnan(after[4]).all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    np.testing.assert_array_equal(after[others], before[others])
    assert engine.stats().nonfinite_outputs == HIDDEN


def test_exact_level_keeps_bfloat16_rows_apart() -> None:
    """`batch_invariant_experts` forces: bfloat16 rows, calibrated, are their float32 selves in any batch."""
    engine = ExpertEngine(
        HIDDEN, INTERMEDIATE, EXPERTS, 1, weight_format="bfloat16", num_threads=2, isa=float32_isa()
    )
    rng = np.random.default_rng(7)
    load_layer(engine, 0, {e: random_expert(rng, HIDDEN, INTERMEDIATE) for e in range(EXPERTS)})
    engine.calibrate()
    routed = random_rows(np.random.default_rng(0), 33, HIDDEN, TOP_K, (0, EXPERTS))
    bits = to_bfloat16(routed.hidden_states)
    wanted = engine.forward(0, from_bfloat16(bits), routed.topk_ids, routed.topk_weights)
    assert np.abs(wanted).max() > 0
    for size in (1, 7, 33):
        ids, weights = routed.topk_ids[:size], routed.topk_weights[:size]
        np.testing.assert_array_equal(engine.forward(0, bits[:size], ids, weights), wanted[:size])
