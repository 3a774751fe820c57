"""The gateway's first process, which serves by itself or starts those that do."""

from __future__ import annotations

import os
import socket

import structlog
import uvloop

from gateway.apis.stored_responses import shared_store
from gateway.app.server import GatewayServer, server_for
from gateway.batches.files import check_directory
from gateway.prompts import worker
from gateway.prompts.fork_server import EarlyServer
from gateway.telemetry.operations import gateway_operations
from gateway.transport.connections import connection_limits
from gateway.workers.group import Group
from moebius.config import MoebiusConfig
from moebius.errors import StartupError
from moebius.network.api_keys import ApiKeys
from moebius.network.tls import configure_tls, http_files, read_credentials
from moebius.process.garbage import collect_rarely
from moebius.telemetry import configure_logging, configure_tracing, export_metrics

logger = structlog.get_logger(__name__)


def check_address(host: str, port: int) -> None:
    """Raises StartupError when a server could not listen there; uvicorn would only log that."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise StartupError(f"cannot serve HTTP on {host}:{port} (--host, --port): {reason}") from None


def run(config: MoebiusConfig) -> int:
    """Serves HTTP until SIGTERM or SIGINT. Returns the exit code: 0, or 1 when the server could not start.

    Raises StartupError when the address or the model's files cannot be used, ConfigError for other settings.
    """
    # Before there are threads, log handlers and connections.
    early = EarlyServer(worker.main) if config.gateway.workers == 1 else None
    configure_logging(config.telemetry, "gateway")
    tracing = configure_tracing(config.telemetry, "moebius-gateway")
    configure_tls(config.security)
    check_address(config.gateway.host, config.gateway.port)
    logger.info(
        "gateway starts",
        host=config.gateway.host,
        port=config.gateway.port,
        engine=", ".join(config.gateway.engines) or config.gateway.engine_address,
        workers=config.gateway.workers,
    )
    if config.gateway.workers > 1:
        connection_limits(config.gateway)  # errors of the settings are reported once, here
        ApiKeys(config.gateway.api_key, config.gateway.api_key_file)
        check_directory(config.gateway)
        if (files := http_files(config.security)) is not None:
            read_credentials(files)
        collect_rarely()
        return uvloop.run(_serve_with_others(config))
    server = server_for(config, early=early)
    end_metrics = export_metrics(config.telemetry, "moebius-gateway", server.metrics.registry.collect)
    collect_rarely()
    try:
        uvloop.run(_serve_alone(config, server))
    except SystemExit:  # uvicorn exits if the port was taken in the meantime
        return 1
    finally:
        end_metrics()
        tracing.shutdown()  # sends the last spans
    if server.broken is not None:
        raise server.broken
    return 0 if server.started else 1


async def _serve_alone(config: MoebiusConfig, server: GatewayServer) -> None:
    with gateway_operations(config, server.gateway.render_metrics, server.gateway.not_ready):
        await server.serve()


async def _serve_with_others(config: MoebiusConfig) -> int:
    with shared_store(config) as shared:
        group = Group(shared)
        with gateway_operations(config, group.all_metrics, group.not_ready):
            return await group.run()
