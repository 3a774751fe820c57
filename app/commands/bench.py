"""`moebius bench serve|decode|start|numa`: what a user measures. The package `lab` adds the others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.access_options import Access, with_access
from app.cli_options import BaseUrl, JsonFile, ModelName, parse_counts, with_settings
from app.commands.bench_serve import serve
from app.commands.models import with_checkpoint
from moebius.config import MoebiusConfig

app = typer.Typer(
    help="Measure, and compare with the limit measured in the same run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
@with_access
def decode(
    base_url: BaseUrl = "http://127.0.0.1:8000",
    model: ModelName = "",
    *,
    access: Access,
    streams: Annotated[str, typer.Option(help="Numbers of concurrent streams")] = "1,8,32",
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens per stream")] = 128,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Checkpoint for the limit [default: the server's, if it is here]"),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Decode speed and latencies of a running server."""
    from app.bench.decode import run

    counts = parse_counts(streams, "--streams")
    run(base_url, model, access.key, counts, max_tokens, checkpoint, json_file, access.tls)


@app.command()
@with_settings(needs_device=True)
def start(
    config: MoebiusConfig,
    cold: Annotated[
        bool, typer.Option(help="Begin without page cache and compiled kernels (minutes on a GPU)")
    ] = True,
    json_file: JsonFile = None,
) -> None:
    """Seconds until a model is served. Cold, warm, and after the death of an expert server."""
    from app.bench.start import run

    run(with_checkpoint(config), json_file, cold)


@app.command()
def numa(
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Of the systems whose expert servers are looked at")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure bandwidth by NUMA node, and where weights lie.

    Looks at the memory of running expert servers. For machines with several nodes.
    """
    from app.bench.numa import run
    from app.supervisor.plan import default_state_dir

    run(state_dir or default_state_dir(), json_file)


app.command()(serve)
