"""Invariant: a step's prediction is what its costs say; steps that take much longer for a minute are measured
again, once, and others never are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from gpu_service.core.interface import Emission, NullObserver
from gpu_service.core.results import StepResult
from gpu_service.core.step import Batch
from gpu_service.engine.step_check import TOO_SLOW, StepCheck, StepFacts, export
from gpu_service.experts.costs import ExpertCosts
from tests.unit.gpu_service.experts.test_costs import COSTS, LAYER_BYTES, Clock

LAYERS, TOP_K, PAIR = 10, 4, 20e-6
# Seconds of a decode step of one row besides the servers'.
OTHER = 0.003


class Served:
    """An engine that decodes one row a step, some of its choices hit, and servers that count their time."""

    def __init__(self) -> None:
        self.clock, self.costs = Clock(), ExpertCosts(64, TOP_K)
        self.busy, self.hits, self.in_lane, self.again = 0.0, 0.0, False, 0
        self.decoded: list[tuple[int, float, bool | None]] = []
        facts = StepFacts(
            *(LAYERS, TOP_K, True, lambda: self.busy, lambda: self.hits, lambda: self.in_lane),
            lambda *step: self.decoded.append(step),
        )
        self.check = StepCheck(NullObserver(), self.costs, facts, self.clock)
        self.check.on_too_slow = self.measure

    def measure(self) -> None:
        """Measures as an engine does."""
        self.again += 1
        self.check.forget()
        self.costs.forget()

    def decode(self, seconds: float, slower: float = 1.0, other: float = OTHER, **result: Any) -> None:
        """So long; servers and the rest may take longer than usual."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            busy = LAYERS * TOP_K * (1 - self.hits) * PAIR * slower
            self.step(busy + other, busy, **result)

    def step(self, seconds: float, busy: float = 0.0, rows: int = 1, **result: Any) -> None:
        """One that ends after `seconds`."""
        self.clock.now += seconds
        self.busy += busy
        found = StepResult(seconds=seconds, **result)
        self.check.committed(Batch([], [100], [rows], [True]), found, Emission())


def test_decode_steps_say_what_copies_cost() -> None:
    """Each is reported with its seconds and whether copies ran beside it; prompts, and steps next to the
    prefill lane's, are not.
    """
    served = Served()
    served.step(0.25, has_copies=True)
    served.step(0.125)
    served.step(0.5, rows=9)
    served.in_lane = True
    served.step(0.5)
    assert served.decoded == [(1, 0.25, True), (1, 0.125, False)]


def test_predictions_follow_hits() -> None:
    """Where residents are hit more often, a step is predicted to take less, without having been seen to."""
    served = Served()
    served.decode(10.0)
    assert served.costs.figures.cpu_expert_seconds == pytest.approx(PAIR)
    assert served.check.ratio == pytest.approx(1.0, abs=0.02)
    before = served.check.predicted_seconds
    served.hits = 1.0
    served.step(OTHER)
    assert served.check.predicted_seconds - before == pytest.approx(OTHER, rel=0.02)


@pytest.mark.parametrize("wrong", [0.2, 5.0])
def test_servers_speed_is_corrected_within_seconds(wrong: float) -> None:
    """Decode steps say what servers take, whatever was taken to be true, and so what a copy has to bring."""
    served, right = Served(), Served()
    for each in (served, right):
        each.decode(0.5)
    served.costs.served(1.0, wrong * PAIR, 1e9)
    for _ in range(4):
        served.costs.served(1.0, wrong * PAIR, 1e9)
    assert served.costs.figures.cpu_expert_seconds == pytest.approx(wrong * PAIR)
    served.decode(8.0)
    price = served.costs.copy_price(10**6)
    assert price == pytest.approx(right.costs.copy_price(10**6), rel=0.05)


def test_copies_say_how_fast_the_link_is() -> None:
    """Those of exchanges, also where nothing was measured and nothing streams; the price follows."""
    served = Served()
    served.decode(0.5)
    before = served.costs.copy_price(10**6)
    assert before is not None
    for _ in range(30):
        served.costs.copied(10**6, 10**6 / 8e9)
    assert served.costs.link == pytest.approx(8e9)
    assert served.costs.copy_price(10**6) == pytest.approx(5 * before)
    # The launch that such a small copy is timed with is no reason to take the link for slower.
    for _ in range(30):
        served.costs.copied(10**6, 10**6 / 6e9)
    assert served.costs.link == pytest.approx(8e9)
    for _ in range(30):
        served.costs.copied(10**6, 10**6 / 2e9)
    assert 2e9 <= served.costs.link < 3e9


