"""An OTLP collector in this process: it keeps the spans and metrics it is sent."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Iterator
from typing import Any, cast

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric, ResourceMetrics
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span


class _MetricsService(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Received metrics."""

    def __init__(self) -> None:
        self.groups: list[ResourceMetrics] = []

    def Export(self, request: Any, context: Any) -> Any:
        """Keeps what an exporter sends."""
        self.groups += request.resource_metrics
        return metrics_service_pb2.ExportMetricsServiceResponse()


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Received spans, in the order of their arrival."""

    def __init__(self) -> None:
        self._received: list[ResourceSpans] = []
        self._lock = threading.Lock()
        self.endpoint = ""
        self.received_metrics = _MetricsService()

    def Export(self, request: Any, context: Any) -> Any:
        """Keeps what an exporter sends."""
        with self._lock:
            self._received += request.resource_spans
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def metrics(self) -> list[Metric]:
        """All metrics so far, each as often as it was sent."""
        groups = list(self.received_metrics.groups)
        return [metric for group in groups for scope in group.scope_metrics for metric in scope.metrics]

    @property
    def metric_services(self) -> set[str]:
        """`service.name` of all who sent metrics."""
        return {
            item.value.string_value
            for group in list(self.received_metrics.groups)
            for item in group.resource.attributes
            if item.key == "service.name"
        }

    @property
    def spans(self) -> list[Span]:
        """All spans so far."""
        with self._lock:
            return [span for group in self._received for scope in group.scope_spans for span in scope.spans]

    def spans_by_service(self) -> list[tuple[str, Span]]:
        """Returns every span with the `service.name` of its sender."""
        with self._lock:
            groups = list(self._received)
        pairs = []
        for group in groups:
            named = {item.key: item.value.string_value for item in group.resource.attributes}
            service = named.get("service.name", "")
            pairs += [(service, span) for scope in group.scope_spans for span in scope.spans]
        return pairs

    @property
    def resources(self) -> list[dict[str, str]]:
        """The text attributes of each sender's resource."""
        with self._lock:
            return [
                {item.key: item.value.string_value for item in group.resource.attributes}
                for group in self._received
            ]


@contextlib.contextmanager
def running_collector() -> Iterator[Collector]:
    """A collector on a free port of this machine."""
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
    collector = Collector()
    for register, servicer in (
        (cast(Any, trace_service_pb2_grpc).add_TraceServiceServicer_to_server, collector),
        (
            cast(Any, metrics_service_pb2_grpc).add_MetricsServiceServicer_to_server,
            collector.received_metrics,
        ),
    ):
        register(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    collector.endpoint = f"http://127.0.0.1:{port}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None)
