"""`moebius verify MODEL`: what the chosen formats cost, against the checkpoint's own weights or another's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli_options import ApiKey, ApiKeyFile, CaFile, JsonFile, log_warnings_only, with_settings
from app.commands.models import with_checkpoint
from moebius.config import MoebiusConfig
from moebius.errors import UserError

_TEXT_TOKENS, _LONG_TOKENS = 512, 16_384


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(verify)


@with_settings("model", "gpu", "experts", "placement", needs_device=True)
def verify(
    config: MoebiusConfig,
    against: Annotated[
        str, typer.Option(help="bf16: these experts dequantised; or another checkpoint", metavar="bf16|DIR")
    ] = "bf16",
    tokens: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens of the text [default: {_TEXT_TOKENS}], or of long outputs [{_LONG_TOKENS}]", min=2
        ),
    ] = None,
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
    long: Annotated[
        bool,
        typer.Option("--long", help="Generate long outputs, greedy and sampled, and score every token"),
    ] = False,
    base_url: Annotated[
        str, typer.Option("--base-url", "--url", help="With --long: a running server of MODEL")
    ] = "",
    api_key: ApiKey = "",
    api_key_file: ApiKeyFile = "",
    ca_file: CaFile = "",
    sampling_seed: Annotated[int, typer.Option(help="With --long: of the sampled output", min=0)] = 0,
    json_file: JsonFile = None,
) -> None:
    """Compare what is served with a reference. Exit status 1: beyond a threshold."""
    from lab.verify.report import Thresholds

    log_warnings_only("verify")
    thresholds = Thresholds(max_expert_error, max_kl, min_top1)
    _check_options(long, {"--layers": layers, "--max-expert-error": max_expert_error}, {"--url": base_url})
    if long:
        from app.client import ApiClient, ClientTls
        from lab.verify.long import LongOptions
        from moebius.network.api_keys import client_key

        client = None
        if base_url:
            client = ApiClient(base_url, client_key(api_key, api_key_file), tls=ClientTls(ca_file))
        wanted = _LONG_TOKENS if tokens is None else tokens
        passed = _run_long(
            config, LongOptions(wanted, against, client, text, sampling_seed, thresholds), json_file
        )
    else:
        from lab.verify.run import VerifyOptions

        wanted = _TEXT_TOKENS if tokens is None else tokens
        passed = _run(config, VerifyOptions(against, wanted, layers, text, thresholds), json_file)
    raise typer.Exit(0 if passed else 1)


def _check_options(long: bool, of_text: dict[str, Any], of_long: dict[str, Any]) -> None:
    """Raises UserError naming options that the chosen comparison has no use for."""
    given = [name for name, value in (of_text if long else of_long).items() if value not in ("", None)]
    if given:
        what = "cannot be used with --long" if long else "can only be used with --long"
        raise UserError(f"{', '.join(given)}: {what}")


def _run(config: MoebiusConfig, options: Any, json_file: Path | None) -> bool:
    """Returns whether every layer and the output of one text are within their thresholds."""
    from rich.console import Console
    from rich.progress import Progress

    from app.bench.bounds import facts
    from app.bench.output import write_json
    from lab.verify.report import print_result
    from lab.verify.run import verify_model

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
    return result.passed


def _run_long(config: MoebiusConfig, options: Any, json_file: Path | None) -> bool:
    """Returns whether all long outputs are within their thresholds."""
    from rich.console import Console
    from rich.progress import Progress

    from app.bench.output import write_json
    from lab.verify.long import verify_long
    from lab.verify.long_report import print_long_result

    with Progress(console=Console(stderr=True), transient=True) as progress:
        tasks: dict[str, Any] = {}

        def on_step(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what)
            progress.update(tasks[what], completed=done, total=total)

        result = verify_long(with_checkpoint(config), options, on_step)
    print_long_result(result, Console())
    if json_file is not None:
        write_json(result.document(), json_file)
    return result.passed
