"""An OTLP collector in this process: a gRPC TraceService that keeps the spans it is sent."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Received spans, in the order of their arrival."""

    def __init__(self) -> None:
        self._received: list[ResourceSpans] = []
        self._lock = threading.Lock()
        self.endpoint = ""

    def Export(self, request: Any, context: Any) -> Any:
        """Keeps what an exporter sends."""
        with self._lock:
            self._received += request.resource_spans
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Span]:
        """All spans so far."""
        with self._lock:
            return [span for group in self._received for scope in group.scope_spans for span in scope.spans]

    def spans_by_service(self) -> list[tuple[str, Span]]:
        """Every span with the `service.name` of its sender."""
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
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    collector.endpoint = f"http://127.0.0.1:{port}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None)
