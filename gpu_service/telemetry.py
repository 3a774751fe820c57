"""Turns the engine's life into metrics and spans: request -> queue, prefill, decode."""

from __future__ import annotations

import collections
import time
from dataclasses import dataclass

from opentelemetry import propagate, trace
from opentelemetry.context import Context

from gpu_service.engine.interface import EngineLoad, OutputDelta
from gpu_service.engine.results import NON_FINITE_LOGITS, StepResult
from gpu_service.engine.step import Batch
from gpu_service.metrics import EngineMetrics
from gpu_service.request import Request

_WINDOW_S = 10.0


@dataclass(slots=True)
class Times:
    """Nanoseconds since the epoch, 0 while it has not happened."""

    submitted: int
    admitted: int = 0
    first_token: int = 0


class EngineTelemetry:
    """An `EngineObserver`. Silent until `enabled`, so that the warm-up step counts nowhere."""

    def __init__(self, metrics: EngineMetrics, expert_span_ratio: float = 0.0) -> None:
        self.metrics = metrics
        self.enabled = False
        self._times: dict[str, Times] = {}
        self._last = EngineLoad()
        self._recent: collections.deque[tuple[float, int]] = collections.deque()
        # Every n-th step with a traced request records expert spans: no randomness, an even share.
        self._span_every = round(1 / expert_span_ratio) if expert_span_ratio > 0 else 0
        self._traced_steps = 0

    def throughput(self) -> float:
        """Output tokens per second over the last 10 s."""
        since = time.monotonic() - _WINDOW_S
        return sum(count for at, count in list(self._recent) if at >= since) / _WINDOW_S

    def submitted(self, request: Request) -> None:
        """Starts the request's clock."""
        self._times[request.key] = Times(time.time_ns())

    def launched(self, batch: Batch) -> Context | None:
        """Notes admissions; picks the request whose span this step's expert spans hang under."""
        now = time.time_ns()
        for request in batch.admitted:
            times = self._times.get(request.key)
            if times is not None and times.admitted == 0:
                times.admitted = now
        traced = next((request for request in batch.requests if request.trace_context), None)
        if traced is None or not self._span_every:
            return None
        self._traced_steps += 1
        chosen = (self._traced_steps - 1) % self._span_every == 0
        return propagate.extract(traced.trace_context) if chosen else None

    def committed(self, batch: Batch, result: StepResult | None, deltas: list[OutputDelta]) -> None:
        """Counts a step's tokens and the requests it ended."""
        for delta in deltas:
            self._tokens_told(delta)
        self.ended(deltas)
        if not self.enabled:
            return
        self.metrics.iteration_tokens.observe(batch.num_tokens)
        if result is None:
            self.metrics.failed_steps.inc()
        else:
            self.metrics.replayed_steps.inc(result.num_replays)
        count = sum(len(delta.token_ids) for delta in deltas)
        self.metrics.generation_tokens.inc(count)
        self._recent.append((time.monotonic(), count))
        while self._recent[0][0] < time.monotonic() - _WINDOW_S:
            self._recent.popleft()

    def ended(self, deltas: list[OutputDelta]) -> None:
        """Spans and durations of what is over."""
        for delta in deltas:
            if delta.finish_reason is None:
                continue
            times = self._times.pop(delta.request.key, None)
            if times is not None and self.enabled:
                self._record(delta, times)

    def loaded(self, load: EngineLoad) -> None:
        """Moves gauges and counters to the new snapshot."""
        last, self._last = self._last, load
        if not self.enabled:
            return
        self.metrics.running.set(load.num_running)
        self.metrics.waiting.set(load.num_waiting)
        self.metrics.kv_usage.set(load.used_pages / load.usable_pages)
        self.metrics.prefix_queries.inc(load.query_tokens - last.query_tokens)
        self.metrics.prefix_hits.inc(load.hit_tokens - last.hit_tokens)
        self.metrics.preemptions.inc(load.num_preemptions - last.num_preemptions)

    def corrupted(self, error: AssertionError) -> None:
        """Counts it: an alert belongs on this."""
        self.metrics.integrity_failures.inc()

    def _tokens_told(self, delta: OutputDelta) -> None:
        times = self._times.get(delta.request.key)
        if times is None or times.first_token or not delta.token_ids:
            return
        times.first_token = time.time_ns()
        if self.enabled:
            self.metrics.prompt_tokens.inc(delta.request.prompt_len)
            self.metrics.prompt_tokens_cached.inc(delta.cached_tokens)

    def _record(self, delta: OutputDelta, times: Times) -> None:
        if delta.error_message == NON_FINITE_LOGITS:
            self.metrics.non_finite.inc()
        end = time.time_ns()
        borders = (times.submitted, times.admitted, times.first_token, end)
        histograms = (self.metrics.queue_time, self.metrics.prefill_time, self.metrics.decode_time)
        parent = propagate.extract(delta.request.trace_context) if delta.request.trace_context else None
        for index, name in enumerate(("engine.queue", "engine.prefill", "engine.decode")):
            start, stop = borders[index], borders[index + 1] or end
            if start == 0:
                return
            if borders[index + 1]:
                histograms[index].observe((stop - start) / 1e9)
            if parent is not None:
                span = trace.get_tracer("moebius").start_span(name, context=parent, start_time=start)
                span.set_attribute("moebius.output_index", delta.request.index)
                span.set_attribute("moebius.preemptions", delta.request.num_preemptions)
                span.end(end_time=stop)
