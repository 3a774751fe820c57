"""The gateway process."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import structlog
import uvicorn
import uvloop

from gateway.app import create_app
from gateway.connections import ConnectionTable, connection_limits, protocol_for
from gateway.metrics import GatewayMetrics
from moebius.config import MoebiusConfig
from moebius.errors import StartupError
from moebius.telemetry.logging import configure_logging
from moebius.telemetry.tracing import configure_tracing

logger = structlog.get_logger(__name__)
_STREAM_GRACE_S = 10  # open streams may go on this long after SIGTERM


class GatewayServer(uvicorn.Server):
    """Stops on SIGTERM and SIGINT and returns, where uvicorn would kill its process with the signal again."""

    broken: str | None = None  # why it ended by itself; set by `end_broken`

    def end_broken(self, reason: str) -> None:
        """Ends the server because it could never answer a request."""
        self.broken = reason
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles both signals while serving; the second SIGINT stops at once."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals belong to the main thread
            return

        def stop(number: int, frame: FrameType | None) -> None:
            logger.info("stopping", signal=signal.Signals(number).name)
            self.handle_exit(number, frame)

        previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def server_for(config: MoebiusConfig) -> GatewayServer:
    """The HTTP server, not yet started; also used by tests, which run it in a thread.

    Raises ConfigError.
    """
    limits = connection_limits(config.gateway)
    app = create_app(config, on_broken=lambda reason: server.end_broken(reason))
    metrics: GatewayMetrics = app.state.gateway.metrics
    settings = uvicorn.Config(
        app,
        host=config.gateway.host,
        port=config.gateway.port,
        log_config=None,
        access_log=False,
        lifespan="on",
        http=protocol_for(ConnectionTable(limits, metrics.connection_closed)),
        ws="none",
        backlog=limits.backlog,
        timeout_keep_alive=limits.idle_timeout_s,
        timeout_graceful_shutdown=_STREAM_GRACE_S,
    )
    server = GatewayServer(settings)
    metrics.count_connections(lambda: len(server.server_state.connections))
    return server


def run(config: MoebiusConfig) -> int:
    """Serves HTTP until SIGTERM or SIGINT. Returns the exit code: 0, or 1 when the server could not start.

    Raises StartupError when the model's files can not be used.
    """
    configure_logging(config.telemetry, "gateway")
    tracing = configure_tracing(config.telemetry, "moebius-gateway")
    server = server_for(config)
    logger.info(
        "gateway starts",
        host=config.gateway.host,
        port=config.gateway.port,
        engine=config.gateway.engine_address,
    )
    try:
        uvloop.run(server.serve())
    except SystemExit:  # uvicorn leaves this way when the port is taken
        return 1
    finally:
        tracing.shutdown()  # sends the last spans
    if server.broken is not None:
        raise StartupError(server.broken)
    return 0 if server.started else 1