def test_a_minute_of_slow_steps_is_measured_again() -> None:
    """Less than a minute does not count; afterwards the new time is what is predicted, and nothing more
    happens.
    """
    served = Served()
    served.decode(5.0)
    served.decode(50.0, other=3 * OTHER)
    assert served.again == 0
    ratio = served.check.ratio
    assert ratio is not None
    assert ratio < TOO_SLOW
    served.decode(20.0, other=3 * OTHER)
    assert served.again == 1
    served.decode(300.0, other=3 * OTHER)
    assert (served.again, served.check.times_measured_again) == (1, 1)
    assert served.check.ratio == pytest.approx(1.0, abs=0.02)


def test_slow_servers_are_no_reason_to_measure() -> None:
    """What serving corrects by itself is predicted within seconds; nor is a slow spell, or a lane's step."""
    served = Served()
    served.decode(5.0)
    served.decode(200.0, slower=5.0)
    assert served.check.ratio == pytest.approx(1.0, abs=0.05)
    served.decode(30.0)
    assert served.check.ratio == pytest.approx(1.0, abs=0.05)
    for _ in range(10):
        served.decode(30.0, other=3 * OTHER)
        served.decode(30.0)
    served.in_lane = True
    served.decode(200.0, other=10 * OTHER)
    assert served.again == 0


def test_what_does_not_help_is_tried_less_often() -> None:
    """Steps whose prediction stays wrong, as where costs of streaming do not fit: after 1, 2, 4 minutes."""
    served = Served()
    times = []
    while served.clock.now < 1000:
        before = served.again
        served.step(0.5, rows=512, is_streamed=True, predicted_seconds=0.1)
        times += [served.clock.now - 100.0] * (served.again - before)
    assert times == pytest.approx([60, 180, 420, 900], abs=5)


@pytest.mark.parametrize("has_all_layers", [True, False])
def test_prompts_that_stream_nothing_teach_what_servers_take(has_all_layers: bool) -> None:
    """But not a stage of a pipeline, whose steps take as long as all stages."""
    costs = ExpertCosts(128, 8)
    costs.measured(COSTS, LAYER_BYTES)
    check = StepCheck(NullObserver(), costs, StepFacts(LAYERS, TOP_K, has_all_layers), Clock())
    for _ in range(9):
        seconds = LAYERS * 2 * COSTS.seconds(512, 0)
        check.committed(Batch([], [0], [512], [True]), StepResult(seconds=seconds), Emission())
    assert costs.layer is not None
    assert costs.layer.cpu_scale == pytest.approx(2.0 if has_all_layers else 1.0)


def unpredictable(served: Served) -> None:
    served.step(1.0, rows=512, is_streamed=True)
    served.step(1.0, num_replays=1)
    served.step(0.0)
    served.check.committed(Batch([], [0], [1], [True]), None, Emission())


def few(served: Served) -> None:
    for rows in (1, 2, 4, 8, 16, 100, 1000):
        served.step(1.0, rows=rows)


@pytest.mark.parametrize("happens", [unpredictable, few])
def test_what_is_not_known_is_not_compared(happens: Callable[[Served], None]) -> None:
    """Steps that streamed without costs, were run again or failed; and the first ones of each kind."""
    served = Served()
    happens(served)
    assert served.check.ratio is None
    assert served.check.steps == 0


def test_both_times_are_metrics() -> None:
    """Both metrics count the same steps, so that their rates can be divided."""
    served, registry = Served(), CollectorRegistry()
    served.decode(5.0)
    export(served.check, "tiny", registry)
    scraped = generate_latest(registry).decode()
    labels = '{engine="0",model_name="tiny"}'
    assert f"moebius:step_predicted_seconds_total{labels} {served.check.predicted_seconds}" in scraped
    assert f"moebius:step_measured_seconds_total{labels} {served.check.measured_seconds}" in scraped
