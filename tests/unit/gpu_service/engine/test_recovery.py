"""Guards that a step is run again until its servers are back or their time is over, never without them."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_service.core.results import StepResult
from gpu_service.engine import host_runner
from gpu_service.engine.host_runner import HostRunner, InlineStream
from gpu_service.engine.recovery import Recovery
from gpu_service.engine.step_runner import StepsInFlight
from gpu_service.experts.client import ExpertUnavailable
from tests.helpers.engine_harness import FlakyExperts

LOST = ExpertUnavailable(0, "killed")


class OtherRank(FlakyExperts):
    """There is another rank, whose time is over when the test says so."""

    is_over = False

    def agree_on(self, answer: bool) -> bool:
        """Any rank's yes counts."""
        return answer or self.is_over


def runner(
    run: Callable[[], None], experts: FlakyExperts | None, timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> HostRunner:
    """Whose steps are calls of `run`."""
    monkeypatch.setattr(host_runner, "to_result", lambda plan, outputs: StepResult())
    model: Any = SimpleNamespace(experts=experts, run=lambda plan, resolve: run())
    return HostRunner(model, InlineStream(), timeout_s)


PLAN: Any = SimpleNamespace(awaits_masks=False, trace_context=None)


def steps(run: Callable[[], None], experts: FlakyExperts, timeout_s: float) -> StepsInFlight:
    """Returns the same on a device."""

    def start(plan: object) -> Any:
        run()
        return SimpleNamespace(finish=StepResult, undo=lambda: None, query=lambda: True)

    return StepsInFlight(start, experts, timeout_s)  # type: ignore[arg-type]


class Kills:
    """Steps whose servers are killed in the first `count` of them; each takes `seconds`."""

    def __init__(self, count: int, seconds: float = 0.0) -> None:
        self.count, self.seconds = count, seconds
        self.runs = 0

    def __call__(self) -> None:
        """A run."""
        self.runs += 1
        time.sleep(self.seconds)
        if self.runs <= self.count:
            raise LOST


def test_a_step_is_run_again_as_often_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred losses of one step: no number of attempts ends it."""
    for_host, for_device = Kills(100), Kills(100)
    experts = FlakyExperts()
    assert runner(for_host, experts, 60, monkeypatch).launch(PLAN).wait().num_replays == 100
    assert experts.recoveries == 100
    steps(for_device, FlakyExperts(), 60).launch(PLAN).wait()
    assert for_device.runs == 101


def test_the_time_begins_with_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may have computed for longer than a recovery may take before it lost its servers."""
    kills = Kills(1, seconds=0.3)
    runner(kills, FlakyExperts(), 0.2, monkeypatch).launch(PLAN).wait()
    assert kills.runs == 2


def test_losses_without_end_end_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is that of the last loss."""
    with pytest.raises(ExpertUnavailable, match="killed"):
        runner(Kills(10**6, 0.01), FlakyExperts(), 0.1, monkeypatch).launch(PLAN).wait()
    with pytest.raises(ExpertUnavailable, match="killed"):
        steps(Kills(10**6, 0.01), FlakyExperts(), 0.1).launch(PLAN).wait()


def test_nothing_is_computed_after_a_recovery_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What answers by then may not have been compared: the next step begins with a recovery."""
    for make in (lambda kills, experts: runner(kills, experts, 5, monkeypatch), lambda *of: steps(*of, 5)):
        kills, experts = Kills(1), FlakyExperts()
        experts.recovery_error = ExpertUnavailable(1, "not ready")
        made = make(kills, experts)
        for _ in range(2):
            with pytest.raises(ExpertUnavailable, match="not ready"):
                made.launch(PLAN).wait()
        assert kills.runs == 1
        experts.recovery_error = None
        made.launch(PLAN).wait()
        assert (kills.runs, experts.recoveries) == (2, 3)


def test_ranks_give_up_at_the_same_place() -> None:
    """The time is over for all as soon as it is for one."""
    experts = OtherRank()
    recovery = Recovery(experts, 3600.0)  # type: ignore[arg-type]
    recovery.run(recovery.deadline(), LOST)
    experts.is_over = True
    with pytest.raises(ExpertUnavailable, match="killed"):
        recovery.run(recovery.deadline(), LOST)
    assert experts.recoveries == 1
    assert recovery.is_due


def test_without_servers_a_loss_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that were streamed and have changed, where no client could bring anything back."""
    with pytest.raises(ExpertUnavailable, match="killed"):
        runner(Kills(1), None, 60, monkeypatch).launch(PLAN).wait()
