"""Guards the metrics endpoint: it serves the registry, frees its port, and names a port it can not have."""

from __future__ import annotations

import socket

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from moebius.config import TelemetryConfig
from moebius.errors import UserError
from moebius.telemetry import start_metrics_server


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_serves_the_registry_until_closed() -> None:
    """`GET /metrics` shows the counters; after close nobody answers."""
    registry = CollectorRegistry()
    Counter("moebius_test_steps", "Steps", registry=registry).inc(3)
    server = start_metrics_server(free_port(), registry, host="127.0.0.1")
    assert server is not None
    url = f"http://127.0.0.1:{server.port}/metrics"
    assert "moebius_test_steps_total 3.0" in httpx.get(url, trust_env=False).text
    server.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)


def test_only_this_machine_can_ask_unless_configured_otherwise() -> None:
    """The default binds to the loopback address alone; `metrics_host` opens it, and is named when wrong."""
    assert TelemetryConfig().metrics_host == "127.0.0.1"
    server = start_metrics_server(free_port(), CollectorRegistry())
    assert server is not None
    assert server.server.server_address[0] == "127.0.0.1"
    server.close()
    with pytest.raises(UserError, match="metrics_host"):
        start_metrics_server(free_port(), CollectorRegistry(), host="192.0.2.1")


def test_port_zero_means_none() -> None:
    """The default starts no server."""
    assert start_metrics_server(0) is None


def test_taken_port_is_named() -> None:
    """A port in use is the user's to mend: one message with the address."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port}"):
            start_metrics_server(port, host="127.0.0.1")
