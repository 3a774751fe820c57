"""`moebius bench plan`: predictions next to measurements, of several configurations in one call."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from app.cli_options import JsonFile, parse_counts, with_settings
from moebius.config import GpuConfig, MoebiusConfig
from moebius.errors import UserError


@with_settings("model", "gpu", "experts", "parallel", "placement", needs_device=True)
def plan(
    config: MoebiusConfig,
    models: Annotated[str, typer.Option("--and-models", help="More models, comma separated")] = "",
    devices: Annotated[
        str, typer.Option(help="Values of device, comma separated [default: the one that is set]")
    ] = "",
    ratios: Annotated[
        str,
        typer.Option(
            help="Percent of experts on GPUs, comma separated, a configuration each [default: as served]"
        ),
    ] = "",
    streams: Annotated[str, typer.Option(help="Numbers of concurrent streams, comma separated")] = "1,8",
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens of each stream's prompt")] = 64,
    max_tokens: Annotated[int, typer.Option(min=16, help="Tokens computed per stream")] = 96,
    prefill: Annotated[str, typer.Option(help="Prompt lengths whose prefill is timed; 0: none")] = "512,4096",
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of a figure; the fastest counts")] = 2,
    fetch: Annotated[
        str, typer.Option(help="Value of fetch_experts: plans count with experts that are not fetched")
    ] = "off",
    json_file: JsonFile = None,
) -> None:
    """What `moebius plan` predicts, next to what an engine does here. Of each model on each device."""
    from lab.bench.engine.run import EngineBenchOptions
    from lab.bench.placement import parse_ratios
    from lab.bench.predictions import PredictionOptions, run_cases

    options = PredictionOptions(
        models=(config.model.model, *filter(None, models.split(","))),
        devices=tuple(filter(None, devices.split(","))) or (config.gpu.device,),
        ratios=parse_ratios(ratios) if ratios else (),
        engine=EngineBenchOptions(
            parse_counts(streams, "--streams"),
            prompt_len,
            max_tokens,
            () if prefill == "0" else parse_counts(prefill, "--prefill"),
        ),
        repeats=repeats,
        fetch=fetch,
    )
    allowed = get_args(GpuConfig.model_fields["device"].annotation)
    if unknown := sorted({*options.devices} - {*allowed}):
        raise UserError(f"--devices: {unknown} are not allowed; allowed: {', '.join(allowed)}")
    run_cases(config, options, json_file)
