"""Guards expert tracing: one span per sampled step below its parent, an event per layer, else nothing."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from expert_service.spans import QUIET_NS, Call, SpanRecorder, sampled_parent
from moebius.config import TelemetryConfig
from moebius.telemetry import configure_tracing

TRACE, PARENT = 0xABC, 0xDEF


def call(layer: int, start: int, span_id: int = PARENT) -> Call:
    """Returns ten nanoseconds of work."""
    return Call(TRACE, span_id, layer, 4, start, 10, "mailbox")


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Returns what this process exports, with its own limits."""
    exported = InMemorySpanExporter()
    # Without an endpoint that one samples nothing.
    limits = configure_tracing(TelemetryConfig(), "moebius-expert")._span_limits
    provider = TracerProvider(span_limits=limits)
    provider.add_span_processor(SimpleSpanProcessor(exported))
    monkeypatch.setattr(trace, "get_tracer", lambda name: provider.get_tracer(name))
    return exported


def test_calls_of_a_step_become_one_span(exporter: InMemorySpanExporter) -> None:
    """The span is made only once the step is quiet; start and end enclose all layers; the parent is the
    engine's span.
    """
    recorder = SpanRecorder({"moebius.expert.server": 1})
    for recorded in (call(3, 2000), call(1, 1000), call(1, 5000, span_id=7)):
        recorder.add(recorded)
    assert recorder.flush(2010 + QUIET_NS) == 0
    assert recorder.flush(2011 + QUIET_NS) == 1
    (span,) = exporter.get_finished_spans()
    assert (span.start_time, span.end_time) == (1000, 2010)
    assert span.parent is not None
    assert (span.parent.trace_id, span.parent.span_id) == (TRACE, PARENT)
    assert [dict(event.attributes or {})["layer"] for event in span.events] == [1, 3]
    assert recorder.flush(0) == 1
    assert recorder.flush(0) == 0


@pytest.mark.parametrize("layers", [1, 2, 48, 300])
@pytest.mark.parametrize("flush_every", [0, 7])
def test_a_long_answer_keeps_every_layer_of_every_step(
    exporter: InMemorySpanExporter, layers: int, flush_every: int
) -> None:
    """However many steps of one request follow each other without a pause, and whenever they are exported: a
    span each, with an event for each layer, none dropped; those that are over are not kept till the end."""
    recorder, steps = SpanRecorder({}), 40
    for number in range(steps * layers):
        recorder.add(call(number % layers, 1000 + 20 * number))
        if flush_every and number % flush_every == 0:
            recorder.flush(1000 + 20 * number)
            if layers > 1:
                assert len(recorder._calls[TRACE, PARENT]) <= layers
    recorder.flush(0)
    spans = exporter.get_finished_spans()
    assert len(spans) == steps
    for number, span in enumerate(spans):
        events = [dict(event.attributes or {}) for event in span.events]
        assert [event["layer"] for event in events] == list(range(layers))
        assert span.dropped_events == 0
        assert span.start_time == 1000 + 20 * number * layers
        assert dict(span.attributes or {})["moebius.expert.compute_ns"] == 10 * layers


def test_pieces_of_a_layer_are_one_event(exporter: InMemorySpanExporter) -> None:
    """A long step asks for each layer several times: their rows and times are added up."""
    recorder = SpanRecorder({})
    for number in range(400):
        recorder.add(call(number // 200, 1000 + 20 * number))
    recorder.flush(0)
    (span,) = exporter.get_finished_spans()
    assert [dict(event.attributes or {}) for event in span.events] == [
        {"layer": layer, "rows": 800, "duration_ns": 2000, "calls": 200} for layer in (0, 1)
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"00-{TRACE:032x}-{PARENT:016x}-01", (TRACE, PARENT)),
        (f"00-{TRACE:032x}-{PARENT:016x}-00", None),
        (f"00-{0:032x}-{PARENT:016x}-01", None),
        (f"00-{TRACE:032x}-{'x' * 16}-01", None),
        ("", None),
    ],
)
def test_only_sampled_parents_count(text: str, expected: tuple[int, int] | None) -> None:
    """W3C trace context; malformed text is no error, since tracing must not fail a request."""
    assert sampled_parent(text) == expected
