"""`moebius bench engine`: on an engine in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moebius.cli_options import with_settings
from moebius.commands.models import with_checkpoint
from moebius.config import MoebiusConfig

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the results there as JSON, too")
]
Streams = Annotated[str, typer.Option(help="Numbers of concurrent streams, comma separated")]
PromptLen = Annotated[int, typer.Option(min=1, help="Tokens of each stream's prompt")]
MaxTokens = Annotated[int, typer.Option(min=16, help="Tokens computed per stream")]
Temperature = Annotated[float, typer.Option(min=0, help="0: greedy; random weights then repeat themselves")]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command(name="engine")(engine)


@with_settings("model", "gpu", "experts", "parallel", "placement")
def engine(
    config: MoebiusConfig,
    streams: Streams = "1,4,8,16,32",
    prompt_len: PromptLen = 64,
    max_tokens: MaxTokens = 96,
    prefill: Annotated[str, typer.Option(help="Prompt lengths whose prefill is timed; 0: none")] = "512,2048",
    temperature: Temperature = 1.0,
    probe_mib: Annotated[int, typer.Option(min=0, help="Buffer for bandwidth; 0: several caches")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Decode and prefill speed of the engine, beside the bound of what its experts really read."""
    from moebius.bench.engine.run import EngineBenchOptions, run
    from moebius.bench.kernels_shapes import parse_counts

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


def _quiet() -> None:
    """Warnings only: the table is what is asked for."""
    from moebius.config import TelemetryConfig
    from moebius.telemetry.logging import configure_logging

    configure_logging(TelemetryConfig(log_level="warning"), "bench")
