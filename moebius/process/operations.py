"""What operators ask a process, on a port of its own: metrics and probes over plain HTTP.

A kubelet's probes bring no client certificate and its gRPC probe speaks no TLS, and metrics are not for
every client that may send requests: so this is a port, and a host, apart from those that serve. It is
answered by threads, so a process that is busy answers, too.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import structlog

from moebius.errors import UserError
from moebius.network.web_origins import Sender, WebOrigins

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

    from prometheus_client import CollectorRegistry

_log = structlog.get_logger(__name__)
# Of an engine's health answers: why a request sent now would not be answered, UTF-8.
NOT_READY_METADATA = "moebius-not-ready-bin"
_BEAT_S = 1.0
_TEXT = "text/plain; charset=utf-8"


@dataclass
class ProcessState:
    """What probes are answered; filled by the process as it goes on."""

    # Why a request sent now would not be answered; empty: it would.
    not_ready: str = "still starting"
    # Why the process should be restarted; empty: it works, be it that it loads or waits for others.
    broken: str = ""


class LoopWatch:
    """Whether an event loop still goes round, for threads that answer probes.

    A process whose loop stands still answers no request, though its other threads go on.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`limit_s`: silence that no healthy loop has, not even one that loads or drains."""
        self._limit_s = limit_s
        self._clock = clock
        self._seen: float | None = None  # None: there is no loop yet

    async def beat(self) -> None:
        """Runs on the loop; never returns."""
        while True:
            self._seen = self._clock()
            await asyncio.sleep(_BEAT_S)

    def judged(self, state: ProcessState) -> ProcessState:
        """Returns `state`, unless the loop is silent."""
        silent_s = 0.0 if self._seen is None else self._clock() - self._seen
        if silent_s <= self._limit_s:
            return state
        reason = f"the event loop has not answered for {silent_s:.0f} s"
        return ProcessState(reason, reason)


@dataclass(frozen=True)
class Answers:
    """How the paths are answered; called from threads."""

    metrics: Callable[[], bytes]  # exposition text of Prometheus
    state: Callable[[], ProcessState]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = 10  # for a client that says nothing

    def log_message(self, format: str, *arguments: Any) -> None:
        """Probes are no news."""


@dataclass(frozen=True)
class OperationsServer:
    """A running endpoint; filled by `start_operations`."""

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


def registry_text(registry: CollectorRegistry | None = None) -> bytes:
    """Returns all of a registry as exposition text; None: the library's own."""
    from prometheus_client import REGISTRY, generate_latest

    return generate_latest(registry or REGISTRY)


def start_operations(
    port: int, host: str, answers: Answers, allowed_hosts: tuple[str, ...] = ()
) -> OperationsServer | None:
    """Serves `/metrics`, `/health` and `/ready` on `host` from threads; port 0 means none (returns None).

    `/health` is 200 while the process works, also while it loads; `/ready` while it would answer a request;
    else 503 with the reason. Web pages are refused with 403, as are names that are not in `allowed_hosts`,
    the setting. Raises UserError when host or port cannot be bound.
    """
    if port == 0:
        return None
    kind = _Server6 if ":" in host else _Server
    rules = WebOrigins(host, allowed_hosts)

    def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        status, kind, body = _refused(environ, rules) or _answer(environ["PATH_INFO"], answers)
        start(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
        return [body]

    try:
        server = make_server(host, port, answer, kind, _Handler)
    except OSError as error:
        raise UserError(f"cannot serve metrics on {host}:{port} (metrics_host): {error.strerror}") from None
    thread = threading.Thread(target=server.serve_forever, name="operations", daemon=True)
    thread.start()
    return OperationsServer(server, thread)


def _refused(environ: WSGIEnvironment, rules: WebOrigins) -> tuple[str, str, bytes] | None:
    """Returns the answer to a web page of another site; None: it is none that sends the request."""
    sender = Sender(
        environ["REQUEST_METHOD"],
        environ.get("HTTP_HOST", ""),
        environ.get("HTTP_ORIGIN", ""),
        environ.get("HTTP_SEC_FETCH_SITE", ""),
    )
    reason = rules.refused_host(sender) or rules.refused_origin(sender)
    return ("403 Forbidden", _TEXT, f"{reason}\n".encode()) if reason else None


def _answer(path: str, answers: Answers) -> tuple[str, str, bytes]:
    """Returns status line, content type and body."""
    if path == "/metrics":
        try:
            return "200 OK", "text/plain; version=0.0.4; charset=utf-8", answers.metrics()
        except Exception:
            _log.exception("metrics could not be made")
            return "500 Internal Server Error", _TEXT, b"metrics could not be made; see the log\n"
    if path not in ("/health", "/ready"):
        return "404 Not Found", _TEXT, b"there are /metrics, /health and /ready\n"
    state = answers.state()
    problem = state.broken or (state.not_ready if path == "/ready" else "")
    if problem:
        return "503 Service Unavailable", _TEXT, f"{problem}\n".encode()
    return "200 OK", _TEXT, b"ok\n"
