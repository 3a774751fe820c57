"""Invariant: what serving shows corrects what was taken to be true, whatever that was, and spoils nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpu_service.core.interface import Emission, NullObserver
from gpu_service.core.results import StepResult
from gpu_service.core.step import Batch
from gpu_service.engine.step_check import StepCheck, StepFacts
from gpu_service.experts.costs import CostCurve, Estimate, ExpertCosts, LayerCosts
from gpu_service.experts.streaming.plan import SHARES
from gpu_service.experts.streaming.share import ShareChooser

EXPERTS, TOP_K, LAYERS = 128, 8, 48


def curve(per_row: float) -> CostCurve:
    """In proportion to rows."""
    return CostCurve.of([(100, 100 * per_row), (200, 200 * per_row)])


# Qwen3-30B-A3B in 4 bits on the reference host: 340 MB a layer over 55 GB/s, 1100 rows a second of 48 layers.
COSTS = LayerCosts(
    copy=0.0062,
    cpu=CostCurve.of([(16, 0.0018), (64, 0.0023), (256, 0.0055), (512, 0.0097)]),
    gpu=curve(0.3e-6),
)
LAYER_BYTES = COSTS.copy * 55e9


def test_link_and_servers_together_beat_each_alone() -> None:
    """Both share 512 rows; at 4096 the link has nearly all; few rows stay on the servers."""
    share = COSTS.best_share(512)
    assert 0.55 < share / SHARES < 0.75
    assert COSTS.seconds(512, share) < 0.7 * min(COSTS.seconds(512, 0), COSTS.seconds(512, SHARES))
    assert COSTS.best_share(4096) / SHARES > 0.9
    assert COSTS.best_share(16) == 0


@given(rows=st.integers(1, 60000), least=st.integers(0, 1))
def test_the_choice_is_near_the_best(rows: int, least: int) -> None:
    """Within what simplicity may cost; never worse than all on the servers, where these may have all."""
    best = min(COSTS.seconds(rows, share) for share in range(least, SHARES + 1))
    chosen = COSTS.best_share(rows, least)
    assert least <= chosen <= SHARES
    assert COSTS.seconds(rows, chosen) * 0.63 <= best
    if least == 0:
        assert COSTS.seconds(rows, chosen) <= COSTS.seconds(rows, 0)


@example([(1, 0.3), (3, 0.3), (1000, 0.9652617318055764), (3000, 0.9652617318055764)])
@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(1e-6, 1.0)), min_size=1, unique_by=lambda p: p[0]))
def test_more_rows_never_cost_less(measured: list[tuple[int, float]]) -> None:
    found = CostCurve.of(measured)
    times = [found.at(rows) for rows in (1, 3, 10, 100, 1000, 5000, 20000, 60000)]
    assert times == sorted(times)


samples = st.floats(1e-9, 1e9)
anything = st.floats(allow_nan=True, allow_infinity=True)


@given(begin=samples, shown=st.lists(st.tuples(anything, st.floats(-1, 2)), max_size=30))
def test_estimates_stay_between_what_was_shown(begin: float, shown: list[tuple[float, float]]) -> None:
    """Estimates are never NaN, never 0 or below, never beyond all samples and the beginning,
    whatever comes.
    """
    estimate, seen = Estimate(begin), [begin]
    for sample, weight in shown:
        estimate = estimate.toward(sample, weight)
        seen += [sample] if math.isfinite(sample) and sample > 0 else []
        assert min(seen) <= estimate.value <= max(seen)


@given(begin=samples, truth=samples, weight=st.floats(0.02, 1.0))
def test_estimates_converge(begin: float, truth: float, weight: float) -> None:
    """Each sample after the first few brings it nearer by its weight, from any beginning."""
    estimate = Estimate(begin)
    off = abs(math.log(begin / truth))
    for _ in range(3):
        estimate = estimate.toward(truth, weight)
        assert abs(math.log(estimate.value / truth)) <= off + 1e-9
    for _ in range(400):
        off = abs(math.log(estimate.value / truth))
        estimate = estimate.toward(truth, weight)
        assert abs(math.log(estimate.value / truth)) <= (1 - weight) * off + 1e-9
    assert estimate.value == pytest.approx(truth, rel=0.05)


@given(truth=st.floats(1e-6, 1e3), outlier=samples, weight=st.floats(0.01, 1.0))
def test_one_sample_that_is_off_changes_nothing(truth: float, outlier: float, weight: float) -> None:
    """One sample among others that are alike changes nothing."""
    estimate = Estimate(truth)
    for sample in (truth, truth, outlier, truth, truth):
        estimate = estimate.toward(sample, weight)
    assert estimate.value == pytest.approx(truth)


@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("copied"), st.integers(0, 2**40), anything),
            st.tuples(st.just("served"), anything, anything, st.floats(0, 100)),
            st.tuples(
                st.just("observe"), st.integers(1, 9000), st.integers(0, SHARES), anything, anything, anything
            ),
            st.tuples(st.just("forget")),
        ),
        max_size=40,
    ),
    is_measured=st.booleans(),
)
def test_costs_are_usable_whatever_is_reported(events: list[tuple[object, ...]], is_measured: bool) -> None:
    """Clocks that stand still, run backwards or give nonsense: prices are positive, shares are shares."""
    costs = ExpertCosts(EXPERTS, TOP_K)
    if is_measured:
        costs.measured(COSTS, LAYER_BYTES)
    for name, *arguments in events:
        getattr(costs, str(name))(*arguments)
        assert math.isfinite(costs.link)
        assert costs.link > 0
        price, layer = costs.copy_price(10**6), costs.layer
        assert price is None or price > 0
        assert (layer is not None) is is_measured
        if layer is not None:
            assert 1 / 8 <= layer.cpu_scale <= 8
            assert 0 <= layer.best_share(512) <= SHARES
            assert math.isfinite(layer.seconds(512, 30))


def scaled(costs: LayerCosts, copy: float = 1.0, cpu: float = 1.0) -> LayerCosts:
    """Returns link and servers that take a number of times longer."""
    points = tuple((rows, cpu * seconds) for rows, seconds in costs.cpu.points)
    return replace(costs, copy=copy * costs.copy, cpu=CostCurve(points))


def measured(costs: LayerCosts, clock: Callable[[], float] = time.monotonic) -> ExpertCosts:
    """At the start."""
    found = ExpertCosts(EXPERTS, TOP_K, clock)
    found.measured(costs, LAYER_BYTES)
    return found


def now(costs: ExpertCosts) -> LayerCosts:
    """Returns what is known of a layer."""
    assert costs.layer is not None
    return costs.layer


def serve(costs: ExpertCosts, real: LayerCosts, rows: int, steps: int, other: float = 0.0) -> LayerCosts:
    """Returns what steps teach that take what `real` says and `other` seconds a layer after the servers'
    answers.
    """
    for _ in range(steps):
        share = now(costs).best_share(rows)
        link, servers, gpu = real.parts(rows, share)
        nbytes = LAYER_BYTES * share / SHARES
        costs.observe(rows, share, max(link, servers + other, gpu), link, nbytes)
    return now(costs)


@pytest.mark.parametrize(("copy_scale", "cpu_scale"), [(1.0, 2.0), (1.0, 0.6), (1.5, 1.0), (1.5, 0.7)])
@pytest.mark.parametrize("begin", [(1.0, 1.0), (1.5, 0.6), (0.5, 2.0)])
def test_serving_corrects_what_was_measured(
    begin: tuple[float, float], copy_scale: float, cpu_scale: float
) -> None:
    """Whichever of link and servers is faster or slower than measured: steps soon take nearly the best."""
    real = scaled(COSTS, copy_scale, cpu_scale)
    costs = serve(measured(scaled(COSTS, *begin)), real, 512, 40, other=0.0003)
    best = min(real.seconds(512, share) for share in range(SHARES + 1))
    assert real.seconds(512, costs.best_share(512)) < 1.12 * best
    assert costs.copy == pytest.approx(real.copy, rel=0.1)


@pytest.mark.parametrize("cpu_scale", [0.8, 1.3, 1.6])
@pytest.mark.parametrize("outliers", [0, 1])
def test_few_steps_are_enough(cpu_scale: float, outliers: int) -> None:
    """A user's second and third prompt is divided nearly as well as the hundredth, also when a kernel was
    compiled during the first."""
    real = scaled(COSTS, 1.06, cpu_scale)
    costs = measured(COSTS)
    for _ in range(outliers):
        costs.observe(512, 41, 30.0, 0.004, LAYER_BYTES * 41 / SHARES)
    found = serve(costs, real, 512, 4, other=0.0005)
    best = min(real.seconds(512, share) for share in range(SHARES + 1))
    assert real.seconds(512, found.best_share(512)) < 1.15 * best


def test_servers_that_were_slow_for_a_while_are_tried_again() -> None:
    """Once all was streamed because of them nothing else would ever show that they are fast again; prompts
    that are streamed anyway say nothing."""
    real = replace(COSTS, cpu=CostCurve.of([(16, 0.003), (512, 0.02)]))
    costs = measured(real)
    while now(costs).best_share(512) < SHARES:
        costs.observe(512, now(costs).best_share(512), 1.0, 0.001, LAYER_BYTES * 0.001 / COSTS.copy)
    slow = now(costs).cpu_scale
    assert slow > 1.5
    costs.observe(8192, SHARES, 0.0062, 0.0061, LAYER_BYTES)
    assert now(costs).cpu_scale == slow
    assert real.best_share(512) < SHARES
    found = serve(costs, real, 512, 60)
    assert found.best_share(512) == pytest.approx(real.best_share(512), abs=4)


def test_a_step_that_took_long_once_is_not_believed() -> None:
    """Kernels that are compiled at first use say nothing of later steps; an unknown time is none."""
    for seconds, copying in ((30.0, 0.004), (1e-6, 1e-6), (0.0, 0.0)):
        costs = measured(COSTS)
        costs.observe(512, 41, seconds, copying, LAYER_BYTES * 41 / SHARES)
        assert 0.7 < now(costs).cpu_scale < 1.4
        assert now(costs).copy == pytest.approx(COSTS.copy, rel=0.4)
    # Fewer rows than were measured.
    costs = measured(COSTS)
    costs.observe(3, 20, 0.0001, 0.0001, 0.0)
    assert now(costs).cpu_scale == 1.0


@pytest.mark.parametrize("cpu", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("copy", [0.2, 1.0, 5.0])
def test_falsified_measurements_are_corrected_within_a_minute(copy: float, cpu: float) -> None:
    """Link and servers five times too fast or too slow at the start: steps of prompts divide layers as they
    should after less than a minute, whatever was chosen first.
    """
    clock = Clock()
    costs = measured(scaled(COSTS, copy, cpu), clock)
    end = clock.now + 55.0
    chooser = ShareChooser("auto", None, LAYERS, costs)
    check = StepCheck(NullObserver(), costs, StepFacts(LAYERS, TOP_K), clock)
    pair = COSTS.cpu.expert_seconds(EXPERTS, TOP_K)
    while clock.now < end:
        # Some tokens are decoded between two prompts.
        for _ in range(20):
            costs.served(LAYERS * TOP_K, LAYERS * TOP_K * pair, 0.015)
        clock.now += 0.3
        share = chooser.share(512)
        link, servers, gpu = COSTS.parts(512, share)
        seconds = LAYERS * max(link, servers, gpu)
        clock.now += seconds
        if share:
            nbytes = round(LAYERS * LAYER_BYTES * share / SHARES)
            chooser.observe(512, share, seconds, LAYERS * link, nbytes)
        predicted = chooser.predict(512, share)
        result = StepResult(is_streamed=share > 0, predicted_seconds=predicted, seconds=seconds)
        check.committed(Batch([], [0], [512], [True]), result, Emission())
    best = min(COSTS.seconds(512, share) for share in range(SHARES + 1))
    shares = [chooser.share(512) for _ in range(3)]
    assert all(COSTS.seconds(512, share) < 1.15 * best for share in shares)
    assert costs.link == pytest.approx(LAYER_BYTES / COSTS.copy, rel=0.05)
    assert check.ratio == pytest.approx(1.0, abs=0.25)


class Clock:
    """A time that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now
