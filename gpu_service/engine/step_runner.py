"""What the engine needs of whatever computes its steps, and what happens to steps when experts are lost.

A device that drives its own expert client finds out when a step has ended, and by then the next one may
have been launched after it, with inputs that mean nothing. So: wait until everything launched has ended,
undo what is not idempotent from the last step to the first, bring the servers back, and run the same plans
again, one after another. Plans are immutable, and KV and token-pool writes of a second run hit the same
places.

A step whose plan awaits its masks is launched as far as its logits; `LaunchedStep.supply` launches the rest.
That is done between the commit of the step before and the next launch, so at most the latest step awaits
masks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import structlog

from gpu_service.core.results import StepResult
from gpu_service.core.step import Batch, StepPlan, TokenMasks
from gpu_service.engine.recovery import Recovery
from gpu_service.experts.client import ExpertClient, ExpertComputeFailed, ExpertUnavailable


class DeviceLost(RuntimeError):
    """The device can run nothing any more, for this process."""


class LaunchedStep(ABC):
    """A launched step, which has ended or not, and whose result can be waited for."""

    # Filled by the engine.
    batch: Batch
    awaits_masks = False  # at its launch
    # Whether the step before had not been committed at its launch, or no step ever is launched so early.
    overlaps = False

    @abstractmethod
    def wait(self) -> StepResult:
        """Blocks until it has ended; returns its result or raises its exception."""

    @abstractmethod
    def query(self) -> bool:
        """Returns whether `wait` would not block. False after a loss of experts: recovery takes time."""

    def supply(self, masks: TokenMasks | None) -> None:
        """Supplies the masks that the plan awaits, before the step is waited for; None: no row has one."""
        raise AssertionError("the step was launched with its masks")


class StepRunner(ABC):
    """Runs steps one after another in launch order; later ones see all effects of earlier ones.

    At most two steps are launched and not waited for. A step that fails does not stop later ones: the
    exception is delivered by its `LaunchedStep`. After ExpertUnavailable a step, and those launched after it,
    are run again inside `wait`, so the engine never sees it unless recovery fails. After DeviceLost nothing
    can be launched.
    """

    @abstractmethod
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Starts a step and returns without waiting for it (or, for `InlineStream`, when it is done)."""

    @abstractmethod
    def zero_pages(self, pages: list[int]) -> None:
        """Clears pages after the launched steps and before later ones."""

    @property
    def may_capture(self) -> bool:
        """Returns whether there is something for `capture_next` to do now."""
        return False

    def capture_next(self) -> None:
        """Captures one more graph, if any is left, while no step is in flight. Raises DeviceLost."""
        return

    @property
    def is_recovering(self) -> bool:
        """Returns whether steps wait for lost expert servers. Any thread may ask."""
        return False

    @property
    def damages(self) -> int:
        """How many experts servers, and this rank on its device, have found damaged so far: grows before a
        step that waited for such an expert's repair ends.
        """
        return 0

    def suspect(self, layers: Collection[int]) -> None:
        """Looks for damage on the device at once: what these layers made in a step is not finite."""
        return

    @property
    def streamed_tokens(self) -> int:
        """Tokens of a step that streams its experts, instead of asking servers, from which longer ones gain
        nothing, on this rank; 0: none would be streamed.
        """
        return 0

    def interrupt(self) -> None:
        """Steps that wait for lost expert servers fail at once, later ones too. Any thread."""
        return

    @abstractmethod
    def close(self) -> None:
        """Finishes what was launched; nothing may be launched afterwards."""


_log = structlog.get_logger(__name__)
ExpertFailure = ExpertUnavailable | ExpertComputeFailed


class Run(Protocol):
    """One run of a plan on the device."""

    def query(self) -> bool:
        """Returns whether it has ended."""

    def finish(self) -> StepResult:
        """Blocks until it has ended; the host values, which mean nothing if experts failed meanwhile."""

    def sample(self, plan: StepPlan) -> None:
        """Launches the rest of a run whose plan awaited masks: `plan` has them."""

    def undo(self) -> None:
        """Takes back what a second run would do twice; after `finish`, in reverse order of launch."""


class StepInFlight(LaunchedStep):
    """A step from its launch until its result is known for good. Owned by `StepsInFlight`."""

    def __init__(self, plan: StepPlan, owner: StepsInFlight) -> None:
        self.plan = plan
        self.launched: Run | None = None
        self.result: StepResult | None = None
        self.error: Exception | None = None
        self.settled = False
        # How often it was undone so far.
        self.replays = 0
        # What was launched after the step and belongs to it: done again whenever the step is.
        self.followers: list[Callable[[], None]] = []
        self._owner = owner

    def wait(self) -> StepResult:
        self._owner.settle(self)
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result

    def query(self) -> bool:
        return self._owner.query(self)

    def supply(self, masks: TokenMasks | None) -> None:
        self._owner.supply(self, masks)

    def end(self) -> None:
        """Blocks until the run has ended and keeps what came of it: nothing, if it awaits masks."""
        if self.launched is None or self.result is not None or self.error is not None:
            return
        try:
            self.result = self.launched.finish()
            self.result.num_replays = self.replays
        except Exception as error:  # it is raised again where this step is awaited
            self.error = error

    def undo(self) -> None:
        """Takes back what the run changed, as if the step had not been launched yet."""
        if self.launched is not None:
            self.launched.undo()
        self.launched = self.result = self.error = None
        self.replays += 1


