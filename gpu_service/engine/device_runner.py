"""Steps on a GPU: the engine's own thread launches them and never waits while it does.

host    | stage, launch N+1 | wait for N's event, read its results | ...
device  |------ step N ------|------ step N+1 ------|

`DeviceLane` has another such runner for the prefill lane.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from gpu_service.core.results import StepResult
from gpu_service.core.step import StepPlan, tensors_of, with_tensors
from gpu_service.device.stream import DeviceEvent, DeviceStream, Download, HostBuffers, Uploader
from gpu_service.engine.decode_graphs import DecodeGraph, DecodeGraphs
from gpu_service.engine.model_runner import LaneModelRunner, ModelRunner, ModelStepRunner, launching
from gpu_service.engine.prefill_lane import LaneRunner
from gpu_service.engine.prompt_graphs import PromptGraphs
from gpu_service.engine.sampler import StepOutputs, to_result
from gpu_service.engine.step_runner import DeviceLost, LaunchedStep, StepRunner, StepsInFlight
from moebius.errors import brief


class DeviceRun:
    """One run of a plan: its outputs are on their way to the host, unless it awaits masks."""

    def __init__(
        self,
        runner: DeviceRunner,
        plan: StepPlan,
        staged: StepPlan,
        outputs: StepOutputs,
        started: float,
    ) -> None:
        """`outputs`: of a plan that awaits masks, its logits."""
        self._runner = runner
        self._plan = plan
        self._staged = staged
        self._started = started
        self._outputs = outputs
        if plan.awaits_masks:
            self._computed = runner.stream.record()
        else:
            self._download = self._start_download()

    def sample(self, plan: StepPlan) -> None:
        assert self._plan.awaits_masks, "the step was sampled when it was launched"
        with self._runner.stream.active():
            self._staged, self._outputs = self._runner.sample_launched(plan, self._staged, self._outputs)
            self._plan = plan
            self._download = self._start_download()

    def _start_download(self) -> Download:
        """With the stream active: the copies follow what computes the outputs."""
        return Download(self._runner.stream, self._runner.results, tensors_of(self._outputs))

    def query(self) -> bool:
        if self._plan.awaits_masks:
            return False
        try:
            return self._download.event.query()
        except RuntimeError:  # a lost device: `finish` says so
            return True

    def finish(self) -> StepResult:
        """Waits for the step; a run that still awaits masks has no result, only an end."""
        try:
            (self._computed if self._plan.awaits_masks else self._download.event).wait()
        except RuntimeError as error:
            raise DeviceLost(brief(error)) from error
        if self._plan.awaits_masks:
            return StepResult()
        result = to_result(self._plan, with_tensors(self._outputs, self._download.tensors))
        self._download.release()
        result.seconds = self._runner.time_of(self._started)
        if self._outputs.streamed is not None:
            self._outputs.streamed.check()
        return result

    def undo(self) -> None:
        self._runner.retract(self._staged, self._outputs)


class DeviceRunner(ModelStepRunner):
    """Runs steps on a GPU; what `graphs` or else `prompt_graphs` has a graph for is replayed."""

    def __init__(
        self,
        runner: ModelRunner,
        stream: DeviceStream,
        *,
        uploader: Uploader | None = None,
        graphs: DecodeGraphs | None = None,
        prompt_graphs: PromptGraphs | None = None,
        recovery_timeout_s: float = 300.0,
        captures_later: bool = False,
    ) -> None:
        """`captures_later`: `prepare` leaves the graphs of `prompt_graphs` to calls of `capture_next`."""
        super().__init__(runner)
        self.stream = stream
        self.results = HostBuffers(stream)
        self._graphs, self._prompt_graphs, self._captures_later = graphs, prompt_graphs, captures_later
        self._uploader = uploader or Uploader(stream)
        self._steps = StepsInFlight(self._start, runner.experts, recovery_timeout_s, stream.active)
        self._last_end = 0.0

    @property
    def is_recovering(self) -> bool:
        return self._steps.is_recovering

    @property
    def streamed_tokens(self) -> int:
        streamer = self._runner.streamer
        return 0 if streamer is None or not streamer.can_stream else streamer.useful_tokens

    def prepare(self) -> None:
        """Captures all graphs that are not to be captured later; expert servers must be ready. Before the
        first step. Raises their failure.
        """
        with self.stream.active(), torch.inference_mode():
            # The largest first.
            if self._prompt_graphs is not None and not self._captures_later:
                self._prompt_graphs.capture_all()
            if self._graphs is not None:
                self._graphs.capture_all()
        self.stream.synchronize()
        failure = None if self._runner.experts is None else self._runner.experts.failure()
        if failure is not None:
            raise failure

    @property
    def may_capture(self) -> bool:
        # A graph that is captured while experts' choices are recorded would record them for ever.
        recorder = self._runner.recorder
        is_recording = recorder is not None and recorder.is_recording
        return self._prompt_graphs is not None and self._prompt_graphs.num_left > 0 and not is_recording

    def capture_next(self) -> None:
        """Captures one more graph of steps with prompts, if any is left, while no step is in flight.

        Where that fails, a warning says why, and such steps go on without graphs. Raises DeviceLost where the
        device failed: it may go on recording what comes next.
        """
        if self._prompt_graphs is None or not self._prompt_graphs.num_left:
            return
        try:
            self.stream.synchronize()
            with self.stream.active(), torch.inference_mode():
                self._prompt_graphs.capture_next()
            self.stream.synchronize()
        except RuntimeError as error:
            raise DeviceLost(brief(error)) from error

    def launch(self, plan: StepPlan) -> LaunchedStep:
        return self._steps.launch(plan)

    def zero_pages(self, pages: list[int]) -> None:
        self._steps.follow(lambda: self._zero_pages(pages))

    def close(self) -> None:
        """Graphs go first: they hold what process groups and clients free later."""
        self.stream.synchronize()
        for graphs in (self._prompt_graphs, self._graphs):
            if graphs is not None:
                graphs.close()

    def retract(self, staged: StepPlan, outputs: StepOutputs) -> None:
        """Undoes the part of a step that is not idempotent."""
        with self.stream.active(), torch.inference_mode():
            self._runner.retract(staged, outputs)

    def sample_launched(
        self, plan: StepPlan, staged: StepPlan, outputs: StepOutputs
    ) -> tuple[StepPlan, StepOutputs]:
        """Launches what is left of a step that awaited the masks of `plan`. Returns what is staged, too.

        Call it with the stream active.
        """
        assert plan.sampling is not None
        try:
            with launching(plan):
                masks = with_tensors(
                    plan.sampling.masks, self._uploader.upload(tensors_of(plan.sampling.masks))
                )
                staged = staged.with_masks(masks)
                return staged, self._runner.draw(staged, outputs)
        except torch.AcceleratorError as error:
            raise DeviceLost(brief(error)) from error

    def time_of(self, started: float) -> float:
        """Returns how long a step that has just ended had the device: since the one before had ended."""
        begin, self._last_end = max(started, self._last_end), time.monotonic()
        return self._last_end - begin

    def _start(self, plan: StepPlan) -> DeviceRun:
        try:
            return self._launch(plan)
        except torch.AcceleratorError as error:
            raise DeviceLost(brief(error)) from error

    def _launch(self, plan: StepPlan) -> DeviceRun:
        started = time.monotonic()
        with self.stream.active(), launching(plan):
            if self._runner.experts is not None:
                self._runner.experts.begin_step()
            graph = None if self._graphs is None else self._graphs.graph_for(plan)
            if self._graphs is None or graph is None:
                staged = self._stage(plan)
                prompts = self._prompt_graphs
                replay = None if prompts is None else prompts.replay_of(plan, staged)
                outputs = self._runner.compute(staged, replay)
            else:
                staged, outputs = self._replay(self._graphs, graph, plan)
            if not plan.awaits_masks:
                outputs = self._runner.draw(staged, outputs)
            return DeviceRun(self, plan, staged, outputs, started)

    def _replay(
        self, graphs: DecodeGraphs, graph: DecodeGraph, plan: StepPlan
    ) -> tuple[StepPlan, StepOutputs]:
        assert plan.sampling is not None
        is_greedy = plan.sampling.takes_argmax
        self._runner.begin_step()
        # A drafter that rests reads nothing of the plan.
        needs_tensors = not is_greedy or plan.uploads or plan.drafts is not None or plan.runs_drafter
        staged = self._stage(plan) if needs_tensors else plan
        self._runner.upload(staged)
        return staged, graphs.replay(graph, plan)

    def _stage(self, plan: StepPlan) -> StepPlan:
        return with_tensors(plan, self._uploader.upload(tensors_of(plan)))

    def _zero_pages(self, pages: list[int]) -> None:
        with self.stream.active(), torch.inference_mode():
            self._runner.zero_pages(pages)


# How long an answer to whether experts can be streamed is taken for granted: the loop asks in every turn.
_READY_S = 0.02
# For so long nothing is tried after experts could not be streamed: another rank may still open its segments.
_REFUSED_S = 1.0


class LaneStep(LaunchedStep):
    """A step of the lane: it has ended when all that its launch queued has, however far that came."""

    def __init__(self, inner: LaunchedStep, end: DeviceEvent, on_end: Callable[[], None]) -> None:
        """`on_end` is called once, by `wait`."""
        self._inner = inner
        self._end = end
        self._on_end = on_end

    def query(self) -> bool:
        try:
            return self._end.query()
        except RuntimeError:  # a lost device: `wait` says so
            return True

    def wait(self) -> StepResult:
        try:
            self._end.wait()
        except RuntimeError as error:
            raise DeviceLost(brief(error)) from error
        finally:
            self._on_end()
        return self._inner.wait()


class DeviceLane(LaneRunner):
    """The prefill lane of a GPU: the model with a stream, a plan of attention and buffers of its own."""

    def __init__(
        self,
        runner: LaneModelRunner,
        stream: DeviceStream,
        main: DeviceStream,
        *,
        is_ready: Callable[[], bool],
        min_tokens: Callable[[], tuple[int, int]],
        step_tokens: Callable[[float | None], int] = lambda wait_s: 0,
        guard: Callable[[StepRunner], StepRunner] = lambda runner: runner,
    ) -> None:
        """`runner`: with an attention backend and a sampler that the main lane does not use, and no client of
        expert servers; `main`: the main lane's stream; `is_ready`: whether all experts can be streamed;
        `guard`: as `RankGroup.guard`.
        """
        self._min_tokens, self._step_tokens = min_tokens, step_tokens
        self._runner = runner
        self._stream, self._main = stream, main
        self._is_ready = is_ready
        self._ready, self._ask_again = False, 0.0
        self._steps = guard(DeviceRunner(runner, stream))
        runner.between_layers = lambda: self.between_layers()
        runner.wait_until = lambda has_come: self.wait_until(has_come)

    @property
    def is_ready(self) -> bool:
        now = time.monotonic()
        if now >= self._ask_again:
            self._ready, self._ask_again = self._is_ready(), now + _READY_S
        return self._ready

    @property
    def min_tokens(self) -> tuple[int, int]:
        return self._min_tokens()

    def step_tokens(self, wait_s: float | None) -> int:
        return self._step_tokens(wait_s)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        # Pages that the main lane has given up may still be cleared by it.
        self._stream.wait_for(self._main.record())
        self._hold_residents(True)
        # No expert server is asked, and spans of the main lane's steps must not hang under this one's.
        launched = self._steps.launch(replace(plan, trace_context=None))
        if self._runner.is_refused:
            self._ready, self._ask_again = False, time.monotonic() + _REFUSED_S
        return LaneStep(launched, self._stream.record(), self._end)

    def mark(self) -> DeviceEvent:
        return self._stream.record()

    def close(self) -> None:
        self._steps.close()

    def _end(self) -> None:
        self._runner.end_step()
        self._hold_residents(False)

    def _hold_residents(self, are_held: bool) -> None:
        if self._runner.resident is not None:
            self._runner.resident.is_held = are_held
