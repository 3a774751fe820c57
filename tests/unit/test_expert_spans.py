"""Guards expert tracing: one span per sampled step below its parent, an event per layer, else nothing."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from expert_service.spans import QUIET_NS, Call, SpanRecorder, sampled_parent

TRACE, PARENT = 0xABC, 0xDEF


def call(layer: int, start: int, span_id: int = PARENT) -> Call:
    """Ten nanoseconds of work."""
    return Call(TRACE, span_id, layer, 4, start, 10, "mailbox")


def test_calls_of_a_step_become_one_span(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only once the step is quiet; start and end enclose all layers; the parent is the engine's span."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", lambda name: provider.get_tracer(name))
    recorder = SpanRecorder({"moebius.expert.server": 1})
    for recorded in (call(3, 2000), call(1, 1000), call(1, 5000, span_id=7)):
        recorder.add(recorded)
    assert recorder.flush(2010 + QUIET_NS) == 0
    assert recorder.flush(2011 + QUIET_NS) == 1
    (span,) = exporter.get_finished_spans()
    assert (span.start_time, span.end_time) == (1000, 2010)
    assert span.parent is not None
    assert (span.parent.trace_id, span.parent.span_id) == (TRACE, PARENT)
    assert [dict(event.attributes or {})["layer"] for event in span.events] == [3, 1]
    assert recorder.flush(0) == 1
    assert recorder.flush(0) == 0


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
