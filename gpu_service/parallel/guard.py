"""A step that fails on one rank has failed for all: the others wait for it in a collective."""

from __future__ import annotations

from collections.abc import Callable

from gpu_service.engine.in_flight import StepInFlight
from gpu_service.engine.results import StepResult
from gpu_service.engine.step import StepPlan
from gpu_service.engine.step_runner import Pending, StepRunner
from gpu_service.experts.client import ExpertComputeFailed, ExpertUnavailable

# All ranks raise these alike (`RankExperts.failure`), so their engines go on alike.
_AGREED = (ExpertUnavailable, ExpertComputeFailed)


class GuardedRunner(StepRunner):
    """Passes steps on; an error that is this rank's own ends the group through `fail`."""

    def __init__(self, inner: StepRunner, fail: Callable[[str], None]) -> None:
        self._inner = inner
        self._fail = fail

    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        """See the base class."""
        try:
            pending = self._inner.launch(plan)
        except Exception as error:
            self._fail(f"launching a step failed: {error!r}")
            raise
        # Not only when somebody waits for it: before that, a launch may wait for the other ranks.
        if isinstance(pending, StepInFlight) and isinstance(pending.error, Exception):
            self._judge(pending.error)
        return _GuardedPending(pending, self._judge)

    def _judge(self, error: Exception) -> None:
        if not isinstance(error, _AGREED):
            self._fail(f"a step failed: {error!r}")

    def zero_pages(self, pages: list[int]) -> None:
        """See the base class."""
        self._inner.zero_pages(pages)

    @property
    def is_recovering(self) -> bool:
        """See the base class."""
        return self._inner.is_recovering

    def interrupt(self) -> None:
        """See the base class."""
        self._inner.interrupt()

    def close(self) -> None:
        """See the base class."""
        self._inner.close()


class _GuardedPending(Pending[StepResult]):
    def __init__(self, inner: Pending[StepResult], judge: Callable[[Exception], None]) -> None:
        self._inner = inner
        self._judge = judge

    def wait(self) -> StepResult:
        """See the base class."""
        try:
            return self._inner.wait()
        except Exception as error:
            self._judge(error)
            raise
