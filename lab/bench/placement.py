"""`moebius bench placement`: decode speed by share of experts on the GPU, for each strategy."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from app.bench.bounds import Bandwidths, facts, measure_bandwidths
from app.bench.output import write_json
from lab.bench.engine.drive import running_engine
from lab.bench.engine.measure import DecodeResult, make_setting, measure_decode, random_prompts
from lab.bench.engine.run import EngineBenchOptions, with_room
from lab.bench.engine.servers import ExpertServers, ServerCounters, running_servers
from moebius.config import MoebiusConfig, PlacementConfig
from moebius.errors import UserError
from moebius.models.geometry import MoeGeometry
from moebius.models.served import read_served_geometry

STRATEGIES = ("uniform", "frequency", "front-loading", "random", "adaptive")
# How many times the tokens that are measured the strategy `adaptive` sees before.
_SETTLING = 4
# Streams of the run whose routing the strategy `frequency` is given.
_RECORDED_STREAMS = 8


@dataclass(frozen=True)
class PlacementOptions:
    """Filled by the command line."""

    strategies: Sequence[str] = STRATEGIES
    # Percent of all routed experts.
    ratios: Sequence[int] = tuple(range(0, 101, 10))
    engine: EngineBenchOptions = field(default_factory=lambda: EngineBenchOptions((1,), prefill=()))


@dataclass(frozen=True)
class CurvePoint:
    """One engine; filled by `run`. The keys of the JSON rows."""

    strategy: str
    ratio_percent: int
    decode: DecodeResult


def run(config: MoebiusConfig, options: PlacementOptions, json_file: Path | None = None) -> list[CurvePoint]:
    """One engine after another on the same expert servers; prints and writes the curve.

    At 0 and 100 % every strategy places the same experts, so one engine stands for all. Raises UserError.
    """
    check(options)
    from gpu_service.assembly.process import resolve_device

    config = with_room(config, options.engine)
    device, ranks = resolve_device(config.gpu), config.parallel.tensor_parallel_size
    bandwidths = measure_bandwidths(device, options.engine.probe_bytes, ranks)
    host, points = facts(device), list[CurvePoint]()
    with (
        tempfile.TemporaryDirectory(prefix="moebius-placement-") as directory,
        # Every ratio is measured with the same servers, so they hold all experts.
        running_servers(config.model_copy(update={"placement": PlacementConfig()})) as servers,
    ):
        statistics = Path(directory) / "statistics.safetensors"
        if "frequency" in options.strategies:
            record(servers, options, statistics)
        for ratio in sorted(options.ratios):
            same = ratio in (0, 100)
            for strategy in options.strategies[:1] if same else options.strategies:
                decode = _measure(servers, strategy, ratio, statistics, bandwidths, options)
                names = options.strategies if same else (strategy,)
                points += [CurvePoint(name, ratio, result) for name in names for result in decode]
            print(f"{ratio:3d} % of the experts on the GPU: {_line(points, ratio, options)}", flush=True)
            if json_file is not None:  # after every ratio: an interrupted run keeps what it has
                write_json({"host": host, "points": [asdict(point) for point in points]}, json_file)
    print(table(points, options))
    return points


def check(options: PlacementOptions) -> None:
    """Raises UserError naming what is not allowed."""
    unknown = [name for name in options.strategies if name not in STRATEGIES]
    if unknown or not options.strategies:
        raise UserError(f"--strategies: {unknown} are not allowed; allowed: {', '.join(STRATEGIES)}")


def parse_ratios(text: str) -> tuple[int, ...]:
    """Returns the percentages up to 100, comma separated. Raises UserError."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) <= 100 for part in parts):
        raise UserError(f"--ratios: {text!r} is not allowed; allowed: percentages 0 to 100, comma separated")
    return tuple(map(int, parts))


def placed(config: MoebiusConfig, strategy: str, ratio: int, statistics: Path) -> MoebiusConfig:
    """Returns the configuration with that share of experts on the GPU."""
    update: Mapping[str, object] = {
        "gpu_layers": "",
        "gpu_experts": None,
        "gpu_experts_ratio": ratio / 100,
        "placement_strategy": strategy,
        "drop_resident": "keep",
        "expert_statistics": str(statistics) if strategy == "frequency" else "",
    }
    return config.model_copy(update={"placement": config.placement.model_copy(update=update)})


