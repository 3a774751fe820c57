"""Structured logs on stderr, for people (`console`) or for machines (`json`, one object a line).

Lines written inside a span carry its `trace_id` and `span_id` (lower-case hex, as in `traceparent`), so a
trace and its log lines find one another. The standard library's loggers (uvicorn, grpc, transformers)
are rendered by the same processors.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog
from opentelemetry import trace
from structlog.typing import EventDict, Processor, WrappedLogger

from moebius.config import TelemetryConfig

# Libraries whose "info" is a debug trace to an operator.
QUIET_LOGGERS = ("httpx", "httpcore", "urllib3", "asyncio", "grpc", "uvicorn.access", "filelock")


def configure_logging(settings: TelemetryConfig, process: str) -> None:
    """Makes structlog and the standard library log to stderr.

    `process` ("gateway", "gpu", "expert-0") stands in each JSON object; console lines get it as a prefix
    from the supervisor, which also prefixes what did not come through a logger. Calling again replaces
    the earlier set-up.
    """
    level = logging.getLevelName(settings.log_level.upper())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.StackInfoRenderer(),
        _add_trace_context,
    ]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=_renderers(settings.log_format, process)
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def _renderers(log_format: str, process: str) -> list[Processor]:
    """The last processors: from an event dict to the line."""

    def add_process(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        event["process"] = process
        return event

    remove_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if log_format == "json":
        return [
            remove_meta,
            add_process,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ]
    return [
        remove_meta,
        structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
        structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
        ),
    ]


def _add_trace_context(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Adds the ids of the span that is current where the line is written."""
    context: Any = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = trace.format_trace_id(context.trace_id)
        event["span_id"] = trace.format_span_id(context.span_id)
    return event
