"""A device in virtual time with two streams, and an engine on it: nothing waits, everything takes its time.

Work is computed when its virtual time has come, so that two steps in flight write and read in the order in
which a device would, and a page that is given out too early shows in the tokens. The host, too, takes time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from gpu_service.core.interface import EngineObserver, Inbox, Message, OutputDelta
from gpu_service.core.request import Request
from gpu_service.core.results import StepResult
from gpu_service.core.step import StepPlan, TokenPool
from gpu_service.device.stream import DeviceEvent
from gpu_service.engine.engine import Engine
from gpu_service.engine.input_builder import InputBuilder
from gpu_service.engine.model_runner import ModelRunner
from gpu_service.engine.pacing import LanePace
from gpu_service.engine.prefill_lane import LaneRunner, PrefillLane
from gpu_service.engine.sampler import Sampler, StepOutputs, to_result
from gpu_service.engine.step_runner import LaunchedStep, StepRunner, StepsInFlight
from gpu_service.layers.context import ForwardContext
from gpu_service.parallel.inbox import FollowerInbox, LeaderInbox
from protos import ranks_pb2
from tests.helpers.device_experts import DoomedExperts
from tests.helpers.engine_harness import Knobs, build_scheduler
from tests.helpers.fake_model import VOCAB, FakeModel, NullAttention, fake_cache, fake_config

# Host seconds of one iteration of the loop, of launching a layer, and of a lost server's return.
_TURN_S, _LAUNCH_S, _RECOVERY_S = 50e-6, 100e-6, 0.2


@dataclass
class _Work:
    run: Callable[[], None]
    seconds: float
    done: bool = False


@dataclass
class VirtualStream:
    """Work in order; `share` of the device's speed while another stream works, too."""

    share: float
    queue: deque[_Work] = field(default_factory=deque)
    last: _Work | None = None

    def launch(self, run: Callable[[], None], seconds: float) -> None:
        """Queues work that takes so long on a device that does nothing else."""
        self.last = _Work(run, seconds)
        self.queue.append(self.last)


class VirtualEvent(DeviceEvent):
    """The end of what a stream was given so far."""

    def __init__(self, device: VirtualDevice, stream: VirtualStream) -> None:
        self._device = device
        self._last = stream.last

    def query(self) -> bool:
        return self._last is None or self._last.done

    def wait(self) -> None:
        while not self.query():
            self._device.advance(float("inf"), until=self)


class VirtualDevice:
    """`now` in seconds; `main` and `lane` are its streams."""

    def __init__(self, main_share: float, lane_share: float) -> None:
        self.now = 0.0
        self.main, self.lane = VirtualStream(main_share), VirtualStream(lane_share)

    def advance(self, seconds: float, until: VirtualEvent | None = None) -> None:
        """Time passes, at most until an event has ended."""
        while seconds > 0 and not (until is not None and until.query()):
            busy = [stream for stream in (self.main, self.lane) if stream.queue]
            if not busy:
                assert until is None, "an event that will never come"
                self.now += seconds
                return
            speeds = [stream.share if len(busy) == 2 else 1.0 for stream in busy]
            step = min(seconds, *(s.queue[0].seconds / v for s, v in zip(busy, speeds, strict=True)))
            self.now += step
            seconds -= step
            for stream, speed in zip(busy, speeds, strict=True):
                stream.queue[0].seconds -= step * speed
                if stream.queue[0].seconds <= 1e-12:
                    work = stream.queue.popleft()
                    work.run()
                    work.done = True


@dataclass(frozen=True)
class Times:
    """Seconds of a step's work, per layer: a step of the main lane, one of the lane."""

    layers: int = 6
    main: float = 1e-3
    main_token: float = 20e-6
    lane: float = 5e-3
    lane_token: float = 10e-6
    main_share: float = 0.6
    lane_share: float = 0.7
    # Rows beyond which a step of the main lane streams its experts, where it does.
    streams_from: int = 32


