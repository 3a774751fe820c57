"""OpenTelemetry traces: one from the HTTP request through gRPC to the engine and the expert servers.

Nothing is read from OTEL_* environment variables: every setting is in `moebius/config.py`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler, TraceIdRatioBased

from moebius import __version__
from moebius.config import TelemetryConfig

EXPORT_INTERVAL_MS = 1000
EXPORT_TIMEOUT_MS = 5000
MAX_QUEUED_SPANS = 8192
MAX_BATCH_SPANS = 512


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
        resource=_resource(service_name, attributes or {}),
        shutdown_on_exit=True,
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


def tracer() -> trace.Tracer:
    """The tracer every part of Moebius uses."""
    return trace.get_tracer("moebius", __version__)


def _sampler(settings: TelemetryConfig) -> Sampler:
    if not settings.otlp_endpoint:
        return ALWAYS_OFF
    return ParentBased(TraceIdRatioBased(settings.trace_sample_ratio))


def _resource(service_name: str, attributes: Mapping[str, Any]) -> Resource:
    """Semantic-convention attributes of this process."""
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
