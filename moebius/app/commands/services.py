"""`moebius gateway|gpu|expert`: one process of the system alone, in the foreground."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from moebius.app.cli_options import with_settings
from moebius.app.commands.models import with_checkpoint
from moebius.config import MoebiusConfig
from moebius.config_loader import printable_config

ShowConfig = Annotated[bool, typer.Option(help="Print the effective configuration at start-up")]


def register(app: typer.Typer) -> None:
    """Adds the three commands."""

    @app.command()
    @with_settings("model", "images", "gateway", "telemetry")
    def gateway(config: MoebiusConfig, show_config: ShowConfig = True) -> None:
        """Run the HTTP process alone, in front of a gpu_service at --engine-address."""
        config = _prepared(config, show_config)
        from gateway.main import run

        raise typer.Exit(run(config))

    @app.command()
    @with_settings("model", "images", "gpu", "experts", "parallel", "placement", "telemetry")
    def gpu(config: MoebiusConfig, show_config: ShowConfig = True) -> None:
        """Run one engine process (--rank N of several); it reaches experts as --expert-transport says."""
        config = _prepared(config, show_config)
        from gpu_service.main import run

        raise typer.Exit(run(config))

    @app.command()
    @with_settings("model", "experts", "placement", "telemetry")
    def expert(config: MoebiusConfig, show_config: ShowConfig = True) -> None:
        """Run one expert server alone: share --split-index of --split-count.

        What the placement settings put on GPUs is left out; the engine needs the same settings.
        Without MODEL it waits for a gRPC Expert.Load.
        """
        config = _prepared(config, show_config, needs_model=False)
        from expert_service.main import run

        raise typer.Exit(run(config))


def _prepared(config: MoebiusConfig, show_config: bool, needs_model: bool = True) -> MoebiusConfig:
    """Checks the model and prints the effective configuration."""
    if needs_model or config.model.model:
        config = with_checkpoint(config)
    if show_config:
        print(printable_config(config), file=sys.stderr)
    return config
