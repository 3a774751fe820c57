"""The current span, when it is sampled, in the form that travels with a request.

The engine makes a span current only for steps whose experts shall be traced (`expert_span_ratio`).
"""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.trace import SpanContext


def sampled_span_context() -> SpanContext | None:
    """The current span's ids, or None when nothing is to be recorded."""
    context = trace.get_current_span().get_span_context()
    return context if context.is_valid and context.trace_flags.sampled else None


def traceparent(context: SpanContext) -> str:
    """W3C trace context, version 00."""
    ids = f"{trace.format_trace_id(context.trace_id)}-{trace.format_span_id(context.span_id)}"
    return f"00-{ids}-{context.trace_flags:02x}"
