"""Metrics of this process: Prometheus's, and OpenTelemetry's of generative AI."""

from __future__ import annotations

import re
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, cast

import structlog
from opentelemetry import metrics
from opentelemetry.metrics import Meter
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.samples import Sample

from moebius import __version__
from moebius.telemetry.certificates import CertificateCollector
from protos import engine_pb2

logger = structlog.get_logger(__name__)
MAX_IGNORED_NAMES = 256
OTHER_NAMES = "(others)"
OfModel = TypeVar("OfModel", bound=Histogram | Gauge)
_NAME = re.compile(r"[\w.\[\]-]{1,100}", re.ASCII)
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_TOKEN_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


# The conventions' bucket boundaries.
_GENAI_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_GENAI_TOKENS = tuple(4**power for power in range(14))


class BatchedHistogram(Histogram):
    """Observes values in batches: for those observed with every token of every stream.

    One thread observes; any thread may collect.
    """

    _MAX_WAITING = 4096

    def _metric_init(self) -> None:
        super()._metric_init()
        self._waiting: list[float] = []
        self._counting = threading.Lock()

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        """Counts the value, at the latest when metrics are collected; exemplars are not kept."""
        self._waiting.append(amount)
        if len(self._waiting) >= self._MAX_WAITING:
            self._count()

    def observe_many(self, amount: float, count: int) -> None:
        """Counts as `count` calls of `observe` whose amounts add up to `amount`."""
        self._sum.inc(amount)
        self._buckets[bisect_left(self._upper_bounds, amount / count)].inc(count)

    def _child_samples(self) -> Iterable[Sample]:
        self._count()
        return super()._child_samples()

    def _count(self) -> None:
        with self._counting:
            amounts = sorted(self._waiting[: self._MAX_WAITING])
            del self._waiting[: len(amounts)]  # values added meanwhile are after these
            self._sum.inc(sum(amounts))
            counted = 0
            for bucket, bound in zip(self._buckets, self._upper_bounds, strict=True):
                place = bisect_right(amounts, bound)
                if place > counted:
                    bucket.inc(place - counted)
                    counted = place


class ReplicaMetrics:
    """Metrics of each engine replica, as this process sees it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        name = "moebius:gateway_replica"
        self._up = Gauge(f"{name}_up", "1: requests are sent there", ["replica"], registry=registry)
        self._in_flight = Gauge(
            f"{name}_requests_in_flight", "Requests that it is answering", ["replica"], registry=registry
        )
        self._requests = Counter(
            f"{name}_requests", "Calls that ended, by gRPC status", ["replica", "status"], registry=registry
        )
        self._retries = Counter(
            f"{name}_retries", "Requests that were retried on another one", ["replica"], registry=registry
        )

    def up(self, replica: str, is_up: bool) -> None:
        """Sets whether the replica is used."""
        self._up.labels(replica).set(is_up)

    def in_flight(self, replica: str, change: int) -> None:
        """Counts a call that began (+1) or ended (-1)."""
        self._in_flight.labels(replica).inc(change)

    def ended(self, replica: str, status: str) -> None:
        """Counts a call that ended; those cancelled here are not counted."""
        self._requests.labels(replica, status).inc()

    def retried(self, replica: str) -> None:
        """Counts a request that moved to another replica after a failure."""
        self._retries.labels(replica).inc()

    def gone(self, replica: str) -> None:
        """Removes the replica's gauges; its counters stay."""
        self._up.remove(replica)
        self._in_flight.remove(replica)


