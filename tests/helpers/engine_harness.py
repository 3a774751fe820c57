"""An engine on the fake model, with knobs, and a way to run prompts through it to the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch

from gpu_service.cache.radix_cache import RadixCache
from gpu_service.cache.request_cache import PagePool, RequestCache
from gpu_service.cache.request_states import SLOTS_PER_REQUEST, RequestStates, StatePool
from gpu_service.core.interface import EngineObserver, OutputDelta
from gpu_service.core.request import Request, SamplingParams, SchedulerLimits
from gpu_service.core.step import Batch, TokenPool
from gpu_service.device.stream import HostDeviceStream
from gpu_service.engine.device_runner import DeviceRunner
from gpu_service.engine.engine import Engine
from gpu_service.engine.host_runner import CpuStream, HostRunner, InlineStream
from gpu_service.engine.input_builder import InputBuilder
from gpu_service.engine.model_runner import ModelRunner
from gpu_service.engine.sampler import Sampler
from gpu_service.engine.step_runner import StepRunner
from gpu_service.experts.client import ExpertUnavailable
from gpu_service.experts.resident.watch import ResidentWatch
from gpu_service.scheduler.scheduler import Scheduler
from gpu_service.scheduler.supply import PageSupply, Queues
from gpu_service.speculation.drafter import DeviceDrafter, HostDrafter
from gpu_service.speculation.policy import Speculation
from tests.helpers.fake_model import VOCAB, FakeModel, NullAttention, fake_cache, fake_config


@dataclass(frozen=True)
class Knobs:
    """What may differ between two engines that must give the same tokens."""

    num_pages: int = 200
    page_size: int = 4
    max_num_seqs: int = 8
    budget: int = 64
    overlap: bool = False
    # The runner a GPU has, on the host's null stream.
    device_runner: bool = False
    prefix_caching: bool = True
    max_waiting: int = 1000
    context_limit: int = 128
    observer: EngineObserver | None = None
    # Drafts of a request; from `drafter`, or from the device's if that is set.
    num_drafts: int = 0
    drafter: HostDrafter | None = None
    device_drafter: DeviceDrafter | None = None
    # Of a model with states, how many are kept for others to start from; None: the model has none.
    state_snapshots: int | None = None
    # Over experts on the device.
    watch: ResidentWatch | None = None


class LateSupply(PageSupply):
    """Counts how often it is asked for pages; those that it withheld are there from the first time on."""

    def __init__(self, scheduler: Scheduler, withheld: Sequence[int] = ()) -> None:
        self.asked = 0
        self._pool, self._withheld = scheduler.cache.pool, list(withheld)
        self._pool.withdraw(self._withheld)

    def before_step(self, queues: Queues) -> None:
        self.asked += 1
        pages, self._withheld = self._withheld, []
        self._pool.add(pages)

    def planned(self, batch: Batch) -> None:
        """Steps in flight hinder nothing."""

    def ended(self, batch: Batch) -> None:
        """Does what `planned` does."""


# Changes of the knobs: every order in which an engine can do the same steps.
LOOPS = pytest.mark.parametrize(
    "loop",
    [{"overlap": False}, {"overlap": True}, {"overlap": True, "device_runner": True}],
    ids=["synchronous", "overlap", "device"],
)


class FlakyExperts:
    """Stands for an expert client that host code drives: counts recoveries, or fails or stalls them."""

    is_device_driven = False

    def begin_step(self) -> None:
        """There is no sleeping process to wake."""

    def __init__(self) -> None:
        self.recoveries = 0
        # Experts found damaged.
        self.found = 0
        self.recovery_error: Exception | None = None
        # Cleared: the servers are lost, and a recovery waits.
        self.present = threading.Event()
        self.present.set()
        self.interrupted = threading.Event()

    def problem(self) -> str:
        """Returns whether the servers are there."""
        return "" if self.present.is_set() else "expert server 0 is dead"

    def damages(self) -> int:
        """Returns what a test has set."""
        return self.found

    def interrupt(self) -> None:
        """Ends a recovery."""
        self.interrupted.set()

    def agree_on(self, answer: bool) -> bool:
        """There is one rank."""
        return answer

    def recover(self, timeout_s: float) -> None:
        """The servers are back at once, later, or never."""
        self.recoveries += 1
        while not self.present.wait(0.01):
            if self.interrupted.is_set():
                raise ExpertUnavailable(0, "the engine stops")
        if self.recovery_error is not None:
            raise self.recovery_error


@dataclass
class Harness:
    """A running engine; `deltas` are all it emitted, by request key."""

    engine: Engine
    model: FakeModel
    experts: FlakyExperts
    deltas: dict[str, list[OutputDelta]] = field(default_factory=dict)
    condition: threading.Condition = field(default_factory=threading.Condition)

    def on_output(self, deltas: list[OutputDelta]) -> None:
        """Called by the engine thread."""
        with self.condition:
            for delta in deltas:
                self.deltas.setdefault(delta.request.key, []).append(delta)
            self.condition.notify_all()

    def wait(self, requests: Sequence[Request]) -> None:
        """Until each of them has emitted its end."""
        with self.condition:
            done = self.condition.wait_for(lambda: all(self._ended(r) for r in requests), timeout=60)
        assert done, f"unfinished: {[r.key for r in requests if not self._ended(r)]}"

    def wait_tokens(self, request: Request, count: int) -> None:
        """Until a request has emitted `count` tokens."""
        with self.condition:
            done = self.condition.wait_for(lambda: len(self.tokens(request)) >= count, timeout=60)
        assert done, f"{request.key} emitted {len(self.tokens(request))} tokens"

    def tokens(self, request: Request) -> list[int]:
        """Returns all tokens emitted so far."""
        return [token for delta in self.deltas.get(request.key, []) for token in delta.token_ids]

    def run(self, requests: Sequence[Request], *, together: bool = False) -> list[list[int]]:
        """Submits all; returns the tokens of each.

        `together`: all are queued before the first step, so that every run schedules alike.
        """
        for group in [requests] if together else [[request] for request in requests]:
            self.engine.submit(group)
        self.wait(requests)
        return [self.tokens(request) for request in requests]

    def _ended(self, request: Request) -> bool:
        emitted = self.deltas.get(request.key)
        return bool(emitted) and emitted[-1].finish_reason is not None


def build_scheduler(knobs: Knobs, prefill_chunk_max: int = 0) -> Scheduler:
    """Returns a scheduler with its own pool and tree; a lane's learns when it may open."""
    limits = SchedulerLimits(
        max_num_seqs=knobs.max_num_seqs,
        max_num_batched_tokens=knobs.budget,
        context_limit=min(knobs.context_limit, (knobs.num_pages - 1) * knobs.page_size),
        watermark_pages=1,
        eos_token_ids=frozenset({0}),
        prefill_chunk_max=prefill_chunk_max,
        max_rows=4 * knobs.max_num_seqs,
    )
    speculation = Speculation(limits, knobs.num_drafts, knobs.drafter) if knobs.num_drafts else None
    pool = PagePool(knobs.num_pages)
    if knobs.state_snapshots is None:
        cache = RequestCache(pool, RadixCache(knobs.page_size), knobs.prefix_caching)
        return Scheduler(limits, cache, speculation)
    states = RequestStates(StatePool(num_states(knobs)), knobs.state_snapshots)
    tree = RadixCache(knobs.page_size, states.forget)
    return Scheduler(limits, RequestCache(pool, tree, knobs.prefix_caching, states), speculation)