def _measure(
    servers: ExpertServers,
    strategy: str,
    ratio: int,
    statistics: Path,
    bandwidths: Bandwidths,
    options: PlacementOptions,
) -> list[DecodeResult]:
    config = placed(servers.config, strategy, ratio, statistics)
    own, bench = ExpertServers(config), options.engine
    with running_engine(config) as engine:
        setting = make_setting(engine, own, bandwidths)
        first = bench.max_tokens * _SETTLING if strategy == "adaptive" else bench.max_tokens // 4
        measure_decode(engine, setting, 1, bench.prompt_len, max(16, first), bench.temperature)
        return [
            measure_decode(engine, setting, streams, bench.prompt_len, bench.max_tokens, bench.temperature)
            for streams in bench.streams
        ]


def record(servers: ExpertServers, options: PlacementOptions, path: Path) -> None:
    """Writes how often each expert was chosen in a run with everything on the servers, on other prompts."""
    config = placed(servers.config, "uniform", 0, path)
    with running_engine(config) as engine:
        vocab_size = engine.built.model_config.vocab_size
        prompts = random_prompts(_RECORDED_STREAMS, options.engine.prompt_len, vocab_size, 77)
        before = servers.counters()
        tokens = options.engine.max_tokens
        engine.submit(prompts, tokens, options.engine.temperature).wait(tokens)
        after = servers.counters()
    geometry = read_served_geometry(config)
    path.write_bytes(statistics_of(before, after, geometry, config.experts.expert_split == "expert"))


def statistics_of(
    before: Sequence[ServerCounters], after: Sequence[ServerCounters], geometry: MoeGeometry, whole: bool
) -> bytes:
    """Returns a statistics file from the servers' counters.

    `whole`: servers hold whole experts, so rows add up.
    """
    from moebius.experts.placement import ExpertStatistics

    layers, zeros = geometry.moe_layers, (0,) * geometry.num_experts
    per_server = np.array(
        [
            [
                np.subtract(late.expert_rows.get(layer, zeros), early.expert_rows.get(layer, zeros))
                for layer in layers
            ]
            for early, late in zip(before, after, strict=True)
        ],
        np.int64,
    )
    counts = per_server.sum(axis=0) if whole else per_server[0]
    # The last layer is asked once a step, also where the others have late experts.
    steps = min(after[0].calls.values()) - min(before[0].calls.values(), default=0)
    statistics = ExpertStatistics(
        model_type=geometry.model_type,
        num_experts=geometry.num_experts,
        top_k=geometry.top_k,
        layers=layers,
        mode="stat",
        steps=steps,
        tokens=int(counts[0].sum()) // geometry.top_k,
        counts=counts,
        distinct=(counts > 0).sum(axis=1),
    )
    return statistics.encode("safetensors")


def _line(points: Sequence[CurvePoint], ratio: int, options: PlacementOptions) -> str:
    return ", ".join(f"{name} {_speeds(points, name, ratio, options)}" for name in options.strategies)


def _speeds(points: Sequence[CurvePoint], strategy: str, ratio: int, options: PlacementOptions) -> str:
    """Returns the tokens per second of every number of streams."""
    return " / ".join(
        f"{point.decode.tokens_per_second:.1f}"
        for streams in options.engine.streams
        for point in points
        if (point.strategy, point.ratio_percent, point.decode.streams) == (strategy, ratio, streams)
    )


def table(points: Sequence[CurvePoint], options: PlacementOptions) -> str:
    """Returns Markdown: a row per ratio, a column per strategy, tokens per second."""
    lines = [
        f"| experts on the GPU | {' | '.join(options.strategies)} |",
        f"|---|{'---|' * len(options.strategies)}",
    ]
    for ratio in sorted(options.ratios):
        cells = [_speeds(points, name, ratio, options) for name in options.strategies]
        lines.append(f"| {ratio} % | {' | '.join(cells)} |")
    return "\n".join(lines)
