"""The engine's metrics, under vLLM's names so that existing dashboards and scalers work, and its spans."""

from __future__ import annotations

import collections
import time
from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from gpu_service.core.interface import Emission, EngineLoad, OutputDelta
from gpu_service.core.request import Request
from gpu_service.core.results import FLOAT16_OVERFLOW, NON_FINITE_LOGITS, StepResult
from gpu_service.core.step import Batch

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_TIMES = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)


class EngineMetrics:
    """All metrics carry the labels `model_name` and `engine`; fractions are in [0, 1], times in seconds."""

    def __init__(self, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        self._labels = {"model_name": model_name, "engine": "0"}
        self.running = self._gauge("num_requests_running", "Outputs with pages on the device")
        self.waiting = self._gauge("num_requests_waiting", "Outputs in the queue")
        self.kv_usage = self._gauge("kv_cache_usage_perc", "Share of KV pages in use by running outputs")
        self.prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up")
        self.prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of started outputs")
        self.prompt_tokens_cached = self._counter("prompt_tokens_cached", "Of these, from the prefix cache")
        self.generation_tokens = self._counter("generation_tokens", "Output tokens")
        self.drafts = self._counter("spec_decode_num_drafts", "Outputs that had drafts verified in a step")
        self.draft_tokens = self._counter("spec_decode_num_draft_tokens", "Drafts verified")
        self.accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted")
        self.preemptions = self._counter("num_preemptions", "Outputs that had to give up their pages")
        self.request_preemptions = self._histogram(
            "request_num_preemptions", "How often an output had to give up its pages", _TIMES
        )
        self.iteration_tokens = self._histogram(
            "iteration_tokens_total", "Tokens of prompts and outputs per step", _TOKENS
        )
        self.queue_time = self._histogram("request_queue_time_seconds", "Submitted to admitted", _SECONDS)
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "Admitted to first token", _SECONDS
        )
        self.decode_time = self._histogram("request_decode_time_seconds", "First to last token", _SECONDS)
        self.inference_time = self._histogram(
            "request_inference_time_seconds", "Admitted to last token", _SECONDS
        )
        by_reason = [*self._labels, "reason"]
        text = "Outputs in the queue, by what they wait for"
        waiting = Gauge("vllm:num_requests_waiting_by_reason", text, by_reason, registry=registry)
        self.waiting_for_capacity = waiting.labels(**self._labels, reason="capacity")
        self.failed_steps = self._counter("failed_steps", "Steps that raised", "moebius")
        self.replayed_steps = self._counter(
            "replayed_steps", "Forward passes repeated after an expert server was lost", "moebius"
        )
        self.non_finite = self._counter(
            "nonfinite_logits", "Outputs ended because of NaN or Inf logits", "moebius"
        )
        self.float16_overflows = self._counter(
            "float16_overflows", "Outputs ended because hidden states exceeded what float16 holds", "moebius"
        )
        self.integrity_failures = self._counter(
            "integrity_failures", "Integrity checks at idle that failed", "moebius"
        )

    def describe_cache(
        self, page_size: int, num_pages: int, prefix_caching: bool, context_limit: int
    ) -> None:
        """The constant gauge with the cache's shape in its labels. `context_limit`: tokens of a request."""
        tokens = num_pages * page_size
        values = {
            "block_size": str(page_size),
            "num_gpu_blocks": str(num_pages),
            "kv_cache_size_tokens": str(tokens),
            # Requests of the longest kind that it holds.
            "kv_cache_max_concurrency": f"{tokens / context_limit:.2f}",
            "enable_prefix_caching": str(prefix_caching),
        }
        names = [*self._labels, *values]
        gauge = Gauge("vllm:cache_config_info", "Shape of the KV cache", names, registry=self._registry)
        gauge.labels(**self._labels, **values).set(1)

    def describe_limits(self, max_num_seqs: int) -> None:
        """Notes how many outputs run at once: what scalers divide `num_requests_running` by."""
        text = "Outputs that may have pages on the device at once"
        gauge = Gauge("moebius:max_num_seqs", text, list(self._labels), registry=self._registry)
        gauge.labels(**self._labels).set(max_num_seqs)

    def describe_self_test(self, worst_by_layer: Mapping[int, float]) -> None:
        """The largest relative error that the self-test at start found in each layer it looked at."""
        names = [*self._labels, "layer"]
        text = "Relative error of the worst expert tested at start"
        gauge = Gauge("moebius:expert_self_test_error", text, names, registry=self._registry)
        for layer, error in worst_by_layer.items():
            gauge.labels(**self._labels, layer=str(layer)).set(error)

    def _gauge(self, name: str, text: str) -> Gauge:
        metric = Gauge(f"vllm:{name}", text, list(self._labels), registry=self._registry)
        return metric.labels(**self._labels)

    def _counter(self, name: str, text: str, prefix: str = "vllm") -> Counter:
        metric = Counter(f"{prefix}:{name}", text, list(self._labels), registry=self._registry)
        return metric.labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(f"vllm:{name}", text, list(self._labels), buckets=buckets, registry=self._registry)
        return metric.labels(**self._labels)