def num_states(knobs: Knobs) -> int:
    """Slots of states, that of zeros included."""
    own = max(SLOTS_PER_REQUEST, 2 + knobs.num_drafts)
    return 1 + own * knobs.max_num_seqs + (knobs.state_snapshots or 0)


def _step_runner(runner: ModelRunner, knobs: Knobs) -> StepRunner:
    if knobs.device_runner:
        return DeviceRunner(runner, HostDeviceStream(), recovery_timeout_s=5)
    return HostRunner(runner, CpuStream() if knobs.overlap else InlineStream(), recovery_timeout_s=5)


@contextmanager
def running_engine(
    knobs: Knobs | None = None,
    *,
    model: FakeModel | None = None,
    experts: FlakyExperts | None = None,
    **changes: object,
) -> Iterator[Harness]:
    """Runs an engine; at the end stops it and checks that not a page is lost."""
    knobs = replace(knobs or Knobs(), **changes)  # type: ignore[arg-type]
    scheduler, model, experts = build_scheduler(knobs), model or FakeModel(), experts or FlakyExperts()
    device = torch.device("cpu")
    cache = fake_cache(knobs.num_pages, knobs.page_size)
    runner = ModelRunner(
        model,
        cache,
        NullAttention(fake_config().layers, cache),
        experts,  # type: ignore[arg-type]
        TokenPool(knobs.max_num_seqs, knobs.context_limit + 1, device),
        Sampler(VOCAB, device),
        drafter=knobs.device_drafter,
        watch=knobs.watch,
    )
    harness = Harness.__new__(Harness)
    builder = InputBuilder(scheduler.limits, knobs.page_size)
    engine = Engine(
        scheduler,
        builder,
        _step_runner(runner, knobs),
        lambda deltas: harness.on_output(deltas),
        observer=knobs.observer,
        overlap=knobs.overlap,
        max_waiting=knobs.max_waiting,
    )
    harness.__init__(engine, model, experts)  # type: ignore[misc]
    engine.start()
    try:
        yield harness
    finally:
        model.gate.set()
        engine.stop()
    scheduler.check_integrity()
    assert not scheduler.has_work


def make_request(name: str, prompt: list[int], **params: object) -> Request:
    """A request with greedy defaults and no early end."""
    defaults: dict[str, object] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    return Request(name, prompt, SamplingParams(**(defaults | params)))  # type: ignore[arg-type]


def prompt_of(seed: int, length: int) -> list[int]:
    """Returns a fixed prompt without the end-of-sequence token."""
    return [1 + (seed * 31 + i * i * 7 + i) % (VOCAB - 1) for i in range(length)]
