"""`moebius bench replay`: placement strategies on the same choices, by simulation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli_options import JsonFile
from moebius.errors import UserError

if TYPE_CHECKING:
    from lab.bench.replay.routing import RandomRouting

Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Recorded choices (`experts record start --mode per_token`) [default: random routers]",
    ),
]
Skew = Annotated[
    str,
    typer.Option(help="How unequally experts are chosen: none, or zipf:S; several: layers take them in turn"),
]
Overlap = Annotated[
    str, typer.Option(help="Percent of its experts that a token shares with the next, comma separated")
]


def replay(
    trace: Trace = None,
    skew: Skew = "zipf:1.2",
    overlap: Overlap = "0,45",
    topic_tokens: Annotated[int, typer.Option(min=1, help="Tokens that a topic lasts")] = 64,
    changes: Annotated[int, typer.Option(min=0, help="How often other experts become the usual ones")] = 0,
    layers: Annotated[int, typer.Option(min=1, help="MoE layers")] = 48,
    experts: Annotated[int, typer.Option(min=2, help="Routed experts of a layer")] = 128,
    top_k: Annotated[int, typer.Option(min=1, help="Experts that a token chooses")] = 8,
    steps: Annotated[int, typer.Option(min=256, help="Decode steps")] = 8000,
    streams: Annotated[str, typer.Option(help="Numbers of concurrent streams, comma separated")] = "1,8",
    ratios: Annotated[
        str, typer.Option(help="Percent of experts on the GPU, comma separated")
    ] = "0,10,20,30,40,50,60,70,80,90,100",
    strategies: Annotated[
        str, typer.Option(help="Comma separated")
    ] = "uniform,random,front-loading,recorded,frequency,lru,adaptive,adaptive-warm",
    cpu_gbs: Annotated[float, typer.Option(min=0.1, help="GB/s at which servers read experts")] = 125.0,
    link_gbs: Annotated[float, typer.Option(min=0.1, help="GB/s from RAM to the GPU")] = 50.0,
    expert_mb: Annotated[float, typer.Option(min=0.001, help="MB of an expert")] = 2.65,
    layer_us: Annotated[
        float, typer.Option(min=0, help="Microseconds of a layer without RAM's experts")
    ] = 72,
    copy_reads: Annotated[
        float, typer.Option(min=0, help="What a copy costs, in reads of an expert by servers")
    ] = 4.0,
    fetch_slots: Annotated[
        int, typer.Option(min=0, help="Slots of each layer into which a step copies what it lacks; lru: none")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of random routers")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Placement strategies on the same choices of experts, simulated. Hit rates, copies, time."""
    from app.cli_options import parse_counts
    from lab.bench.placement import parse_ratios
    from lab.bench.replay.routing import random_routing, recorded_routing
    from lab.bench.replay.run import ReplayOptions, run
    from lab.bench.replay.strategies import Costs

    if top_k > experts:
        raise UserError(f"--top-k: {top_k} is not allowed; allowed: 1 to {experts}, the number of --experts")
    if trace is None:
        routers = _routers((layers, experts, top_k), skew, overlap, topic_tokens, changes + 1, seed)
        routings = [random_routing(each, steps) for each in routers]
    else:
        routings = [recorded_routing(trace)]
    options = ReplayOptions(
        routings,
        parse_counts(streams, "--streams", 64),
        tuple(strategies.split(",")),
        parse_ratios(ratios),
    )
    costs = Costs(
        cpu_gbs * 1e9, link_gbs * 1e9, int(expert_mb * 1e6), layer_us * 1e-6, copy_reads, fetch_slots
    )
    run(options, costs, json_file)


def _routers(
    sizes: tuple[int, int, int], skew: str, overlap: str, topic_tokens: int, phases: int, seed: int
) -> list[RandomRouting]:
    """`sizes`: layers, experts and the choices of a token. Raises UserError naming an option."""
    from lab.bench.replay.routing import RandomRouting
    from lab.bench.speculation import parse_percents
    from lab.random_model.topics import Topics
    from lab.random_model.values import parse_skew

    exponents = tuple(map(parse_skew, skew.split(",")))
    return [
        RandomRouting(*sizes, exponents, Topics(percent, topic_tokens), phases, seed)
        for percent in parse_percents(overlap, "--overlap")
    ]