class _Run:
    """One run of a plan on a stream: begins with its tokens, stores some in each layer, then samples."""

    def __init__(self, runner: ModelRunner, plan: StepPlan, lost: Callable[[], bool]) -> None:
        self._runner, self._plan, self._lost = runner, plan, lost
        self._context: ForwardContext | None = None
        self.outputs = StepOutputs()

    def layer(self, index: int, count: int) -> None:
        """The work of one layer."""
        with torch.inference_mode():
            runner, plan, model = self._runner, self._plan, self._runner.model
            assert isinstance(model, FakeModel)
            if index == 0:
                runner.upload(plan)
                self._context = runner.context(runner._on_device(plan))
            assert self._context is not None
            rows = plan.query_start_loc[-1]
            model.store(self._context, slice(index * rows // count, (index + 1) * rows // count))
            if index == count - 1:
                hidden_states = model.read(self._context)
                if self._lost():
                    hidden_states = hidden_states.flip(1) + 12345
                if plan.sampling is not None:
                    logits = model.compute_logits(hidden_states[plan.logits_indices])
                    self.outputs = runner.sample(plan, logits)

    def result(self) -> StepResult:
        """Returns host values, once the run has ended."""
        return to_result(self._plan, self.outputs)


class VirtualSteps(StepRunner):
    """The main lane, by the code that runs steps again on a GPU; its experts may be lost."""

    # Whether long steps stream, and from how many tokens on longer ones gain nothing.
    streams = False
    useful_tokens = 2**16

    def __init__(self, device: VirtualDevice, runner: ModelRunner, times: Times) -> None:
        self._device, self._runner, self._times = device, runner, times
        self._steps = StepsInFlight(self._start, runner.experts, 100.0)

    @property
    def streamed_tokens(self) -> int:
        return self.useful_tokens if self.streams else 0

    def launch(self, plan: StepPlan) -> LaunchedStep:
        return self._steps.launch(plan)

    def zero_pages(self, pages: list[int]) -> None:
        self._steps.follow(lambda: self._device.main.launch(lambda: self._runner.zero_pages(pages), 1e-6))

    def close(self) -> None:
        """Nothing to be done."""

    def _start(self, plan: StepPlan) -> _Launched:
        experts, times = self._runner.experts, self._times
        assert experts is not None
        experts.begin_step()
        run = _Run(self._runner, plan, lambda: experts.failure() is not None)
        rows = plan.query_start_loc[-1]
        seconds = times.main + times.main_token * (rows - 1)
        if self.streams and rows > times.streams_from:
            seconds = times.lane + times.lane_token * rows
        for index in range(times.layers):
            self._device.main.launch(partial(run.layer, index, times.layers), seconds)
        self._device.advance(_LAUNCH_S)
        end = VirtualEvent(self._device, self._device.main)
        return _Launched(self._runner, plan, run, end, times.layers * seconds)


class _Launched:
    def __init__(
        self, runner: ModelRunner, plan: StepPlan, run: _Run, end: VirtualEvent, seconds: float
    ) -> None:
        self._runner, self._plan, self._run, self._end, self._seconds = runner, plan, run, end, seconds

    def query(self) -> bool:
        return self._end.query()

    def finish(self) -> StepResult:
        self._end.wait()
        result = self._run.result()
        result.seconds = self._seconds
        return result

    def undo(self) -> None:
        with torch.inference_mode():
            self._runner.retract(self._plan, self._run.outputs)


class VirtualLane(LaneRunner):
    """The prefill lane; `fails(step, layer)` gives what its launch fails with, or its experts' loss."""

    min_tokens = (24, 24)

    def __init__(self, device: VirtualDevice, runner: ModelRunner, times: Times) -> None:
        self._device, self._runner, self._times = device, runner, times
        self.fails: Callable[[int, int], Exception | None] = lambda step, layer: None
        self.launched = 0
        self.busy_s = 0.0
        self.ready = True

    @property
    def is_ready(self) -> bool:
        return self.ready

    def launch(self, plan: StepPlan) -> LaunchedStep:
        times, begun = self._times, self._device.now
        self.launched += 1
        run, error = _Run(self._runner, plan, lambda: False), None
        seconds = times.lane + times.lane_token * plan.query_start_loc[-1]
        for index in range(times.layers):
            self._device.lane.launch(partial(run.layer, index, times.layers), seconds)
            self._device.advance(_LAUNCH_S)
            error = self.fails(self.launched, index)
            if error is not None:
                break
            self.between_layers()
        end = VirtualEvent(self._device, self._device.lane)
        return _LanePending(self, end, run, error, begun)

    def mark(self) -> DeviceEvent:
        return VirtualEvent(self._device, self._device.lane)

    def close(self) -> None:
        """Nothing to be done."""


class _LanePending(LaunchedStep):
    def __init__(
        self, lane: VirtualLane, end: VirtualEvent, run: _Run, error: Exception | None, begun: float
    ) -> None:
        self._lane, self._end, self._run, self._error, self._begun = lane, end, run, error, begun

    def query(self) -> bool:
        return self._end.query()

    def wait(self) -> StepResult:
        self._end.wait()
        self._lane.busy_s += self._lane._device.now - self._begun
        if self._error is not None:
            raise self._error
        return self._run.result()


class VirtualInbox(Inbox):
    """Messages of a script arrive when their time has come, whatever the engine does then."""

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__()
        self._device = device
        self.script: list[tuple[float, Callable[[], Message]]] = []

    def drain(self, wait: bool) -> list[Message]:
        self._device.advance(_TURN_S)
        while self.script and self.script[0][0] <= self._device.now:
            self.post(self.script.pop(0)[1]())
        return super().drain(False)

    def wait(self, timeout_s: float) -> None:
        self._device.advance(timeout_s)


class Frames:
    """What rank 0 publishes, as the others receive it; in place of `RankControl`."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()

    def publish(self, iteration: ranks_pb2.Iteration) -> None:
        """Rank 0's."""
        self._frames.append(iteration.SerializeToString())

    def next_iteration(self) -> ranks_pb2.Iteration:
        """Returns another rank's. Fails when rank 0 published no more: this one does something else than rank
        0.
        """
        return ranks_pb2.Iteration.FromString(self._frames.popleft())

    def __len__(self) -> int:
        return len(self._frames)


class VirtualLeader(VirtualInbox, LeaderInbox):
    """The inbox of rank 0, whose messages are a script's."""

    def __init__(self, device: VirtualDevice, frames: Frames) -> None:
        LeaderInbox.__init__(self, frames)  # type: ignore[arg-type]
        self._device = device
        self.script = []


class VirtualFollower(VirtualInbox, FollowerInbox):
    """The inbox of another rank, which repeats what rank 0 did, at its own pace."""

    def __init__(self, device: VirtualDevice, frames: Frames) -> None:
        FollowerInbox.__init__(self, frames)  # type: ignore[arg-type]
        self._device = device
        self.script = []


class VirtualExperts(DoomedExperts):
    """A server's return takes time, in which the lane goes on."""

    device: VirtualDevice

    def recover(self, timeout_s: float) -> None:
        super().recover(timeout_s)
        self.device.advance(_RECOVERY_S)


class VirtualEngine:
    """An engine whose loop the caller drives; `emitted` has when each output got its tokens."""

    def __init__(
        self,
        knobs: Knobs,
        times: Times,
        *,
        has_lane: bool = True,
        prefill_chunk_max: int = 64,
        max_added_s: float | None = None,
        experts: VirtualExperts | None = None,
        observer: EngineObserver | None = None,
        make_inbox: Callable[[VirtualDevice], VirtualInbox] = VirtualInbox,
    ) -> None:
        self.device = VirtualDevice(times.main_share, times.lane_share)
        self.experts = experts or VirtualExperts()
        self.experts.device = self.device
        self.scheduler = build_scheduler(knobs, prefill_chunk_max)
        self.emitted: dict[str, list[tuple[float, OutputDelta]]] = {}
        cache = fake_cache(knobs.num_pages, knobs.page_size)
        pool = TokenPool(knobs.max_num_seqs, knobs.context_limit + 1, torch.device("cpu"))
        sampler = Sampler(VOCAB, torch.device("cpu"), knobs.max_num_seqs)
        model = FakeModel()

        def runner(experts: object) -> ModelRunner:
            attention = NullAttention(fake_config().layers, cache)
            return ModelRunner(model, cache, attention, experts, pool, sampler)  # type: ignore[arg-type]

        self.lane = VirtualLane(self.device, runner(None), times)
        pace = LanePace(max_added_s, lambda: self.device.now)
        self.inbox = make_inbox(self.device)
        self.steps = VirtualSteps(self.device, runner(self.experts), times)
        self.engine = Engine(
            self.scheduler,
            InputBuilder(self.scheduler.limits, knobs.page_size),
            self.steps,
            self._on_output,
            observer=observer,
            overlap=knobs.overlap,
            inbox=self.inbox,
            lane=PrefillLane(self.lane, pace) if has_lane else None,
            max_added_s=max_added_s,
        )

    def run(self, script: Sequence[tuple[float, Callable[[], Message]]], limit: int = 200_000) -> None:
        """Until all messages have arrived and every request has ended."""
        self.inbox.script = sorted(script, key=lambda entry: entry[0])
        for _ in range(limit):
            if not self.engine.receive(wait=False):
                break
            idle = not self.scheduler.has_work and self.scheduler.pacing.batch is None
            if idle and not self.engine._in_flight:
                self.scheduler.check_integrity()
                if not self.inbox.script:
                    break
                self.device.advance(max(0.0, self.inbox.script[0][0] - self.device.now))
                continue
            self.engine.turn()
        else:
            raise AssertionError("requests starve")
        self.engine.finish()
        self.check_empty()

    def repeat(self, frames: Frames) -> None:
        """Does what rank 0 did that published the frames; its `run` is over."""
        while frames and self.engine.receive(wait=False):
            self.engine.turn()
        self.engine.finish()
        self.check_empty()

    def check_empty(self) -> None:
        """Nothing is held by anyone."""
        scheduler = self.scheduler
        scheduler.check_integrity()
        pool, tree = scheduler.cache.pool, scheduler.cache.tree
        assert scheduler.pacing.batch is None
        assert pool.available + tree.evictable_pages == pool.usable
        assert len(scheduler._free_slots) == scheduler.limits.max_num_seqs

    def tokens(self, request: Request) -> list[int]:
        """Returns all tokens emitted."""
        return [token for _, delta in self.emitted.get(request.key, []) for token in delta.token_ids]

    def token_times(self, request: Request) -> list[float]:
        """When each delta came."""
        return [at for at, delta in self.emitted.get(request.key, []) if delta.token_ids]

    def _on_output(self, deltas: Sequence[OutputDelta]) -> None:
        for delta in deltas:
            self.emitted.setdefault(delta.request.key, []).append((self.device.now, delta))
