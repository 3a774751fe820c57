"""An engine on the fake model, with knobs, and a way to run prompts through it to the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from gpu_service.attention.registry import make_attention
from gpu_service.cache.kv_cache import make_cache
from gpu_service.cache.radix_cache import RadixCache
from gpu_service.cache.request_cache import PagePool, RequestCache
from gpu_service.cache.request_states import SLOTS_PER_REQUEST, RequestStates, StatePool
from gpu_service.core.interface import EngineObserver
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
from gpu_service.models.common import CausalLM
from gpu_service.scheduler.scheduler import Scheduler
from gpu_service.scheduler.supply import PageSupply, Queues
from gpu_service.speculation.drafter import DeviceDrafter, HostDrafter
from gpu_service.speculation.policy import Speculation
from tests.helpers.engine_outputs import EngineOutputs
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
    # Drafts of a request; from `drafter`, from the device's, or from the better of both.
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
        """Does nothing, like `planned`."""


# Changes of the knobs: every order in which an engine can do the same steps.
LOOPS = pytest.mark.parametrize(
    "loop",
    [{"overlap": False}, {"overlap": True}, {"overlap": True, "device_runner": True}],
    ids=["synchronous", "overlap", "device"],
)

# For one recovery of lost experts; only a hang takes as long.
RECOVERY_TIMEOUT_S = 120.0


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


class Harness(EngineOutputs):
    """A running engine whose requests may fail, its model and its experts."""

    may_fail = True

    def __init__(self, model: CausalLM | FakeModel, experts: Any) -> None:
        super().__init__()
        self.model: Any = model
        self.experts = experts

    def run(self, requests: Sequence[Request], *, together: bool = False) -> list[list[int]]:
        """Returns what any engine does; the tokens are those that it emitted."""
        super().run(requests, together=together)
        return [self.tokens(request) for request in requests]


def build_scheduler(
    knobs: Knobs, prefill_chunk_max: int = 0, eos_token_ids: frozenset[int] = frozenset({0})
) -> Scheduler:
    """Returns a scheduler with its own pool and tree; a lane's learns when it may open."""
    limits = SchedulerLimits(
        max_num_seqs=knobs.max_num_seqs,
        max_num_batched_tokens=knobs.budget,
        context_limit=min(knobs.context_limit, (knobs.num_pages - 1) * knobs.page_size),
        watermark_pages=1,
        eos_token_ids=eos_token_ids,
        prefill_chunk_max=prefill_chunk_max,
        max_rows=4 * knobs.max_num_seqs,
    )
    speculation = None
    if knobs.num_drafts:
        speculation = Speculation(
            limits, knobs.num_drafts, knobs.drafter, has_device_drafter=knobs.device_drafter is not None
        )
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
        return DeviceRunner(runner, HostDeviceStream(), recovery_timeout_s=RECOVERY_TIMEOUT_S)
    return HostRunner(runner, CpuStream() if knobs.overlap else InlineStream(), RECOVERY_TIMEOUT_S)


@contextmanager
def running_engine(
    knobs: Knobs | None = None,
    *,
    model: CausalLM | FakeModel | None = None,
    experts: Any = None,
    **changes: object,
) -> Iterator[Harness]:
    """Runs an engine; at the end stops it and checks that not a page is lost.

    Of the fake model if none is given; a real one has torch's attention and a cache of its own.
    """
    knobs = replace(knobs or Knobs(), **changes)  # type: ignore[arg-type]
    harness = Harness(model or FakeModel(), experts or FlakyExperts())
    device, is_fake = torch.device("cpu"), isinstance(harness.model, FakeModel)
    if is_fake:
        vocab_size, eos = VOCAB, {0}
        cache: Any = fake_cache(knobs.num_pages, knobs.page_size)
        attention: Any = NullAttention(fake_config().layers, cache)
    else:
        model_config = harness.model.config
        vocab_size, eos = model_config.vocab_size, set(model_config.eos_token_ids)
        cache = make_cache(model_config.layers, knobs.num_pages, knobs.page_size, harness.model.dtype)
        attention = make_attention(model_config.layers, cache, device)
    scheduler = build_scheduler(knobs, eos_token_ids=frozenset(eos))
    runner = ModelRunner(
        harness.model,
        cache,
        attention,
        harness.experts,
        TokenPool(knobs.max_num_seqs, knobs.context_limit + 1, device),
        Sampler(vocab_size, device),
        drafter=knobs.device_drafter,
        watch=knobs.watch,
    )
    engine = harness.engine = Engine(
        scheduler,
        InputBuilder(scheduler.limits, knobs.page_size),
        _step_runner(runner, knobs),
        lambda deltas: harness.on_output(deltas),
        observer=knobs.observer,
        overlap=knobs.overlap,
        max_waiting=knobs.max_waiting,
    )
    engine.start()
    try:
        yield harness
    finally:
        if is_fake:
            harness.model.gate.set()
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
