"""`moebius verify MODEL`: what the chosen formats cost, against the checkpoint's own weights or another's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.cli_options import JsonFile, log_warnings_only, with_settings
from app.commands.models import with_checkpoint
from moebius.config import MoebiusConfig


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(verify)


@with_settings("model", "gpu", "experts", "placement", needs_device=True)
def verify(
    config: MoebiusConfig,
    against: Annotated[
        str, typer.Option(help="bf16: these experts dequantised; or another checkpoint", metavar="bf16|DIR")
    ] = "bf16",
    tokens: Annotated[int, typer.Option(help="Tokens of the text that are computed", min=2)] = 512,
    layers: Annotated[str, typer.Option(help="MoE layers to compare, as in 0-3,9; empty: all")] = "",
    text: Annotated[
        Path | None, typer.Option(help="Text to compute instead of the bundled one", metavar="FILE")
    ] = None,
    max_expert_error: Annotated[
        float | None, typer.Option(help="Largest relative error of a layer's experts", min=0)
    ] = None,
    max_kl: Annotated[float | None, typer.Option(help="Largest mean KL divergence, nats", min=0)] = None,
    min_top1: Annotated[
        float | None, typer.Option(help="Smallest share of same most probable tokens", min=0, max=1)
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Compare experts as served with a reference. Exit status 1: beyond a threshold."""
    from rich.console import Console
    from rich.progress import Progress

    from app.bench.bounds import facts
    from app.bench.output import write_json
    from lab.verify.report import Thresholds, print_result
    from lab.verify.run import VerifyOptions, verify_model

    log_warnings_only("verify")
    thresholds = Thresholds(max_expert_error, max_kl, min_top1)
    options = VerifyOptions(against, tokens, layers, text, thresholds)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("layers", total=None)
        result = verify_model(
            with_checkpoint(config),
            options,
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    print_result(result, Console())
    if json_file is not None:
        import torch

        write_json({"host": facts(torch.device(result.device))} | result.document(), json_file)
    raise typer.Exit(0 if result.passed else 1)
