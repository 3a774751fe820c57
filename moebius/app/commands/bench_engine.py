"""`moebius bench engine|placement|steps`: on an engine in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moebius.app.cli_options import with_settings
from moebius.app.commands.models import with_checkpoint
from moebius.config import MoebiusConfig
from moebius.errors import UserError

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the results there as JSON, too")
]
Streams = Annotated[str, typer.Option(help="Numbers of concurrent streams, comma separated")]
PromptLen = Annotated[int, typer.Option(min=1, help="Tokens of each stream's prompt")]
MaxTokens = Annotated[int, typer.Option(min=16, help="Tokens computed per stream")]
Temperature = Annotated[
    float, typer.Option(min=0, help="0: greedy, which graphs hold; above: sampled behind them")
]

ProbeMib = Annotated[int, typer.Option(min=0, help="Buffer for measuring bandwidth; 0: several caches")]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    for command in (engine, placement, steps):
        app.command()(command)


@with_settings("model", "gpu", "experts", "parallel", "placement")
def engine(
    config: MoebiusConfig,
    streams: Streams = "1,4,8,16,32",
    prompt_len: PromptLen = 64,
    max_tokens: MaxTokens = 96,
    prefill: Annotated[str, typer.Option(help="Prompt lengths whose prefill is timed; 0: none")] = "512,2048",
    temperature: Temperature = 0.0,
    probe_mib: ProbeMib = 0,
    json_file: JsonFile = None,
) -> None:
    """Decode and prefill speed of the engine, beside the bound of what its experts really read."""
    from moebius.app.bench.engine.run import EngineBenchOptions, run
    from moebius.app.bench.kernels_shapes import parse_counts

    _quiet()
    options = EngineBenchOptions(
        streams=parse_counts(streams, "--streams"),
        prompt_len=prompt_len,
        max_tokens=max_tokens,
        prefill=() if prefill == "0" else parse_counts(prefill, "--prefill"),
        temperature=temperature,
        probe_bytes=probe_mib * 2**20,
    )
    run(with_checkpoint(config), options, json_file)


@with_settings("model", "gpu", "experts", "parallel", "placement")
def placement(
    config: MoebiusConfig,
    strategies: Annotated[
        str, typer.Option(help="Static strategies, comma separated")
    ] = "uniform,frequency,front-loading,random",
    ratios: Annotated[
        str, typer.Option(help="Percent of experts on the GPU, comma separated")
    ] = "0,10,20,30,40,50,60,70,80,90,100",
    streams: Streams = "1",
    prompt_len: PromptLen = 64,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    probe_mib: ProbeMib = 0,
    json_file: JsonFile = None,
) -> None:
    """Decode speed by share of experts on the GPU, for each static placement strategy."""
    from moebius.app.bench.engine.run import EngineBenchOptions
    from moebius.app.bench.kernels_shapes import parse_counts
    from moebius.app.bench.placement import PlacementOptions, run

    _quiet()
    percent = ratios.split(",")
    if not all(part.isdecimal() for part in percent):
        raise UserError(
            f"--ratios: {ratios!r} is not allowed; allowed: percentages 0 to 100, comma separated"
        )
    options = PlacementOptions(
        tuple(strategies.split(",")),
        tuple(map(int, percent)),
        EngineBenchOptions(
            parse_counts(streams, "--streams"), prompt_len, max_tokens, (), temperature, probe_mib * 2**20
        ),
    )
    run(with_checkpoint(config), options, json_file)


@with_settings("model", "gpu", "experts", "parallel", "placement")
def steps(
    config: MoebiusConfig,
    streams: Annotated[int, typer.Option(min=1, help="Concurrent streams")] = 1,
    count: Annotated[int, typer.Option("--steps", min=1, help="Decode steps that are looked at")] = 10,
    prompt_len: PromptLen = 64,
    temperature: Temperature = 0.0,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the profiler's trace there")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """What the GPU and the host do in decode steps: kernels, gaps between graphs, host functions."""
    from moebius.app.bench.steps.run import StepsOptions, run

    _quiet()
    run(with_checkpoint(config), StepsOptions(streams, count, prompt_len, temperature, trace), json_file)


def _quiet() -> None:
    """Warnings only: the table is what is asked for."""
    from moebius.config import TelemetryConfig
    from moebius.telemetry.logging import configure_logging

    configure_logging(TelemetryConfig(log_level="warning"), "bench")