def _first_tokens(batch: Batch) -> int:
    """Returns the number of outputs that a step begins: their tokens are none that it computes, as those of
    decoding stand for.
    """
    if batch.is_uniform_decode and 0 not in batch.output_positions:
        return 0
    ends_prompt = (
        start < request.prompt_len and samples
        for request, start, samples in zip(batch.requests, batch.start_positions, batch.samples, strict=True)
    )
    return sum(map(bool, ends_prompt))


_WINDOW_S = 10.0
_STARTS_WINDOW_S = 60.0
_MOST_STARTS = 4096


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Submission to first token of outputs that started in the last minute; filled by `EngineTelemetry`."""

    count: int
    p50: float  # seconds
    p95: float


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
        self._is_shown = False  # Whether the gauges have `_last`.
        self._recent: collections.deque[tuple[float, int]] = collections.deque()
        # Of each output that started: when (monotonic), seconds to its first token, tokens of its prompt.
        self._starts: collections.deque[tuple[float, float, int]] = collections.deque(maxlen=_MOST_STARTS)
        # Every n-th step with a traced request records expert spans: no randomness, an even share.
        # Forward passes since the start, and the seconds they took.
        self.steps = 0
        self.step_seconds = 0.0
        self._span_every = round(1 / expert_span_ratio) if expert_span_ratio > 0 else 0
        self._traced_steps = 0

    def throughput(self) -> float:
        """Returns output tokens per second over the last 10 s."""
        since = time.monotonic() - _WINDOW_S
        return sum(count for at, count in list(self._recent) if at >= since) / _WINDOW_S

    def prompt_throughput(self) -> float:
        """Returns prompt tokens per second of the outputs that started in the last 10 s, cached ones
        included.
        """
        since = time.monotonic() - _WINDOW_S
        return sum(tokens for at, _, tokens in list(self._starts) if at >= since) / _WINDOW_S

    def start_times(self) -> StartTimes | None:
        """Returns the times of the last minute, of at most 4096 outputs; None: none started.

        Any thread may ask.
        """
        since = time.monotonic() - _STARTS_WINDOW_S
        seconds = sorted(wait for at, wait, _ in list(self._starts) if at >= since)
        if not seconds:
            return None
        last = len(seconds) - 1
        return StartTimes(len(seconds), seconds[last // 2], seconds[round(0.95 * last)])

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
        if not self._span_every:
            return None
        traced = next((request for request in batch.requests if request.trace_context), None)
        if traced is None:
            return None
        self._traced_steps += 1
        chosen = (self._traced_steps - 1) % self._span_every == 0
        return propagate.extract(traced.trace_context) if chosen else None

    def committed(self, batch: Batch, result: StepResult | None, emission: Emission) -> None:
        """Counts a step's tokens and the requests it ended."""
        for delta in emission.deltas:
            if delta.num_output_tokens == len(delta.token_ids):
                self._tokens_emitted(delta)
        self.ended(emission.deltas)
        if not self.enabled:
            return
        self.metrics.iteration_tokens.observe(batch.num_tokens + _first_tokens(batch))
        if result is None:
            self.metrics.failed_steps.inc()
        else:
            self.metrics.replayed_steps.inc(result.num_replays)
            self.steps += 1
            self.step_seconds += result.seconds
        count = emission.num_tokens
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
        if not self.enabled or (load == last and self._is_shown):
            return
        self._is_shown = True
        self.metrics.running.set(load.num_running)
        self.metrics.waiting.set(load.num_waiting)
        self.metrics.waiting_for_capacity.set(load.num_waiting)
        self.metrics.kv_usage.set(load.used_pages / load.usable_pages)
        self.metrics.prefix_queries.inc(load.query_tokens - last.query_tokens)
        self.metrics.prefix_hits.inc(load.hit_tokens - last.hit_tokens)
        self.metrics.preemptions.inc(load.num_preemptions - last.num_preemptions)
        if load.draft_tokens > last.draft_tokens:
            self.metrics.drafts.inc(load.num_drafts - last.num_drafts)
            self.metrics.draft_tokens.inc(load.draft_tokens - last.draft_tokens)
            self.metrics.accepted_tokens.inc(load.accepted_tokens - last.accepted_tokens)

    def corrupted(self, error: AssertionError) -> None:
        """Counts it: an alert belongs on this."""
        self.metrics.integrity_failures.inc()

    def _tokens_emitted(self, delta: OutputDelta) -> None:
        times = self._times.get(delta.request.key)
        if times is None or times.first_token or not delta.token_ids:
            return
        times.first_token = time.time_ns()
        if self.enabled:
            waited = (times.first_token - times.submitted) / 1e9
            self._starts.append((time.monotonic(), waited, delta.request.prompt_len))
            self.metrics.prompt_tokens.inc(delta.request.prompt_len)
            self.metrics.prompt_tokens_cached.inc(delta.cached_tokens)

    def _record(self, delta: OutputDelta, times: Times) -> None:
        if delta.error_message.startswith(NON_FINITE_LOGITS):
            self.metrics.non_finite.inc()
        elif delta.error_message.startswith(FLOAT16_OVERFLOW):
            self.metrics.float16_overflows.inc()
        self.metrics.request_preemptions.observe(delta.request.num_preemptions)
        end = time.time_ns()
        borders = (times.submitted, times.admitted, times.first_token, end)
        if times.admitted:
            self.metrics.inference_time.observe((end - times.admitted) / 1e9)
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
