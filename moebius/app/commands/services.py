"""`moebius gateway|gpu|expert`: one process of the system alone, in the foreground."""

from __future__ import annotations

import typer

from moebius.app.cli_options import PrintConfig, print_configuration, with_settings
from moebius.app.commands.models import with_checkpoint
from moebius.config import MoebiusConfig


def register(app: typer.Typer) -> None:
    """Adds the three commands."""

    @app.command()
    @with_settings("model", "images", "gateway", "telemetry")
    def gateway(config: MoebiusConfig, print_config: PrintConfig = False) -> None:
        """Run the HTTP process alone, in front of a gpu_service at --engine-address."""
        config = _prepared(config, print_config)
        from gateway.main import run

        raise typer.Exit(run(config))

    @app.command()
    @with_settings("model", "images", "gpu", "experts", "parallel", "placement", "telemetry")
    def gpu(config: MoebiusConfig, print_config: PrintConfig = False) -> None:
        """Run one engine process (--rank N of several); it reaches experts as --expert-transport says."""
        config = _prepared(config, print_config)
        from gpu_service.main import run

        raise typer.Exit(run(config))

    @app.command()
    @with_settings("model", "experts", "placement", "telemetry")
    def expert(config: MoebiusConfig, print_config: PrintConfig = False) -> None:
        """Run one expert server alone: share --split-index of --split-count.

        What the placement settings put on GPUs is left out; the engine needs the same settings.
        Without MODEL it waits for a gRPC Expert.Load.
        """
        config = _prepared(config, print_config, needs_model=False)
        from expert_service.main import run

        raise typer.Exit(run(config))


def _prepared(config: MoebiusConfig, print_config: bool, needs_model: bool = True) -> MoebiusConfig:
    """Checks the model; prints the effective configuration if asked."""
    if needs_model or config.model.model:
        config = with_checkpoint(config)
    if print_config:
        print_configuration(config)
    return config
