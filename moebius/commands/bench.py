"""`moebius bench mailbox|decode`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moebius.errors import UserError

JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the rows there as JSON, too"),
]

app = typer.Typer(
    help="Measure, beside the limit measured in the same run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def mailbox(json_file: JsonFile = None) -> None:
    """Round trip of the shared-memory mailbox: 1, 8, 64 rows and 1, 2, 4 servers."""
    from moebius.bench.mailbox import run

    run(json_file=json_file)


@app.command()
def decode(
    base_url: Annotated[str, typer.Option(help="Running server")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Model name [default: the server's first]")] = "",
    api_key: Annotated[str, typer.Option(help="Bearer token")] = "",
    streams: Annotated[str, typer.Option(help="Numbers of concurrent streams")] = "1,8,32",
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens per stream")] = 128,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Checkpoint for the limit [default: the server's, if it is here]"),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Tokens per second, time to first token and inter-token latency of a running server."""
    try:
        counts = [int(part) for part in streams.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise UserError(f"--streams: {streams!r} is not allowed; allowed: numbers >= 1, comma separated")
    from moebius.bench.decode import run

    run(base_url, model, api_key, counts, max_tokens, checkpoint, json_file)
