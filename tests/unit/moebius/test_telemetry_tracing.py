"""Guards traces: spans reach an OTLP collector, follow the caller's choice, and cross gRPC as one trace."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from moebius.config import TelemetryConfig
from moebius.telemetry import configure_tracing
from tests.helpers.otlp_collector import Collector, running_collector


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector of this test's own."""
    with running_collector() as running:
        yield running


def settings(collector: Collector | None, ratio: float = 1.0) -> TelemetryConfig:
    """Returns telemetry settings that export to the collector."""
    endpoint = collector.endpoint if collector else ""
    return TelemetryConfig(otlp_endpoint=endpoint, trace_sample_ratio=ratio)


def parent(sampled: bool) -> trace.Context:  # type: ignore[name-defined]
    """Returns a context as it arrives with a caller's `traceparent`."""
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    context = SpanContext(trace_id=0xABC, span_id=0xDEF, is_remote=True, trace_flags=flags)
    return trace.set_span_in_context(NonRecordingSpan(context))


def test_spans_arrive_with_their_resource(collector: Collector) -> None:
    """Parent and child are exported as one trace, with service name, version and extra attributes."""
    provider = configure_tracing(settings(collector), "moebius-expert", {"moebius.role": "second"})
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("request"), tracer.start_as_current_span("step"):
        pass
    provider.shutdown()
    step, request = collector.spans
    assert (request.name, step.name) == ("request", "step")
    assert step.trace_id == request.trace_id
    assert step.parent_span_id == request.span_id
    resource = collector.resources[0]
    assert resource["service.name"] == "moebius-expert"
    assert resource["moebius.role"] == "second"
    assert resource["service.version"]


@pytest.mark.parametrize("sampled", [True, False])
def test_caller_decides_sampling(collector: Collector, sampled: bool) -> None:
    """A caller's sampled flag wins over our ratio, whichever way."""
    provider = configure_tracing(settings(collector, ratio=0.0 if sampled else 1.0), "moebius-gpu")
    with provider.get_tracer("test").start_as_current_span("request", context=parent(sampled)) as span:
        assert span.get_span_context().trace_id == 0xABC
    provider.shutdown()
    assert len(collector.spans) == int(sampled)


def test_ratio_zero_samples_nothing(collector: Collector) -> None:
    """Without a caller's choice the configured ratio decides."""
    provider = configure_tracing(settings(collector, ratio=0.0), "moebius-gpu")
    with provider.get_tracer("test").start_as_current_span("request"):
        pass
    provider.shutdown()
    assert collector.spans == []


def test_without_endpoint_ids_exist_but_nothing_is_recorded() -> None:
    """No collector: spans cost nothing, yet carry ids that logs and metadata can use."""
    provider = configure_tracing(settings(None), "moebius-gpu")
    with provider.get_tracer("test").start_as_current_span("request") as span:
        assert span.get_span_context().is_valid
        assert not span.is_recording()


def test_environment_changes_nothing(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_* variables neither switch tracing off nor rename the service: all settings are in the tree."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "other")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=other")
    provider = configure_tracing(settings(collector), "moebius-gpu")
    with provider.get_tracer("test").start_as_current_span("request"):
        pass
    provider.shutdown()
    assert collector.resources[0]["service.name"] == "moebius-gpu"
