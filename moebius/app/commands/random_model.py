"""`moebius models random DIR`: a checkpoint of a published shape with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Checkpoints made here.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def models() -> None:
    """Keeps `random` a subcommand: typer makes a lone command the whole app."""


@app.command()
def random(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the checkpoint is written")],
    shape: Annotated[
        str, typer.Option(help="qwen3-30b-a3b, qwen3-next-80b, qwen3-235b-a22b, small or tiny")
    ] = "qwen3-30b-a3b",
    weight_format: Annotated[
        str, typer.Option("--format", help="Of routed experts: bfloat16, int4_g32 or fp8_block")
    ] = "bfloat16",
    layers: Annotated[int, typer.Option(min=0, help="0: the model's own number")] = 0,
    skew: Annotated[str, typer.Option(help="How unequally experts are chosen: none, or zipf:S")] = "none",
    seed: Annotated[int, typer.Option(min=0, help="Of all random numbers")] = 0,
    threads: Annotated[int, typer.Option(min=0, help="0: one per allowed CPU")] = 0,
) -> None:
    """Write a complete checkpoint of a published shape with random weights."""
    from moebius.app.demo_model import rich_progress
    from moebius.app.random_model import RandomModelOptions, write_random_model

    options = RandomModelOptions(shape, weight_format, layers, skew, seed, threads)
    with rich_progress() as progress:
        written = write_random_model(
            directory, options, lambda done, total: progress("writing random weights", done, total)
        )
    gigabytes = written.nbytes / 1e9
    speed = gigabytes / written.seconds
    print(f"{written.directory}: {gigabytes:.2f} GB in {written.seconds:.1f} s ({speed:.2f} GB/s)")
