"""Expert work of sampled steps as OpenTelemetry spans.

A span per layer and token would drown every collector, so all calls of one step (they carry the same
parent span) become one span with an event per layer.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import structlog
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

_log = structlog.get_logger(__name__)
# A step whose parent was not heard of for this long is over.
QUIET_NS = 500_000_000


@dataclass(frozen=True, slots=True)
class Call:
    """One sampled forward pass; filled by the mailbox server or by `Compute`."""

    trace_id: int
    span_id: int
    layer: int
    rows: int
    start_unix_ns: int
    duration_ns: int
    transport: str


@dataclass(slots=True)
class SpanRecorder:
    """Collects calls from any thread; `flush` exports the steps that are over."""

    attributes: dict[str, str | int]
    _calls: dict[tuple[int, int], list[Call]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, call: Call) -> None:
        """Remember one call."""
        with self._lock:
            self._calls.setdefault((call.trace_id, call.span_id), []).append(call)

    def flush(self, now_unix_ns: int | None = None) -> int:
        """Export steps that have been quiet for 0.5 s (all of them when `now_unix_ns` is 0); how many."""
        now = time.time_ns() if now_unix_ns is None else now_unix_ns
        with self._lock:
            over = [key for key, calls in self._calls.items() if not now or _end(calls) < now - QUIET_NS]
            finished = [self._calls.pop(key) for key in over]
        for calls in finished:
            self._export(calls)
        return len(finished)

    def _export(self, calls: list[Call]) -> None:
        first = calls[0]
        parent = SpanContext(first.trace_id, first.span_id, True, TraceFlags(TraceFlags.SAMPLED))
        context = trace.set_span_in_context(NonRecordingSpan(parent))
        span = trace.get_tracer("moebius").start_span(
            "moebius.expert.step",
            context=context,
            kind=trace.SpanKind.SERVER,
            start_time=min(call.start_unix_ns for call in calls),
            attributes={
                **self.attributes,
                "moebius.expert.transport": first.transport,
                "moebius.expert.compute_ns": sum(call.duration_ns for call in calls),
            },
        )
        for call in calls:
            attributes = {"layer": call.layer, "rows": call.rows, "duration_ns": call.duration_ns}
            span.add_event("moebius.expert.layer", attributes, timestamp=call.start_unix_ns)
        span.end(end_time=_end(calls))
        _log.debug(
            "sampled step",
            trace_id=trace.format_trace_id(first.trace_id),
            layers=len(calls),
            rows=first.rows,
            compute_ms=round(sum(call.duration_ns for call in calls) / 1e6, 3),
        )


def _end(calls: list[Call]) -> int:
    return max(call.start_unix_ns + call.duration_ns for call in calls)


def sampled_parent(traceparent: str) -> tuple[int, int] | None:
    """Trace and span id of a W3C `traceparent` whose sampled flag is set; None for any other text."""
    parts = traceparent.split("-")
    if len(parts) != 4 or [len(part) for part in parts] != [2, 32, 16, 2]:
        return None
    try:
        trace_id, span_id, flags = (int(part, 16) for part in parts[1:])
    except ValueError:
        return None
    return (trace_id, span_id) if flags & TraceFlags.SAMPLED and trace_id and span_id else None
