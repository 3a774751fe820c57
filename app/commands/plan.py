"""`moebius plan MODEL`: memory, placement and speed on given hardware, before anything is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli_options import JsonFile, with_settings
from app.commands.models import check_files
from moebius.config import MoebiusConfig
from moebius.errors import UserError

if TYPE_CHECKING:
    from app.planning.comparison import Variant
    from app.planning.hardware import HardwareOptions
    from app.problems import Problems


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(plan)


@with_settings("model", "images", "gpu", "experts", "parallel", "placement")
def plan(
    config: MoebiusConfig,
    gpus: Annotated[str, typer.Option(help="auto, none, a number, or e.g. 2xh200, 4090+3090")] = "auto",
    gpu_memory: Annotated[float | None, typer.Option(help="Memory of a GPU, GiB", min=0.1)] = None,
    gpu_bandwidth: Annotated[
        float | None, typer.Option(help="Memory bandwidth of a GPU, GB/s", min=1)
    ] = None,
    gpu_tflops: Annotated[float | None, typer.Option(help="Peak of a GPU in bfloat16", min=0.1)] = None,
    pcie: Annotated[
        float | None, typer.Option(help="Host to GPU, one direction, GB/s of the vendor's figure", min=0.1)
    ] = None,
    ram: Annotated[float | None, typer.Option(help="RAM that everything may take, GiB", min=0.001)] = None,
    sockets: Annotated[int | None, typer.Option(help="NUMA nodes", min=1, max=16)] = None,
    cores: Annotated[int | None, typer.Option(help="Cores of all sockets that compute", min=1)] = None,
    bandwidth: Annotated[float | None, typer.Option(help="RAM of one socket, GB/s", min=0.1)] = None,
    cpu_tflops: Annotated[
        float | None, typer.Option(help="Peak of all cores in bfloat16, TFLOP/s", min=0.001)
    ] = None,
    isa: Annotated[str, typer.Option(help="Instruction set of the CPUs: amx, avx512, ...")] = "auto",
    measure: Annotated[bool, typer.Option("--measure", help="Measure this host's RAM and cores")] = False,
    context: Annotated[int | None, typer.Option(help="Tokens each stream shall have room for", min=1)] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Streams of that many tokens at once", min=1)
    ] = None,
    streams: Annotated[
        str, typer.Option(help="Numbers of streams to predict, comma separated")
    ] = "1,4,16,32",
    fill: Annotated[bool, typer.Option(help="Put as many experts on GPUs as fit, where none are set")] = True,
    compare: Annotated[
        str, typer.Option(help="Machines side by side, GPUS@GIB of RAM, e.g. 4090@64,2x3090@128,none@256")
    ] = "",
    json_file: JsonFile = None,
    values: Annotated[
        Path | None, typer.Option(help="Write values for the Helm chart there", metavar="FILE")
    ] = None,
) -> None:
    """Say what a model takes and how fast it will be. Exit status 1: it does not fit, and what would.

    A directory or repository of several quantisations is compared: which fit, how fast they are, and the
    best one's command.
    """
    from app.planning.hardware import HardwareOptions

    options = HardwareOptions(
        gpus=gpus,
        gpu_memory_gib=gpu_memory,
        gpu_bandwidth_gbs=gpu_bandwidth,
        gpu_tflops=gpu_tflops,
        pcie_gbs=pcie,
        ram_gib=ram,
        sockets=sockets,
        cores=cores,
        bandwidth_gbs=bandwidth,
        cpu_tflops=cpu_tflops,
        isa=isa,
        measure=measure,
    )
    _run(config, options, context, concurrency, streams, fill, compare, json_file, values)


def _run(
    config: MoebiusConfig,
    options: HardwareOptions,
    context: int | None,
    concurrency: int | None,
    streams: str,
    fill: bool,
    compare: str,
    json_file: Path | None,
    values: Path | None,
) -> None:
    # Every other command would pay for its imports.
    from app.cli_options import parse_counts
    from app.commands.plan_variants import variants
    from app.planning import comparison
    from app.planning.capacity import Wish
    from app.planning.report import run
    from app.problems import Problems

    problems, counts = Problems(), [1]
    with problems.collected():
        counts = parse_counts(streams, "--streams")
    wish = Wish(context, concurrency, tuple(counts))
    chosen = {"": options}
    with problems.collected():
        chosen = comparison.machines(compare, options) if compare else chosen
    models: list[Variant] = []
    with contextlib.ExitStack() as stack:
        with problems.collected():
            models = stack.enter_context(variants(config))
            for model in models:
                check_files(model.config, needs_weights=False)
        check_machines(chosen, problems)
        problems.refuse()
        if len(models) == 1 and not compare:
            run(models[0].config, models[0].asked, options, wish, fill, json_file, values)
        elif values is not None:
            raise UserError("--values is of one plan: name one quantisation and no --compare")
        else:
            comparison.run(models, chosen, wish, fill, json_file)


def check_machines(chosen: Mapping[str, HardwareOptions], problems: Problems) -> None:
    """Collects what the options of the machines name that does not exist; nothing is measured for that."""
    from app.planning.hardware import hardware

    for options in chosen.values():
        for gpus in (options.gpus, "none"):  # a GPU that is not known hides nothing of the CPUs
            with problems.collected():
                hardware(replace(options, gpus=gpus, measure=False))
