"""Logs (structlog), traces (OpenTelemetry) and metrics (Prometheus), set up alike in every process.

A process calls `configure_logging`, `configure_tracing` and, if it has a metrics port,
`start_metrics_server` once at the start of its `run()`. Everything else uses the libraries themselves:
`structlog.get_logger(__name__)`, `opentelemetry.trace.get_tracer("moebius")`, `prometheus_client`.
"""

from moebius.telemetry.logging import configure_logging
from moebius.telemetry.metrics import MetricsServer, start_metrics_server
from moebius.telemetry.reflection import enable_reflection
from moebius.telemetry.tracing import configure_tracing, tracer

__all__ = [
    "MetricsServer",
    "configure_logging",
    "configure_tracing",
    "enable_reflection",
    "start_metrics_server",
    "tracer",
]
