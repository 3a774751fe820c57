"""The whole engine (scheduler, caches, overlap loop, sampler) on the demo model in fp32."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gpu_service.attention.registry import make_attention
from gpu_service.cache.kv_cache import KVCache
from gpu_service.cache.radix_cache import RadixCache
from gpu_service.cache.request_cache import PagePool, RequestCache
from gpu_service.core.interface import OutputDelta
from gpu_service.core.request import Request, SamplingParams, SchedulerLimits
from gpu_service.core.step import TokenPool
from gpu_service.engine.engine import Engine
from gpu_service.engine.host_runner import CpuStream, HostRunner, InlineStream
from gpu_service.engine.input_builder import InputBuilder
from gpu_service.engine.model_runner import ModelRunner
from gpu_service.engine.sampler import Sampler
from gpu_service.scheduler.scheduler import Scheduler
from tests.helpers.demo import MAX_NEW_TOKENS, GoldenAnswer
from tests.helpers.demo_engine import demo_model

CONTEXT_LIMIT = 256


@dataclass(frozen=True)
class Serving:
    """How the engine runs; chosen by the test. Lengths in tokens."""

    max_num_seqs: int = 16
    budget: int = 512
    num_pages: int = 256
    page_size: int = 16
    overlap: bool = True


class Collector:
    """Gathers what the engine tells, and lets a test wait for the ends."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._tokens: dict[str, list[int]] = {}
        self._ends: dict[str, str] = {}

    def on_output(self, deltas: list[OutputDelta]) -> None:
        """Called by the engine thread."""
        with self._condition:
            for delta in deltas:
                self._tokens.setdefault(delta.request.key, []).extend(delta.token_ids)
                if delta.finish_reason is not None:
                    self._ends[delta.request.key] = (
                        f"{delta.finish_reason.value} {delta.error_message}".strip()
                    )
            self._condition.notify_all()

    def wait(self, requests: Sequence[Request], timeout_s: float = 120) -> list[list[int]]:
        """Return all tokens of each request once each has ended well."""
        keys = [request.key for request in requests]
        with self._condition:
            done = self._condition.wait_for(lambda: all(key in self._ends for key in keys), timeout_s)
            assert done, f"unfinished: {set(keys) - set(self._ends)}"
            assert {self._ends[key] for key in keys} <= {"stop", "length"}, self._ends
            return [self._tokens[key] for key in keys]


@contextmanager
def demo_engine(experts: Any, serving: Serving) -> Iterator[tuple[Engine, Collector]]:
    """Run an engine on the demo model with an expert client; stop it at the end and check its books."""
    model, device = demo_model(), torch.device("cpu")
    limits = SchedulerLimits(
        max_num_seqs=serving.max_num_seqs,
        max_num_batched_tokens=serving.budget,
        context_limit=CONTEXT_LIMIT,
        eos_token_ids=frozenset(model.config.eos_token_ids),
    )
    pool, tree = PagePool(serving.num_pages), RadixCache(serving.page_size)
    scheduler = Scheduler(limits, RequestCache(pool, tree, True))
    cache = KVCache(model.config.layers, serving.num_pages, serving.page_size, model.dtype)
    runner = ModelRunner(
        model,
        cache,
        make_attention(model.config.layers, cache, device),
        experts,
        TokenPool(serving.max_num_seqs, CONTEXT_LIMIT + 1, device),
        Sampler(model.config.vocab_size, device),
    )
    collector = Collector()
    stream = CpuStream() if serving.overlap else InlineStream()
    builder = InputBuilder(limits, serving.page_size)
    steps = HostRunner(runner, stream)
    engine = Engine(scheduler, builder, steps, collector.on_output, overlap=serving.overlap)
    engine.start()
    try:
        yield engine, collector
    finally:
        engine.stop()
    scheduler.check_integrity()


def greedy_request(name: str, answer: GoldenAnswer) -> Request:
    """Returns a request for the recorded answer."""
    params = SamplingParams(
        temperature=0.0, repetition_penalty=answer.repetition_penalty, max_tokens=MAX_NEW_TOKENS
    )
    return Request(name, answer.prompt_ids, params)