class StepsInFlight:
    """Launches plans through `start`, which may raise, in order; all calls come from one thread."""

    def __init__(
        self,
        start: Callable[[StepPlan], Run],
        experts: ExpertClient | None,
        recovery_timeout_s: float,
        active: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`active`: in which a client recovers, because it may write to the device's memory."""
        self._start = start
        self._experts = experts
        self._recovery = Recovery(experts, recovery_timeout_s, active)
        self._steps: list[StepInFlight] = []

    @property
    def is_recovering(self) -> bool:
        """Returns whether steps wait for lost expert servers. Any thread may ask."""
        return self._recovery.is_running

    def launch(self, plan: StepPlan) -> StepInFlight:
        """Starts a plan; after a step that has lost its experts, only when that one is run again."""
        step = StepInFlight(plan, self)
        if not any(isinstance(earlier.error, ExpertUnavailable) for earlier in self._steps):
            self._run(step)
        self._steps.append(step)
        return step

    def follow(self, work: Callable[[], None]) -> None:
        """Launches more work after the steps in flight."""
        work()
        if self._steps:
            self._steps[-1].followers.append(work)

    def supply(self, step: StepInFlight, masks: TokenMasks | None) -> None:
        """Launches the rest of a step; all of it where its first part was undone, or never begun."""
        step.plan = step.plan.with_masks(masks)
        if step.settled or step.error is not None:
            return
        if step.launched is None:
            # Not in flight while it is launched, like any other.
            self._steps.remove(step)
            self._run(step)
            self._steps.append(step)
            for work in step.followers:
                work()
            return
        try:
            step.launched.sample(step.plan)
        except Exception as error:  # it is raised again where this step is awaited
            step.error = error

    def query(self, step: StepInFlight) -> bool:
        """Returns whether `settle` would not block: neither for the device nor for servers to return."""
        if step.settled:
            return True
        if step.plan.awaits_masks or step is not self._steps[0] or isinstance(step.error, ExpertUnavailable):
            return False
        has_ended = step.launched is None or step.error is not None or step.launched.query()
        return has_ended and self._failure_of(step) is None

    def settle(self, step: StepInFlight) -> None:
        """Blocks until the step's outcome is final."""
        while not step.settled:
            oldest = self._steps[0]
            oldest.end()
            failure = self._failure_of(oldest)
            if failure is not None:
                self._run_all_again(failure)
            else:
                oldest.settled = True
                self._steps.pop(0)

    def _run(self, step: StepInFlight) -> None:
        if self._recovery.is_due:
            # It begins with a recovery, in the thread that waits for it.
            step.error = ExpertUnavailable(-1, "the step before left the expert servers in disorder")
            return
        try:
            step.launched = self._start(step.plan)
        except Exception as error:  # it is raised again where this step is awaited
            step.error = error
            # A device-driven client may hold half of a layer.
            if self._experts is not None and self._experts.is_device_driven:
                self._recovery.is_due = True

    def _failure_of(self, step: StepInFlight) -> ExpertFailure | None:
        """Returns what makes a step that has ended worthless; a later step's failure may show here, too."""
        if self._experts is None:
            return None
        if isinstance(step.error, ExpertUnavailable):
            return step.error
        if not self._experts.is_device_driven:
            return None
        return self._experts.failure()

    def _run_all_again(self, failure: ExpertFailure) -> None:
        steps, self._steps = self._steps, []
        _log.warning(
            "experts failed, the steps in flight are run again", error=str(failure), steps=len(steps)
        )
        for step in steps:
            step.end()
        for step in reversed(steps):
            step.undo()
        deadline = self._recovery.deadline()
        try:
            self._recovery.run(deadline)
            while steps and not steps[0].plan.awaits_masks:
                self._run_alone(steps[0], deadline)
                steps.pop(0)
                deadline = self._recovery.deadline()
            # It is run when its masks are known, which follow from the steps before.
            self._steps = steps
        except ExpertUnavailable as error:  # not back in time: what was launched can not be computed
            for step in steps:
                step.error, step.settled = error, True

    def _run_alone(self, step: StepInFlight, deadline: float) -> None:
        """Runs a step with nothing launched after it until its outcome is final. Raises ExpertUnavailable."""
        while True:
            if self._recovery.is_due:
                self._recovery.run(deadline)
            self._run(step)
            step.end()
            failure = self._failure_of(step)
            if failure is None:
                break
            step.undo()
            if isinstance(failure, ExpertUnavailable):
                self._recovery.run(deadline, failure)
                continue
            # Clears what a device-driven client remembers of a refused request.
            self._recovery.run(deadline)
            step.error = failure
            break
        for work in step.followers:
            work()
        step.settled = True
