"""Guards which errors end a group of ranks, and when: a rank's own at once, those that all have never."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpu_service.core.parallel import SOLO
from gpu_service.core.results import StepResult
from gpu_service.core.step import StepPlan
from gpu_service.engine.step_runner import LaunchedStep, StepRunner, StepsInFlight
from gpu_service.experts.client import ExpertComputeFailed
from gpu_service.experts.resident.watch import ResidentDamaged
from gpu_service.parallel.experts import RankExperts
from gpu_service.parallel.steps import GuardedRunner

PLAN = cast(StepPlan, None)


class Failing(StepRunner):
    """Its steps fail when they are launched, as on a device, or when they are waited for."""

    def __init__(self, error: Exception, at_launch: bool) -> None:
        self._error, self._at_launch = error, at_launch
        self._steps = StepsInFlight(self._start, None, 1.0, contextlib.nullcontext)

    def _start(self, plan: StepPlan) -> Any:
        if self._at_launch:
            raise self._error
        return self

    def finish(self) -> StepResult:
        """Returns the end of a launched step."""
        raise self._error

    def undo(self) -> None:
        """Nothing was done."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        return self._steps.launch(plan)

    def zero_pages(self, pages: list[int]) -> None:
        """Nothing to clear."""

    @property
    def damages(self) -> int:
        return 3

    def close(self) -> None:
        """Nothing to end."""


def guarded(error: Exception, at_launch: bool) -> tuple[GuardedRunner, list[str]]:
    """Returns a runner, and what it reported to the group."""
    reported: list[str] = []
    fail: Callable[[str], None] = reported.append
    return GuardedRunner(Failing(error, at_launch), fail), reported


def test_damage_that_a_rank_hears_of_reaches_its_engine() -> None:
    """Or several ranks would go on with KV that a damaged expert made."""
    runner, _ = guarded(ValueError(), at_launch=True)
    assert runner.damages == 3
    client = SimpleNamespace(
        geometry=None, is_device_driven=False, agree_with_ranks=lambda agree: None, damages=lambda: 4
    )
    assert RankExperts(client, SOLO, lambda number: number, divides=False).damages() == 4  # type: ignore[arg-type]


def test_a_damaged_device_ends_the_group() -> None:
    """The other ranks wait in a collective: it is no error that all of them have."""
    error = ResidentDamaged("layer 1, expert 3 is damaged in the device's memory")
    runner, reported = guarded(error, at_launch=True)
    runner.launch(PLAN)
    assert len(reported) == 1


def test_an_error_at_launch_is_raised_at_once() -> None:
    """The next launch might wait for ranks that wait for this one."""
    runner, reported = guarded(ValueError("no kernel"), at_launch=True)
    pending = runner.launch(PLAN)
    assert reported == ["a step failed: ValueError('no kernel')"]
    with pytest.raises(ValueError, match="no kernel"):
        pending.wait()


def test_an_error_in_a_step_is_raised_when_it_is_known() -> None:
    """The error reaches a rank that waits, too."""
    runner, reported = guarded(ValueError("no memory"), at_launch=False)
    pending = runner.launch(PLAN)
    assert reported == []
    with pytest.raises(ValueError, match="no memory"):
        pending.wait()
    assert reported == ["a step failed: ValueError('no memory')"]


def test_what_all_ranks_have_ends_none() -> None:
    """A refused layer fails its requests, on every rank alike."""
    runner, reported = guarded(ExpertComputeFailed("NaN"), at_launch=False)
    with pytest.raises(ExpertComputeFailed):
        runner.launch(PLAN).wait()
    assert reported == []
