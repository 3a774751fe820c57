"""Runs several models behind one port: `moebius serve FILE` with `models` in the file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog
import uvicorn

from app.commands.models import with_checkpoint
from app.supervisor.plan import base_url, default_state_dir
from app.supervisor.runfile import RunDirectory, clean_up_stale, own_state_directory, write_private
from app.swap.application import create_models_app
from app.swap.child import ModelProcess
from app.swap.pool import ModelPool
from app.swap.settings import ModelsConfig, read_models
from gateway.app.server import EndingServer
from gateway.main import check_address
from gateway.transport.connections import ConnectionTable, connection_limits, protocol_for
from gateway.transport.tls import secured
from moebius.config import MoebiusConfig
from moebius.config.loader import effective_config
from moebius.telemetry import configure_logging

_log = structlog.get_logger(__name__)
# For what is left of answers when the server ends.
_END_S = 5


def serve_models(path: str, flags: Mapping[str, Any], dry_run: bool = False) -> None:
    """Serves until a signal. `dry_run`: only reads what each model is, and says so.

    Raises ConfigError for settings, CheckpointError for a model, StartupError for the port or a directory.
    """
    config = read_models(path, flags)
    shared = config.shared
    for name, one in config.models.items():
        with_checkpoint(one, needs_weights=False)
        if dry_run:
            print(f"{name}: {one.model.model}; its plan: moebius plan {one.model.model}")
    if dry_run:
        return
    configure_logging(shared.telemetry, "models")
    check_address(shared.gateway.host, shared.gateway.port)
    chosen = shared.supervisor.state_dir
    directory = own_state_directory(Path(chosen).absolute() if chosen else default_state_dir())
    clean_up_stale(directory)
    run_directory = RunDirectory(directory / f"models-{shared.gateway.port}")
    own = run_directory.path
    processes = {name: ModelProcess(name, one, config.key, own) for name, one in config.models.items()}
    supervisor = shared.supervisor
    pool = ModelPool(processes, supervisor.max_loaded_models, supervisor.model_residency_s)
    server = _server(config, processes, pool)
    names = ", ".join(config.models)
    _describe(run_directory, shared, names)
    if shared.telemetry.log_format == "json":
        _log.info("ready", models=names, base_url=base_url(shared))
    else:
        print(f"\nReady: {names} on {base_url(shared)}/v1, loaded on demand   (Ctrl-C stops)\n", flush=True)
    try:
        server.run()
    finally:
        run_directory.remove()


def _describe(directory: RunDirectory, shared: MoebiusConfig, names: str) -> None:
    """Lets `moebius ps` and `stop` find this server; its models have run files of their own."""
    model = shared.model.model_copy(update={"served_model_name": names})
    text = effective_config(shared.model_copy(update={"model": model}))
    write_private(directory.path / "gateway.yaml", text)
    directory.record((), ())


def _server(config: ModelsConfig, processes: Mapping[str, ModelProcess], pool: ModelPool) -> EndingServer:
    """Returns the HTTP server, with the limits and the TLS of the gateway's. Raises ConfigError."""
    gateway = config.shared.gateway
    limits = connection_limits(gateway)
    app = create_models_app(config, processes, pool)
    closed = app.state.models.metrics.connection_closed
    protocol = protocol_for(ConnectionTable(limits, closed))
    return EndingServer(
        uvicorn.Config(
            app,
            host=gateway.host,
            port=gateway.port,
            log_config=None,
            access_log=False,
            http=secured(protocol, config.shared, limits, closed),  # type: ignore[arg-type]
            ws="none",
            forwarded_allow_ips=["127.0.0.1", "::1"],
            backlog=limits.backlog,
            timeout_keep_alive=limits.idle_timeout_s,
            timeout_graceful_shutdown=int(config.shared.supervisor.stop_timeout_s) + _END_S,
        )
    )
