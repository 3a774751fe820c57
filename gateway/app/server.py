"""The HTTP server of one gateway process: how it starts, drains and stops."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import structlog
import uvicorn

from gateway.app.application import create_app
from gateway.app.state import Gateway
from gateway.processes.shared import Shared
from gateway.prompts.fork_server import EarlyServer
from gateway.telemetry.metrics import GatewayMetrics
from gateway.transport.connections import ConnectionTable, connection_limits, protocol_for
from gateway.transport.streaming import DirectSend
from gateway.transport.tls import secured
from moebius.config import MoebiusConfig
from moebius.errors import UserError

logger = structlog.get_logger(__name__)
_POLL_S = 0.05
_CUT_S = 2.0  # time for requests that are cut to send their error
_CLOSE_S = 1  # time for connections without a request, once all answers are sent


class EndingServer(uvicorn.Server):
    """Returns after SIGTERM or SIGINT, where uvicorn would raise the signal again and kill the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles both signals while serving; the second one of either stops at once."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread can handle signals
            return

        def stop(number: int) -> None:
            logger.info("stopping", signal=signal.Signals(number).name)
            self.force_exit = self.should_exit
            self.should_exit = True

        # Handled by the event loop: a Python handler may interrupt a log call, and would wait for its lock.
        loop = asyncio.get_running_loop()
        previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        for number in previous:
            loop.add_signal_handler(number, stop, number)
        try:
            yield
        finally:
            for number, handler in previous.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)


class GatewayServer(EndingServer):
    """The server of one gateway."""

    broken: UserError | None = None  # why it ended on its own; set by `end_broken`

    def __init__(self, config: uvicorn.Config, gateway: Gateway, drain_s: float) -> None:
        """Running requests get `drain_s` seconds to finish at the end."""
        super().__init__(config)
        self.gateway = gateway
        self._drain = gateway.drain
        self._drain_s = drain_s

    @property
    def metrics(self) -> GatewayMetrics:
        """The metrics of this process."""
        return self.gateway.metrics

    @property
    def is_ready(self) -> bool:
        """Returns whether the model is known: until then, requests are answered 503."""
        return self.gateway.is_ready

    def retire(self) -> None:
        """Ends the server while others serve the port: it accepts nothing new, running requests finish."""
        for one in self.servers:
            one.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        self.should_exit = True

    def end_broken(self, error: UserError) -> None:
        """Ends the server because it can never answer a request."""
        self.broken = error
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drains first: until then the port stays open, so that late requests get 503 with Retry-After."""
        drain = self._drain
        drain.begin()
        if drain.in_flight:
            logger.info("draining", requests=drain.in_flight, timeout_s=self._drain_s)
        await self._wait_idle(self._drain_s, lambda: self.force_exit)
        if drain.in_flight:
            logger.warning("the shutdown ends requests with incomplete answers", requests=drain.in_flight)
            drain.cut()
            await self._wait_idle(_CUT_S, lambda: False)
        self.force_exit = False  # the rest is fast, and closes what is open
        await super().shutdown(sockets)

    async def _wait_idle(self, timeout_s: float, given_up: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout_s
        while self._drain.in_flight and time.monotonic() < deadline:
            if given_up():
                return
            await asyncio.sleep(_POLL_S)


def server_for(
    config: MoebiusConfig, shared: Shared | None = None, early: EarlyServer | None = None
) -> GatewayServer:
    """Returns the HTTP server, not yet started; also used by tests, which run it in a thread.

    `shared`: the state shared with other processes of its port; None: it is alone. `early`: what prompt
    processes are forked from.
    Raises ConfigError.
    """
    limits = connection_limits(config.gateway)
    app = create_app(config, lambda error: server.end_broken(error), shared, early)
    metrics: GatewayMetrics = app.state.gateway.metrics
    protocol = protocol_for(ConnectionTable(limits, metrics.connection_closed))
    settings = uvicorn.Config(
        DirectSend(app),
        host=config.gateway.host,
        port=config.gateway.port,
        log_config=None,
        access_log=False,
        lifespan="on",
        http=secured(protocol, config, limits, metrics.connection_closed),  # type: ignore[arg-type]
        ws="none",
        # The proxies on this machine whose `X-Forwarded-For` is trusted; not from the environment.
        forwarded_allow_ips=["127.0.0.1", "::1"],
        backlog=limits.backlog,
        timeout_keep_alive=limits.idle_timeout_s,
        timeout_graceful_shutdown=_CLOSE_S,
    )
    server = GatewayServer(settings, app.state.gateway, config.supervisor.stop_timeout_s)
    metrics.count_connections(lambda: len(server.server_state.connections))
    return server