class GatewayMetrics:
    """All metrics of one application; every method is fast enough to run per token."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(CertificateCollector())
        self.replicas = ReplicaMetrics(self.registry)
        self._model = ""
        self._success = self._counter("request_success", "Finished outputs", "finished_reason")
        self._rejections = self._counter("admission_rejections", "Requests refused with 429", "reason")
        self._errors = self._counter("request_errors", "Requests that ended with an error", "status")
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to the first token", (*_FIRST_TOKEN_S, 20, 40, 80, 160)
        )
        self._token = BatchedHistogram(
            "vllm:inter_token_latency_seconds",
            "Time between tokens of a stream",
            ["model_name"],
            buckets=(*_TOKEN_S, 20, 40, 80),
            registry=self.registry,
        )
        self._of_model: dict[Histogram | Gauge, Histogram | Gauge] = {}  # filled by `_own`
        self._request = self._histogram(
            "e2e_request_latency_seconds", "Arrival to the last token", _REQUEST_S
        )
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._generation = self._histogram("request_generation_tokens", "Output tokens of a request", _TOKENS)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time between the tokens of an output",
            (*_TOKEN_S, 20, 40, 80),
        )
        self._wanted = self._histogram("request_params_n", "Outputs asked for", (1, 2, 5, 10, 20))
        self._limit = self._histogram("request_params_max_tokens", "Longest output allowed, tokens", _TOKENS)
        self._in_flight = Gauge(
            "moebius:gateway_requests_in_flight",
            "Requests between admission and the last byte",
            ["model_name"],
            registry=self.registry,
        )

        self._connections = Gauge(
            "moebius:gateway_connections", "HTTP connections, idle ones included", registry=self.registry
        )
        self._closed = Counter(
            "moebius:gateway_connections_closed",
            "Connections closed against the client's will",
            ["reason"],
            registry=self.registry,
        )

        self._model_info = Gauge(
            "moebius:model_info",
            "1; of all that makes an answer (files, template, version) a digest, as in system_fingerprint",
            ["model_name", "system_fingerprint"],
            registry=self.registry,
        )
        self._ignored = Counter(
            "moebius:gateway_ignored_parameters",
            "Requests that sent a field without an effect, by field",
            ["parameter"],
            registry=self.registry,
        )
        self._ignored_names: set[str] = set()

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"vllm:{name}", text, ["model_name", label], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"vllm:{name}", text, ["model_name"], buckets=buckets, registry=self.registry)

    def set_model(self, name: str, fingerprint: str = "") -> None:
        """Sets the value of the `model_name` label; `fingerprint` as in `ServedModel`."""
        self._model = name
        self._model_info.clear()
        self._model_info.labels(name, fingerprint).set(1)
        self._of_model.clear()
        for histogram in (self._first_token, self._token):
            histogram.labels(name)
        for reason in ("gateway_queue_full", "engine_queue_full", "key_limit"):
            self._rejections.labels(name, reason)  # shows 0, for rates to start from

    def _own(self, metric: OfModel) -> OfModel:
        """Returns the metric with the served model's label, cached: the lookup costs more than counting."""
        own = self._of_model.get(metric)
        if own is None:
            own = self._of_model[metric] = metric.labels(self._model)
        return cast(OfModel, own)

    def rejected(self, reason: str) -> None:
        """Counts a request that was answered with 429."""
        self._rejections.labels(self._model, reason).inc()

    def ignored(self, names: Sequence[str]) -> None:
        """Counts fields of a request that had no effect; each name is logged once.

        Clients choose the names: the first `MAX_IGNORED_NAMES` that look like names are kept, all others
        count as one.
        """
        for name in names:
            known = self._ignored_names
            if name not in known and (len(known) >= MAX_IGNORED_NAMES or not _NAME.fullmatch(name)):
                name = OTHER_NAMES
            if name not in known:
                known.add(name)
                logger.info("a parameter of requests has no effect", parameter=name)
            self._ignored.labels(name).inc()

    def failed(self, status: int) -> None:
        """Counts an admitted request that ended with this HTTP status, in its answer or its stream."""
        self._errors.labels(self._model, str(status)).inc()

    def first_token(self, seconds: float) -> None:
        """Counts a request whose first token came after `seconds`."""
        self._own(self._first_token).observe(seconds)

    def tokens(self, seconds: float, count: int) -> None:
        """Counts `count` further tokens that came `seconds` after the ones before, evenly spaced."""
        histogram = self._own(self._token)
        if count == 1:
            histogram.observe(seconds)
        elif count > 1:
            histogram.observe_many(seconds, count)

    def in_flight(self, change: int) -> None:
        """Counts a request that was admitted (+1) or ended (-1)."""
        self._own(self._in_flight).inc(change)

    def connection_closed(self, reason: str) -> None:
        """Counts a connection that was closed because its client was too slow, or its place was needed."""
        self._closed.labels(reason).inc()

    def count_connections(self, count: Callable[[], int]) -> None:
        """Sets the function that returns the number of connections."""
        self._connections.set_function(count)

    def described(self, params: engine_pb2.SamplingParams) -> None:
        """Counts the parameters of a request."""
        self._own(self._wanted).observe(params.n or 1)
        self._own(self._limit).observe(params.max_tokens)

    def finished(
        self,
        seconds: float,
        prompt_tokens: int,
        completion_tokens: int,
        reasons: list[str],
        first_token_s: float = 0.0,
    ) -> None:
        """Counts a request that ended well; `reasons` has one finish reason per output, `first_token_s` is
        after its arrival (0: there was no token)."""
        per_token = time_per_token(seconds, first_token_s, completion_tokens, len(reasons))
        if per_token is not None:
            self._own(self._per_token).observe(per_token)
        for reason in reasons:
            self._success.labels(self._model, reason).inc()
        self._own(self._request).observe(seconds)
        self._own(self._prompt).observe(prompt_tokens)
        self._own(self._generation).observe(completion_tokens)

    def render(self) -> bytes:
        """Returns the exposition text."""
        return generate_latest(self.registry)


