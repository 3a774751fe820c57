"""The engine: inbox in, token deltas out, one thread in between.

Knows no text, no gRPC and no kernels. With overlapping, step N+1 is scheduled and launched before the tokens
of step N are known to the host:

host    | receive, schedule N+1, launch N+1 | wait N, commit N, emit | receive, schedule N+2 ...
device  |---------- step N ----------|---------- step N+1 (ids from the token pool) ----------|

Without it a step is committed before the next one is scheduled: what overlapping must be equal to, and
simpler to debug. Where there is a prefill lane (`prefill_lane.py`), long prompts are computed by a second
step in flight, and all said here of steps is said of those of the main lane.

Invariants, with step N+1 launched before step N is committed:
(a) a request that ends by a stop token in step N also ran in N+1; that token is dropped;
(b) pages and slots freed by commit(N) may still be read and written by N+1; the next request that gets them
    is computed by N+2 or later, and the runner runs steps in order;
(c) a launched step reads its own `StepPlan` and never a request;
(d) only committed tokens enter the prefix tree, so a failed step leaves no bad page behind;
(e) integrity is checked when nothing is in flight;
(f) a step of the lane is planned and launched when nothing is in flight; it is never run again, and what it
    read and wrote is given up by its commit, after its end on the device.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import structlog

from gpu_service.core.interface import (
    Abort,
    Add,
    Emission,
    EngineLoad,
    EngineObserver,
    Flush,
    Inbox,
    Message,
    NullObserver,
    OutputDelta,
    RunOperation,
    Stop,
    delta_of,
)
from gpu_service.core.request import (
    EngineStopped,
    FinishReason,
    QueueFull,
    Request,
    RequestRefused,
    refuse_impossible,
    trace_fields,
)
from gpu_service.core.results import RowResult, StepResult
from gpu_service.core.step import Batch, StepPlan
from gpu_service.engine.damage import COMPUTE_AGAIN, DamageWatch
from gpu_service.engine.input_builder import InputBuilder
from gpu_service.engine.pacing import STEP_COSTS, STREAM_PROMPTS, make_pacing
from gpu_service.engine.prefill_lane import POLL_S, PrefillLane
from gpu_service.engine.step_runner import DeviceLost, LaunchedStep, StepRunner
from gpu_service.experts.client import ExpertComputeFailed, ExpertUnavailable
from gpu_service.scheduler.admission import may_wait
from gpu_service.scheduler.scheduler import Scheduler
from gpu_service.speculation.pace import DraftPace

_log = structlog.get_logger(__name__)
# Operations of every engine.
_PAUSED_REQUESTS = "paused requests"


class Engine:
    """`submit`, `abort`, `flush`, `load` may be called from any thread; the rest by the engine's only."""

    def __init__(
        self,
        scheduler: Scheduler,
        builder: InputBuilder,
        runner: StepRunner,
        on_output: Callable[[Emission], None],
        *,
        observer: EngineObserver | None = None,
        overlap: bool = True,
        max_waiting: int = 1024,
        inbox: Inbox | None = None,
        operations: Mapping[str, Callable[[str], None]] | None = None,
        lane: PrefillLane | None = None,
        max_added_s: float | None = None,
        draft_pace: DraftPace | None = None,
    ) -> None:
        """`operations`: what `call` may run, by name; the same on every rank. `lane`: on every rank or none.

        `max_added_s`: without a lane, what a step of long prompts alone may take while others decode.
        `draft_pace`: None where speculation is off, or does not follow what steps cost.
        """
        self.scheduler = scheduler
        self.load = EngineLoad(usable_pages=scheduler.cache.pool.num_pages - 1)
        self._builder = builder
        self._runner = runner
        self.on_output = on_output
        self._observer = observer or NullObserver()
        self._max_waiting = max_waiting
        self._inbox = inbox or Inbox()
        own = {
            STREAM_PROMPTS: scheduler.pacing.read,
            _PAUSED_REQUESTS: builder.token_masks.read,
            COMPUTE_AGAIN: lambda _: self._compute_all_again(),
        }
        if scheduler.speculation is not None:
            own[STEP_COSTS] = scheduler.speculation.read
        self._operations = dict(operations or {}) | own
        scheduler.holds = builder.token_masks.holds
        self._damage = DamageWatch(scheduler, runner, self._inbox)
        self._stopping = False
        # Called once, by the engine thread, when every request has ended because no step can be computed.
        self.on_lost: Callable[[str], None] = lambda reason: None
        # Asked by rank 0 between steps, with whether nothing is to be computed: the operation to run now, or
        # an empty text.
        self.between_steps: Callable[[bool], str] = lambda is_idle: ""
        # Launched steps of the main lane, the oldest first, and how many of them there may be.
        self._in_flight: deque[LaunchedStep] = deque()
        self._depth = 2 if overlap else 1
        self._lane = lane
        pace, is_entry = None if lane is None else lane.pace, self._inbox.is_entry
        self._pacing = make_pacing(pace, draft_pace, scheduler.limits, max_added_s, is_entry)
        # An error of the loop itself, raised while the lane's layers were launched.
        self._defect: Exception | None = None
        if lane is not None:
            lane.attend(self._give_turn, self._inbox, self._in_flight)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the engine thread."""
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> bool:
        """Ends every request with an abort, then the thread and the runner; a wait for lost expert servers
        is given up. False: a step is still computing after `timeout_s`, and nothing may be closed.
        """
        self._inbox.post(Stop())
        self._runner.interrupt()
        if not self.join(timeout_s):
            return False
        if self._lane is not None:
            self._lane.runner.close()
        self._runner.close()
        return True

    def join(self, timeout_s: float | None = None) -> bool:
        """Whether the thread has ended, or was never started; waits for it at most `timeout_s`."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Returns whether it computes what is submitted. Any thread may ask."""
        return self._thread.is_alive() and not self._stopping

    @property
    def is_recovering(self) -> bool:
        """Returns whether steps wait for lost expert servers. Any thread may ask."""
        return self._runner.is_recovering

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues the outputs of one request, all or none.

        Raises RequestRefused when one can never fit, QueueFull when too many wait already, EngineStopped.
        """
        for request in requests:
            refuse_impossible(request.prompt_len, request.params.max_tokens, self.scheduler.limits)
        if self._stopping:
            raise EngineStopped("the engine is shutting down")
        if len(requests) > self._max_waiting:
            raise RequestRefused(
                f"{len(requests)} outputs of one request; at most {self._max_waiting} may wait"
            )
        waiting = self._inbox.num_added + len(self.scheduler.waiting)
        is_full = waiting + len(requests) > self._max_waiting
        if is_full and not may_wait(self.scheduler.waiting, requests, self._max_waiting):
            raise QueueFull(f"{waiting} outputs are waiting; at most {self._max_waiting} may")
        for request in requests:
            self._observer.submitted(request)
        self._inbox.post(Add(tuple(requests)))

    def abort(self, request_id: str) -> None:
        """Ends all outputs of a request within one step; unknown ids are ignored."""
        self._inbox.post(Abort(request_id))

    def flush(self) -> Future[int]:
        """Drops unheld prefixes before the next step; the future gets the number of pages freed."""
        done: Future[int] = Future()
        self._inbox.post(Flush(done))
        return done

    def call(self, operation: str, argument: str = "") -> Future[None]:
        """Runs one of the `operations` between two steps, on every rank at the same place.

        Whatever decides how a step is computed has to change this way. Its error goes to the future.
        """
        done: Future[None] = Future()
        self._inbox.post(RunOperation(operation, argument, done))
        return done

    # ---- the engine thread ----

    def _run(self) -> None:
        """A defect of the loop itself ends the engine: all waiting callers get the error."""
        try:
            while self.receive(wait=True):
                self.turn()
            self.finish()
        except Exception as error:
            _log.exception("the engine thread ended by an error")
            self._lose(f"the engine thread ended: {error!r}")

    def receive(self, wait: bool) -> bool:
        """Applies all messages; blocks for one if `wait` and there is no work. False: end the loop."""
        masks, running = self._builder.token_masks, self.scheduler.running
        has_constraints = masks.announced or self.scheduler.num_constrained
        if self._inbox.is_entry and has_constraints and (changed := masks.message(running)) is not None:
            self.call(_PAUSED_REQUESTS, changed)
        for operation, argument in self._pacing.messages(lambda: self._runner.streamed_tokens):
            self.call(operation, argument)
        idle = wait and not (self._in_flight or self.scheduler.has_work or self._lane_is_open)
        if idle:
            self._check_integrity()
            self._pacing.idled()
        if self._inbox.is_entry and (operation := self.between_steps(idle)):
            self.call(operation)
        for message in self._inbox.drain(idle):
            self._apply(message)
        if self._stopping:
            self._end_all(FinishReason.ABORT, "the engine is shutting down")
        return not self._stopping

    def turn(self) -> None:
        """Launches a step and waits for the one before it; with nothing to launch, for the latest."""
        if self._lane is not None:
            self._tend(self._lane)
        launched = len(self._in_flight) < self._depth and self.launch_next()
        if self._in_flight and (not launched or len(self._in_flight) == self._depth):
            self._commit_oldest()
        elif not launched:
            self._pacing.idled()
            if self._lane_is_open:
                self._inbox.wait(POLL_S)

    def settle(self) -> None:
        """Commits what is in flight in the main lane."""
        while self._in_flight:
            self._commit_oldest()

    def finish(self) -> None:
        """Commits what is in flight."""
        self.settle()
        if self._lane is not None and self._lane.step is not None:
            self.commit(self._lane.take())

    def launch_next(self) -> bool:
        """Schedules a step and launches it; False when there is nothing to do before a commit."""
        planned = self._plan(self._schedule)
        if planned is None:
            return False
        batch, plan = planned
        step = self._runner.launch(plan)
        step.batch, step.awaits_masks = batch, plan.awaits_masks
        step.overlaps = bool(self._in_flight) or self._depth == 1
        self._in_flight.append(step)
        return True

    def _schedule(self) -> Batch | None:
        batch = self.scheduler.schedule()
        if batch is not None or self._in_flight or self._lane_is_open or not self.scheduler.has_work:
            return batch
        if self._lane is not None and self.scheduler.wants_lane():
            return None  # the pages that it lacked have come
        cache, masks = self.scheduler.cache, self._builder.token_masks
        if not (cache.wait_for_tiers(self._inbox.wait) or masks.wait_for_held()):
            raise RuntimeError("requests are unfinished, but none can be scheduled")
        return None

    @property
    def _lane_is_open(self) -> bool:
        return self.scheduler.pacing.batch is not None

    def _tend(self, lane: PrefillLane) -> None:
        """Commits the lane's step if it has ended, and opens the next one if there is something to compute.

        Nothing of the main lane is in flight then: a step that was run again for lost experts would write to
        pages that were freed since it was launched, and the lane's may have got them.
        """
        if lane.step is not None and self._inbox.sight.lane_has_ended:
            self.commit(lane.take())
        self.scheduler.pacing.follow(self._inbox.sight)
        if not self.scheduler.wants_lane():
            return
        self.settle()
        if not self.scheduler.wants_lane():
            return
        planned = self._plan(self.scheduler.schedule_lane)
        if planned is not None:
            lane.launch(*planned)
        if self._defect is not None:
            raise self._defect

    def _give_turn(self) -> bool:
        """Returns a turn of the main lane that waits for nothing, between two layers of the lane."""
        if self._defect is not None:
            return False
        try:
            if not self.receive(wait=False):
                return False
            has_ended = bool(self._in_flight) and self._inbox.sight.main_has_ended
            if has_ended:
                self._commit_oldest()
            launched = len(self._in_flight) < self._depth and self.launch_next()
            if not self._in_flight:
                self._pacing.idled()
            return has_ended or launched
        except Exception as error:  # raised again once the lane's step is launched
            if not self._inbox.is_alone:  # the other ranks would wait for this one's next turn
                raise
            self._defect = error
            return False

    def _plan(self, schedule: Callable[[], Batch | None]) -> tuple[Batch, StepPlan] | None:
        """Returns a batch and its inputs; None when there is none, or when it failed."""
        try:
            if (batch := schedule()) is None:
                return None
        except Exception as error:
            _log.exception("scheduling failed")
            self._end_all(FinishReason.ERROR, f"scheduling failed: {error!r}")
            return None
        try:
            return batch, self._builder.build(batch, self._observer.launched(batch))
        except Exception as error:
            fields = trace_fields(batch.requests)
            _log.exception("building the step's inputs failed", step=batch.step, **fields)
            self._fail(batch, f"building the step's inputs failed: {error!r}")
            return None

    def _commit_oldest(self) -> None:
        step = self._in_flight.popleft()
        result = self.commit(step)
        if self._in_flight and self._in_flight[0].awaits_masks:
            self._supply_masks(self._in_flight[0])
        self._pacing.committed(step, result, self._lane_is_open)

    def _supply_masks(self, step: LaunchedStep) -> None:
        """Supplies what a step awaits, which follows from the tokens of the one before it, now committed."""
        masks = None
        try:
            masks = self._builder.masks(step.batch)
        except Exception as error:
            fields = trace_fields(step.batch.requests)
            _log.exception("masks can not be computed", step=step.batch.step, **fields)
            reason = f"masks can not be computed: {error!r}"
            constrained = [r for r in step.batch.requests if r.constraint is not None and not r.finished]
            for request in constrained:
                self.scheduler.finish(request, FinishReason.ERROR, reason, keep=False)
            self._end([delta_of(request) for request in constrained])
        step.supply(masks)

    def commit(self, step: LaunchedStep) -> StepResult | None:
        """Waits for a step's tokens and applies them; returns what it came to, None if it failed."""
        try:
            result = step.wait()
        except DeviceLost as error:
            self._lose(f"the device is lost: {error}", error)
            self.scheduler.ended(step.batch)
            return None
        except Exception as error:
            if isinstance(error, ExpertUnavailable) and step.batch is self.scheduler.pacing.batch:
                self._compute_again(step.batch, str(error))
                return None
            # Of another process: a traceback would show this one's way to it.
            is_ours = not isinstance(error, (ExpertUnavailable, ExpertComputeFailed))
            requests = step.batch.requests
            fields = {"requests": len(requests), "error": str(error), **trace_fields(requests)}
            _log.error("step failed", step=step.batch.step, exc_info=is_ours, **fields)
            self._fail(step.batch, f"{type(error).__name__}: {error}")
            return None
        is_suspect = bool(result.nonfinite_layers) or self._runner.damages != self._damage.known
        is_found = is_suspect and self._damage.look(result.nonfinite_layers)
        try:
            self._apply_result(step, result)
            if is_found:
                self._end_worthless()
                self._damage.clear_pages()
        except Exception as error:
            fields = trace_fields(step.batch.requests)
            _log.exception("applying a step's results failed", step=step.batch.step, **fields)
            self._end_all(FinishReason.ERROR, f"applying a step's results failed: {error!r}")
            self.scheduler.ended(step.batch)
        return result

    def _apply_result(self, step: LaunchedStep, result: StepResult) -> None:
        is_worthless = step.batch.step < self._damage.trusted_from
        if is_worthless and step.batch is self.scheduler.pacing.batch:
            self._compute_again(step.batch, "an expert was damaged", keep=False)
            return
        replayed = result.num_replays > 0 or is_worthless
        if result.token_ids is not None and not replayed and self.scheduler.commits_tokens(step.batch):
            emission = self.scheduler.commit_tokens(step.batch, result.token_ids)
        else:
            rows = result.rows or [*map(RowResult, result.token_ids or ())]
            pages = self.scheduler.cache.poisoned_pages(step.batch, rows)
            emission = Emission([*map(delta_of, self.scheduler.commit(step.batch, rows, replayed=replayed))])
            if pages:
                self._runner.zero_pages(pages)
        self._observer.committed(step.batch, result, emission)
        self._emit(emission)

    def _apply(self, message: Message) -> None:
        match message:
            case Add(requests):
                for request in requests:
                    self.scheduler.add(request)
            case Abort(request_id):
                self._end([delta_of(request) for request in self.scheduler.abort(request_id)])
            case Flush(done):
                done.set_result(self.scheduler.cache.flush())
            case RunOperation():
                message.run(self._operations, DeviceLost)
            case Stop():
                self._stopping = True
        self._emit()

    def _end_worthless(self) -> None:
        """Ends what was launched after a step that came to nothing: what it awaits no longer matters."""
        while self._in_flight:
            step = self._in_flight.popleft()
            if step.awaits_masks:
                step.supply(None)
            self.commit(step)

    def _compute_all_again(self) -> None:
        self._damage.forget()
        self.settle()
        self._damage.clear_pages()

    def _compute_again(self, batch: Batch, reason: str, keep: bool = True) -> None:
        """Requests whose experts were lost in a step of the lane return to the queue, for either lane."""
        _log.warning("experts changed during a prefill step, which is computed again", error=reason)
        self.scheduler.give_up(batch, keep)
        if not keep:
            self._damage.clear_pages()
        self._observer.committed(batch, None, Emission())
        self._emit()

    def _fail(self, batch: Batch, message: str) -> None:
        """Ends the unfinished requests of a failed step; none of their uncommitted pages is kept."""
        failed = [request for request in batch.requests if not request.finished]
        for request in failed:
            self.scheduler.finish(request, FinishReason.ERROR, message, keep=False)
        self.scheduler.ended(batch)
        emission = Emission([delta_of(request) for request in failed])
        self._observer.committed(batch, None, emission)
        self._emit(emission)

    def _lose(self, reason: str, error: Exception | None = None) -> None:
        """Ends the engine, unless it has ended already."""
        if self._stopping:
            return
        _log.error("the engine is lost", reason=reason, exc_info=error)
        self._stopping = True
        self._end_all(FinishReason.ERROR, reason)
        self.on_lost(reason)

    def _end_all(self, reason: FinishReason, message: str) -> None:
        requests = [*self.scheduler.running, *self.scheduler.waiting]
        for request in requests:
            try:
                self.scheduler.finish(request, reason, message, keep=False)
            except Exception:  # its state is broken already; the others and its client still need the end
                _log.exception("ending a request failed", request=request.key, **trace_fields([request]))
        self._end([delta_of(request) for request in requests])

    def _end(self, deltas: list[OutputDelta]) -> None:
        if deltas:
            self._observer.ended(deltas)
            self._emit(Emission(deltas))

    def _emit(self, emission: Emission | None = None) -> None:
        self.load = self.scheduler.load()
        self._observer.loaded(self.load)
        if emission:
            self.on_output(emission)

    def _check_integrity(self) -> None:
        try:
            self.scheduler.check_integrity()
        except AssertionError as error:
            _log.error("integrity check failed at idle", error=str(error))
            self._observer.corrupted(error)
