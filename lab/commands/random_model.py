"""`moebius models random DIR`: a checkpoint of a published shape, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lab.random_model.build import Written


def register(group: typer.Typer) -> None:
    """Adds the command to `moebius models`."""
    group.command()(random)


_Shape = Annotated[
    str,
    typer.Option(
        help="qwen3-30b-a3b, qwen3-next-80b, qwen3-235b-a22b, glm-4.5-air, glm-5.3-flash, small or tiny"
    ),
]
_RoutingFrom = Annotated[
    str,
    typer.Option(
        metavar="TRACE",
        help="File of `experts record --mode per_token`: tokens choose its rows, in the order of a chain",
    ),
]


def random(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the checkpoint is written")],
    shape: _Shape = "qwen3-30b-a3b",
    weight_format: Annotated[
        str,
        typer.Option(
            "--format", help="Of routed experts: bfloat16, int4_g32 or fp8_block; q4_0 or q4_k: one GGUF file"
        ),
    ] = "bfloat16",
    layers: Annotated[int, typer.Option(min=0, help="0: the model's own number")] = 0,
    max_gb: Annotated[
        float, typer.Option(min=0, help="As many layers as fit this many GB of weights; 0: no limit")
    ] = 0.0,
    skew: Annotated[str, typer.Option(help="How unequally experts are chosen: none, or zipf:S")] = "none",
    head: Annotated[
        str, typer.Option(help="What follows a token: random, or chain (one token, so that systems agree)")
    ] = "random",
    mtp_acceptance: Annotated[
        int,
        typer.Option(
            min=0,
            max=100,
            help="Acceptance rate of an MTP layer's draft tokens in percent, with --head chain",
        ),
    ] = 80,
    overlap: Annotated[
        int,
        typer.Option(
            min=0, max=100, help="Percent of its experts that a token shares with the next; 0: by chance"
        ),
    ] = 0,
    topic_tokens: Annotated[int, typer.Option(min=1, help="Tokens that a topic lasts, with --overlap")] = 64,
    routing_from: _RoutingFrom = "",
    seed: Annotated[int, typer.Option(min=0, help="Of all random numbers")] = 0,
    threads: Annotated[int, typer.Option(min=0, help="0: one per allowed CPU")] = 0,
) -> None:
    """Write a checkpoint of a published shape with random weights."""
    from app.demo_model import rich_progress
    from lab.random_model import RandomModelOptions, write_random_model

    options = RandomModelOptions(
        shape,
        weight_format,
        layers,
        max_gb,
        skew,
        head,
        mtp_acceptance,
        seed,
        threads,
        overlap,
        topic_tokens,
        routing_from,
    )
    with rich_progress() as progress:
        written = write_random_model(
            directory, options, lambda done, total: progress("writing random weights", done, total)
        )
    _print_written(written, routing_from)


def _print_written(written: Written, trace: str) -> None:
    gigabytes = written.nbytes / 1e9
    speed = gigabytes / written.seconds
    print(f"{written.path}: {gigabytes:.2f} GB in {written.seconds:.1f} s ({speed:.2f} GB/s)")
    if written.replay is not None:
        rows, share = written.replay.num_rows, written.replay.share
        print(f"routing: {rows} tokens of {trace}, {share:.3%} of their choices")
