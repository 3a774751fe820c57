"""Steps on a machine without a GPU: the host computes them, on a thread of their own or in place.

`CpuStream` is a worker thread, so that scheduling really overlaps with computing. `InlineStream` does the
work before `launch` returns.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future

import structlog
import torch

from gpu_service.core.results import StepResult
from gpu_service.core.step import StepPlan, TokenMasks
from gpu_service.engine.model_runner import ModelRunner, ModelStepRunner, launching
from gpu_service.engine.recovery import Recovery
from gpu_service.engine.sampler import to_result
from gpu_service.engine.step_runner import LaunchedStep
from gpu_service.experts.client import ExpertUnavailable

_log = structlog.get_logger(__name__)
Work = Callable[[], StepResult]


class HostEvent(LaunchedStep):
    """The end of one launch, and what it returned or raised."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._result: StepResult | None = None
        self._error: BaseException | None = None

    def run(self, work: Work) -> None:
        """Does the work here and now and records how it ended. Called by streams only."""
        try:
            self._result = work()
        except BaseException as error:  # it is raised again in the waiting thread
            self._error = error
        self._done.set()

    def query(self) -> bool:
        """Returns whether the work has ended."""
        return self._done.is_set()

    def wait(self) -> StepResult:
        """Blocks until the work has ended; returns its result or raises its exception."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class Stream(ABC):
    """Launches run one after another in launch order; later launches see all effects of earlier ones.

    A launch that raises does not stop later ones: the exception is delivered by its event.
    """

    runs_meanwhile = True  # whether `launch` returns before the work is done

    @abstractmethod
    def launch(self, work: Work) -> HostEvent:
        """Queues work and returns at once (or, for the null object, when the work is done)."""

    @abstractmethod
    def close(self) -> None:
        """Finishes what was launched; nothing may be launched afterwards."""


class InlineStream(Stream):
    """The null object: every launch has ended when it returns."""

    runs_meanwhile = False

    def launch(self, work: Work) -> HostEvent:
        event = HostEvent()
        event.run(work)
        return event

    def close(self) -> None:
        """Nothing is pending, ever."""


class CpuStream(Stream):
    """One worker thread that runs launches in order."""

    def __init__(self, name: str = "forward-stream") -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def launch(self, work: Work) -> HostEvent:
        event = HostEvent()
        self._queue.put(lambda: event.run(work))
        return event

    def close(self) -> None:
        """Runs what is queued, then ends the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            task()


class HostStep(LaunchedStep):
    """A step whose plan awaits masks: its layers run, then it waits for them."""

    def __init__(
        self,
        stream: Stream,
        masks: Future[TokenMasks | None],
        run: Callable[[Callable[[StepPlan], StepPlan]], StepResult],
    ) -> None:
        self._masks = masks
        work = functools.partial(run, lambda plan: plan.with_masks(masks.result()))
        self._launch = functools.partial(stream.launch, work)
        # A stream that works in place would wait for ever.
        self._event: HostEvent | None = self._launch() if stream.runs_meanwhile else None

    def supply(self, masks: TokenMasks | None) -> None:
        self._masks.set_result(masks)
        if self._event is None:
            self._event = self._launch()

    def query(self) -> bool:
        return self._event is not None and self._event.query()

    def wait(self) -> StepResult:
        assert self._event is not None, "the step awaits its masks"
        return self._event.wait()


class HostRunner(ModelStepRunner):
    """Runs steps on a CPU: expert clients block and raise inside the step."""

    def __init__(self, runner: ModelRunner, stream: Stream, recovery_timeout_s: float = 300.0) -> None:
        super().__init__(runner)
        self._stream = stream
        self._recovery = Recovery(runner.experts, recovery_timeout_s)
        # Of the latest step that awaited masks.
        self._masks: Future[TokenMasks | None] = Future()
        self._masks.set_result(None)

    @property
    def is_recovering(self) -> bool:
        return self._recovery.is_running

    @property
    def streamed_tokens(self) -> int:
        streamer = self._runner.streamer
        return 0 if streamer is None or not streamer.is_open else streamer.useful_tokens

    def launch(self, plan: StepPlan) -> LaunchedStep:
        if not plan.awaits_masks:
            return self._stream.launch(lambda: self._run(plan))
        self._masks = Future()
        return HostStep(self._stream, self._masks, lambda resolve: self._run(plan, resolve))

    def zero_pages(self, pages: list[int]) -> None:
        self._stream.launch(lambda: self._zero_pages(pages))

    def close(self) -> None:
        if not self._masks.done():
            self._masks.set_exception(RuntimeError("the engine ended before the step's masks were known"))
        self._stream.close()

    def _zero_pages(self, pages: list[int]) -> StepResult:
        with torch.inference_mode():
            self._runner.zero_pages(pages)
        return StepResult()

    def _run(self, plan: StepPlan, resolve: Callable[[StepPlan], StepPlan] = lambda plan: plan) -> StepResult:
        """Runs the step; again, to the same KV slots, after a lost expert server came back."""
        started = time.monotonic()
        num_replays = 0
        deadline: float | None = None  # Of the recovery, from the step's first loss on.
        if self._recovery.is_due:
            self._recovery.run(self._recovery.deadline())
        while True:
            try:
                with launching(plan):
                    result = to_result(plan, self._runner.run(plan, resolve))
                break
            except ExpertUnavailable as error:
                failure = error
            # Experts are asked before anything is sampled, so the penalties' counts are untouched.
            _log.warning("expert server lost, waiting for it to return", error=str(failure))
            deadline = deadline or self._recovery.deadline()
            self._recovery.run(deadline, failure)
            num_replays += 1
        result.num_replays = num_replays
        result.seconds = time.monotonic() - started
        return result
