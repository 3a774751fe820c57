"""Guards the port for operators: it serves metrics and probes, frees its port, names one it cannot have."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from moebius.config import TelemetryConfig
from moebius.errors import UserError
from moebius.process.operations import (
    Answers,
    LoopWatch,
    OperationsServer,
    ProcessState,
    registry_text,
    start_operations,
)
from tests.helpers.ports import free_port


def start(
    port: int,
    registry: CollectorRegistry | None = None,
    host: str = "127.0.0.1",
    state: ProcessState | None = None,
) -> OperationsServer | None:
    """Returns a server for `registry` and `state`."""
    found, now = registry or CollectorRegistry(), state or ProcessState()
    return start_operations(port, host, Answers(lambda: registry_text(found), lambda: now))


def test_serves_the_registry_until_closed() -> None:
    """`GET /metrics` shows the counters; after close nothing answers."""
    registry = CollectorRegistry()
    Counter("moebius_test_steps", "Steps", registry=registry).inc(3)
    server = start(free_port(), registry)
    assert server is not None
    url = f"http://127.0.0.1:{server.port}/metrics"
    assert "moebius_test_steps_total 3.0" in httpx.get(url, trust_env=False).text
    server.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)


def test_only_this_machine_can_ask_unless_configured_otherwise() -> None:
    """The default binds to the loopback address alone; `metrics_host` opens it, and is named when wrong."""
    assert TelemetryConfig().metrics_host == "127.0.0.1"
    server = start(free_port())
    assert server is not None
    assert server.server.server_address[0] == "127.0.0.1"
    server.close()
    with pytest.raises(UserError, match="metrics_host"):
        start(free_port(), host="192.0.2.1")


def test_port_zero_means_none() -> None:
    """The default starts no server."""
    assert start(0) is None


def test_taken_port_is_named() -> None:
    """A port in use is an error of the user: one message has the address."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port}"):
            start(port)


def test_probes_say_what_the_process_says() -> None:
    """Loading is alive but not ready, with the reason; ready is both; broken is neither."""
    state = ProcessState("the model is still loading")
    server = start(free_port(), state=state)
    assert server is not None
    url = f"http://127.0.0.1:{server.port}"

    def answers() -> list[tuple[int, str]]:
        found = [httpx.get(url + path, trust_env=False) for path in ("/health", "/ready")]
        return [(one.status_code, one.text.strip()) for one in found]

    assert answers() == [(200, "ok"), (503, "the model is still loading")]
    state.not_ready = ""
    assert answers() == [(200, "ok"), (200, "ok")]
    state.broken = "the engine has ended"
    assert answers() == [(503, "the engine has ended"), (503, "the engine has ended")]
    assert httpx.get(f"{url}/elsewhere", trust_env=False).status_code == 404
    server.close()


async def test_a_loop_that_stands_still_is_broken() -> None:
    """While it goes round, or has not begun, what the process says is passed on; a silent one is neither
    ready nor alive, whatever was said before."""
    now, state = [100.0], ProcessState("")
    watch = LoopWatch(30.0, lambda: now[0])
    assert watch.judged(state) is state
    beating = asyncio.create_task(watch.beat())
    await asyncio.sleep(0)
    now[0] += 29
    assert watch.judged(state) is state
    now[0] += 2
    judged = watch.judged(state)
    assert judged.broken == judged.not_ready == "the event loop has not answered for 31 s"
    beating.cancel()


def test_a_failing_scrape_is_an_answer() -> None:
    """An error while metrics are made is a 500 and a log line, not a broken connection."""

    def fail() -> bytes:
        raise RuntimeError("no metrics today")

    server = start_operations(free_port(), "127.0.0.1", Answers(fail, ProcessState))
    assert server is not None
    assert httpx.get(f"http://127.0.0.1:{server.port}/metrics", trust_env=False).status_code == 500
    server.close()
