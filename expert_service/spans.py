"""Exports the expert work of sampled steps as OpenTelemetry spans.

A span per layer and token would overload any collector, so all calls of one step become one span with an
event per layer. Calls carry the span of their request, so a step ends when the request's layers start
over: a span of a whole answer would lose most of its events to the limit per span.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import structlog
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

_log = structlog.get_logger(__name__)
# A step also ends when its request has had no calls for this long.
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
    _layers: set[int] = field(default_factory=set)  # all layers seen so far
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, call: Call) -> None:
        """Adds one call."""
        with self._lock:
            self._layers.add(call.layer)
            self._calls.setdefault((call.trace_id, call.span_id), []).append(call)

    def flush(self, now_unix_ns: int | None = None) -> int:
        """Exports steps that are followed by another one of their request, or have been quiet for 0.5 s (all
        of them when `now_unix_ns` is 0). Returns their number."""
        now = time.time_ns() if now_unix_ns is None else now_unix_ns
        finished: list[list[Call]] = []
        with self._lock:
            for key, calls in list(self._calls.items()):
                steps = steps_of(calls, len(self._layers) == 1)
                if now and _end(calls) >= now - QUIET_NS:
                    self._calls[key] = steps.pop()
                else:
                    del self._calls[key]
                finished += steps
        for step in finished:
            self._export(step)
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
        layers: dict[int, list[Call]] = {}
        for call in calls:  # long steps call a layer in several pieces
            layers.setdefault(call.layer, []).append(call)
        for layer, pieces in layers.items():
            attributes = {
                "layer": layer,
                "rows": sum(piece.rows for piece in pieces),
                "duration_ns": sum(piece.duration_ns for piece in pieces),
                "calls": len(pieces),
            }
            span.add_event("moebius.expert.layer", attributes, timestamp=pieces[0].start_unix_ns)
        span.end(end_time=_end(calls))
        _log.debug(
            "sampled step",
            trace_id=trace.format_trace_id(first.trace_id),
            layers=len(layers),
            rows=first.rows,
            compute_ms=round(sum(call.duration_ns for call in calls) / 1e6, 3),
        )


def steps_of(calls: list[Call], has_one_layer: bool) -> list[list[Call]]:
    """Splits one request's calls, in order of their beginning, into steps, within which layers ascend. In a
    model with one such layer each call is a step."""
    ordered = sorted(calls, key=lambda call: call.start_unix_ns)
    steps: list[list[Call]] = []
    for call in ordered:
        if not steps or has_one_layer or call.layer < steps[-1][-1].layer:
            steps.append([])
        steps[-1].append(call)
    return steps


def _end(calls: list[Call]) -> int:
    return max(call.start_unix_ns + call.duration_ns for call in calls)


def sampled_parent(traceparent: str) -> tuple[int, int] | None:
    """Returns trace and span id of a W3C `traceparent` whose sampled flag is set; None for any other text."""
    parts = traceparent.split("-")
    if len(parts) != 4 or [len(part) for part in parts] != [2, 32, 16, 2]:
        return None
    try:
        trace_id, span_id, flags = (int(part, 16) for part in parts[1:])
    except ValueError:
        return None
    return (trace_id, span_id) if flags & TraceFlags.SAMPLED and trace_id and span_id else None
