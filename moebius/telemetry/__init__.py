"""Logs (structlog), traces (OpenTelemetry) and metrics (Prometheus), set up alike in every process.

A process calls `configure_logging`, `configure_tracing` and, if it has a metrics port,
`operations.start_operations` once at the start of its `run()`. Everything else uses the libraries themselves:
`structlog.get_logger(__name__)`, `opentelemetry.trace.get_tracer("moebius")`, `prometheus_client`.

Lines written inside a span carry its `trace_id` and `span_id` (lower-case hex, as in `traceparent`), so a
trace and its log lines find one another. The standard library's loggers (uvicorn, grpc, transformers)
are rendered by the same processors.

Nothing is read from OTEL_* environment variables: every setting is in `moebius/config/__init__.py`.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import grpc
import structlog
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import SpanContext
from structlog.typing import EventDict, Processor, WrappedLogger

from moebius import __version__
from moebius.config import TelemetryConfig

if TYPE_CHECKING:
    from prometheus_client import Metric

__all__ = [
    "configure_logging",
    "configure_tracing",
    "enable_reflection",
    "export_metrics",
    "process_resource",
    "sampled_span_context",
    "traceparent",
    "tracer",
]


# Libraries whose "info" is a debug trace to an operator.
QUIET_LOGGERS = (
    "httpx",
    "httpcore",
    "urllib3",
    "asyncio",
    "grpc",
    "uvicorn.access",
    "uvicorn.error",
    "filelock",
)


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
    """Returns the last processors: from an event dict to the line."""

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


def sampled_span_context() -> SpanContext | None:
    """Returns the current span's ids, or None when nothing is to be recorded."""
    context = trace.get_current_span().get_span_context()
    return context if context.is_valid and context.trace_flags.sampled else None


def traceparent(context: SpanContext) -> str:
    """Returns the W3C trace context, version 00."""
    ids = f"{trace.format_trace_id(context.trace_id)}-{trace.format_span_id(context.span_id)}"
    return f"00-{ids}-{context.trace_flags:02x}"


EXPORT_INTERVAL_MS = 1000
EXPORT_TIMEOUT_MS = 5000
MAX_QUEUED_SPANS = 8192
MAX_BATCH_SPANS = 512
MAX_SPAN_EVENTS = 1024


def configure_tracing(
    settings: TelemetryConfig, service_name: str, attributes: Mapping[str, Any] | None = None
) -> TracerProvider:
    """Installs the process's tracer provider and returns it; call its `shutdown()` before exit to flush.

    `service_name` is e.g. "moebius-gateway"; `attributes` are added to the resource (NUMA node, split
    index). A request whose caller sent a sampled (or unsampled) `traceparent` follows the caller; others
    are sampled with `trace_sample_ratio`. Without `otlp_endpoint` nothing is recorded, but ids are still
    made and propagated, so that log lines of one request can be joined. An installed provider stays for
    the life of the process (OpenTelemetry's rule); a second call returns one that is not installed.
    """
    provider = TracerProvider(
        sampler=_sampler(settings),
        resource=process_resource(service_name, attributes or {}),
        shutdown_on_exit=True,
        # One for each layer of experts; the library's own limit, 128, is also read from the environment.
        span_limits=SpanLimits(max_events=MAX_SPAN_EVENTS),
    )
    if settings.otlp_endpoint:
        provider.add_span_processor(
            BatchSpanProcessor(
                _exporter(settings.otlp_endpoint),
                max_queue_size=MAX_QUEUED_SPANS,
                schedule_delay_millis=EXPORT_INTERVAL_MS,
                max_export_batch_size=MAX_BATCH_SPANS,
                export_timeout_millis=EXPORT_TIMEOUT_MS,
            )
        )
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(provider)
    return provider


def export_metrics(
    settings: TelemetryConfig,
    service_name: str,
    collect: Callable[[], Iterable[Metric]],
    attributes: Mapping[str, Any] | None = None,
) -> Callable[[], None]:
    """Sends metrics to `otlp_endpoint` from now on, if that is configured; returns what ends it, to be called
    before exit: it sends the last figures.

    `collect` gives the families of the process's Prometheus registry, and is called from a thread.
    `service_name` and `attributes` as those of `configure_tracing`.
    """
    if not settings.otlp_endpoint or not settings.otlp_metrics_interval_s:
        return lambda: None
    from moebius.telemetry.otlp_metrics import configure_metrics

    provider = configure_metrics(settings, service_name, collect, attributes or {})
    return provider.shutdown


@functools.cache
def tracer() -> trace.Tracer:
    """The tracer every part of Moebius uses; one that was taken before tracing was set up uses that, too."""
    return trace.get_tracer("moebius", __version__)


def _sampler(settings: TelemetryConfig) -> Sampler:
    if not settings.otlp_endpoint:
        return ALWAYS_OFF
    return ParentBased(TraceIdRatioBased(settings.trace_sample_ratio))


def process_resource(service_name: str, attributes: Mapping[str, Any]) -> Resource:
    """Returns semantic-convention attributes of this process, for traces and metrics."""
    return Resource(
        {
            "service.name": service_name,
            "service.namespace": "moebius",
            "service.version": __version__,
            "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
            "host.name": socket.gethostname(),
            "process.pid": os.getpid(),
            **attributes,
        }
    )


def _exporter(endpoint: str) -> SpanExporter:
    """OTLP over gRPC; `https://` means TLS with the system's certificates, anything else plain text."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(
        endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=EXPORT_TIMEOUT_MS // 1000
    )


def enable_reflection(server: grpc.Server | grpc.aio.Server, *services: str) -> None:
    """Adds reflection of `services` and of the health service to a server that has not started."""
    from grpc_health.v1 import health
    from grpc_reflection.v1alpha import reflection

    reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