def time_per_token(seconds: float, first_token_s: float, tokens: int, outputs: int) -> float | None:
    """Returns the mean time between tokens of one output, seconds; None: no output had a second one."""
    later = tokens - outputs
    if not first_token_s or later <= 0:
        return None
    return (seconds - first_token_s) * outputs / later


class GenAiMetrics:
    """Metrics of OpenTelemetry's conventions for generative AI, exported over OTLP if that is configured."""

    def __init__(self, meter: Meter | None = None) -> None:
        """`meter`: None is the process's."""
        meter = meter or metrics.get_meter("moebius", __version__)
        self._duration = _seconds(meter, "request.duration", "Arrival to the last token")
        self._first = _seconds(meter, "time_to_first_token", "Arrival to the first token")
        self._token = _seconds(meter, "time_per_output_token", "Time per token after the first")
        self._usage = meter.create_histogram(
            "gen_ai.client.token.usage",
            unit="{token}",
            description="Tokens of a request, by type",
            explicit_bucket_boundaries_advisory=_GENAI_TOKENS,
        )

    def finished(
        self,
        operation: str,
        model: str,
        seconds: float,
        first_token_s: float,
        tokens: tuple[int, int],
        outputs: int,
    ) -> None:
        """Counts a request that ended well; `tokens` of the prompt and of all `outputs`, times from its
        arrival, that of the first token 0 if there was none."""
        attributes = _genai_attributes(operation, model)
        self._duration.record(seconds, attributes)
        if first_token_s:
            self._first.record(first_token_s, attributes)
        per_token = time_per_token(seconds, first_token_s, tokens[1], outputs)
        if per_token is not None:
            self._token.record(per_token, attributes)
        for kind, count in zip(("input", "output"), tokens, strict=True):
            self._usage.record(count, {**attributes, "gen_ai.token.type": kind})

    def failed(self, operation: str, model: str, seconds: float, error: str) -> None:
        """Counts a request that ended with an error of this code."""
        self._duration.record(seconds, {**_genai_attributes(operation, model), "error.type": error})


def _seconds(meter: Meter, name: str, description: str) -> metrics.Histogram:
    return meter.create_histogram(
        f"gen_ai.server.{name}", "s", description, explicit_bucket_boundaries_advisory=_GENAI_S
    )


def _genai_attributes(operation: str, model: str) -> dict[str, str]:
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "moebius",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
    }
