"""The Prometheus endpoint of a process that has no HTTP server of its own."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from wsgiref.simple_server import WSGIServer

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server

from moebius.errors import UserError


@dataclass(frozen=True)
class MetricsServer:
    """A running endpoint; filled by `start_metrics_server`."""

    server: WSGIServer
    thread: threading.Thread

    @property
    def port(self) -> int:
        """The TCP port it listens on."""
        return self.server.server_port

    def close(self) -> None:
        """Stops answering and frees the port."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def start_metrics_server(
    port: int, registry: CollectorRegistry = REGISTRY, host: str = "127.0.0.1"
) -> MetricsServer | None:
    """Serves `GET /metrics` on `host` from a thread; port 0 means none (returns None).

    Raises UserError when host or port can not be bound.
    """
    if port == 0:
        return None
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise UserError(f"cannot serve metrics on {host}:{port} (metrics_host): {error.strerror}") from None
    return MetricsServer(server, thread)
