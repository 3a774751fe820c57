"""`moebius bench replay`: every strategy at every share of resident experts, on the same choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from app.bench.output import write_json
from gpu_service.experts.resident.warm_start import most_saving
from lab.bench.replay.routing import Counts, Routing
from lab.bench.replay.simulate import Replayed, replay
from lab.bench.replay.strategies import (
    Adaptive,
    Costs,
    LeastRecentlyUsed,
    Mask,
    SimulatedStrategy,
    StaticList,
)
from moebius.errors import UserError
from moebius.experts.placement import STRATEGIES as LISTS
from moebius.experts.placement import Candidates

STATIC = ("uniform", "random", "front-loading", "recorded", "frequency")
STRATEGIES = (*STATIC, "lru", "adaptive", "adaptive-warm")


@dataclass(frozen=True)
class ReplayOptions:
    """Filled by the command line."""

    routings: Sequence[Routing]
    streams: Sequence[int] = (1, 8)
    strategies: Sequence[str] = STRATEGIES
    ratios: Sequence[int] = tuple(range(0, 101, 10))  # Percent of all routed experts.
    settle: float = 0.25  # Share of the steps that adaptive strategies see before steps count.
    seed: int = 42  # Of the strategy `random`.


@dataclass(frozen=True)
class Point:
    """One strategy at one share; the keys of the JSON rows."""

    routing: str
    streams: int
    ratio_percent: int
    strategy: str
    replayed: Replayed
    of_best_static: float  # Tokens per second, divided by those of the best list that stays.


def run(options: ReplayOptions, costs: Costs, json_file: Path | None = None) -> list[Point]:
    """Prints a table per routing and number of streams, and writes all points. Raises UserError."""
    check(options)
    points: list[Point] = []
    for routing in options.routings:
        for streams in options.streams:
            counts = routing.counts(streams)
            print(f"\n{routing.name}, streams: {streams}, steps: {len(counts)}\n{_head(options)}")
            for ratio in sorted(options.ratios):
                found = _points(counts, routing, streams, ratio, options, costs)
                print(_line(found, ratio, options), flush=True)
                points += found
                # After every line: an interrupted run keeps what it has.
                document = {"costs": asdict(costs), "points": [asdict(point) for point in points]}
                write_json(document, json_file)
    return points


def check(options: ReplayOptions) -> None:
    """Raises UserError naming what is not allowed."""
    unknown = [name for name in options.strategies if name not in STRATEGIES]
    if unknown or not set(options.strategies) & set(STATIC):
        raise UserError(
            f"--strategies: {','.join(options.strategies)} is not allowed; allowed: {', '.join(STRATEGIES)}, "
            "and one of the first five among them"
        )


def placed(strategy: str, ratio: int, counts: NDArray[np.int64], seed: int = 42) -> Mask:
    """Returns where a list of `moebius.experts.placement` puts a share of all experts.

    `counts`: int64 `[layers, experts]`.
    """
    layers, num_experts = counts.shape
    by_layer = dict(enumerate(counts))
    ranking = LISTS[strategy].rank(Candidates(tuple(range(layers)), num_experts, seed, by_layer))
    mask = np.zeros(counts.shape, np.bool_)
    taken = np.array(ranking[: round(ratio / 100 * len(ranking))], np.int64).reshape(-1, 2)
    mask[taken[:, 0], taken[:, 1]] = True
    return mask


def begun_with(ratio: int, counts: NDArray[np.int64], top_k: int) -> Mask:
    """Returns where a start puts experts that knows `counts`, int64 `[layers, experts]`, of the last run."""
    even = {layer: np.flatnonzero(row).tolist() for layer, row in enumerate(placed("uniform", ratio, counts))}
    some = {layer: experts for layer, experts in even.items() if experts}
    mask = np.zeros(counts.shape, np.bool_)
    for layer, experts in most_saving(some, dict(enumerate(counts)), dict.fromkeys(some, 1), top_k).items():
        mask[layer, list(experts)] = True
    return mask


def make_strategy(
    name: str, ratio: int, counts: Counts, settle: int, top_k: int, costs: Costs, seed: int
) -> SimulatedStrategy:
    """Returns a list, of which `frequency` knows how many steps use each expert in the very steps that count,
    which no user's file can, and `recorded` what was chosen before them; or one that follows choices.
    """
    before = counts[:settle].sum(axis=0, dtype=np.int64)
    match name:
        case "frequency":
            return StaticList(placed(name, ratio, (counts[settle:] > 0).sum(axis=0)), costs)
        case "recorded":
            return StaticList(placed("frequency", ratio, before), costs)
        case "adaptive":
            return Adaptive(placed("uniform", ratio, before), costs, top_k)
        case "adaptive-warm":
            return Adaptive(begun_with(ratio, before, top_k), costs, top_k, before)
        case "lru":
            return LeastRecentlyUsed(placed("uniform", ratio, before), costs)
    return StaticList(placed(name, ratio, before, seed), costs)


def _points(
    counts: Counts, routing: Routing, streams: int, ratio: int, options: ReplayOptions, costs: Costs
) -> list[Point]:
    settle = int(len(counts) * options.settle)
    found: Mapping[str, Replayed] = {
        name: replay(
            counts,
            make_strategy(name, ratio, counts, settle, routing.top_k, costs, options.seed),
            costs,
            settle,
            routing.top_k,
            routing.phases,
        )
        for name in options.strategies
    }
    best = max(found[name].tokens_per_second for name in options.strategies if name in STATIC)
    return [
        Point(routing.name, streams, ratio, name, each, each.tokens_per_second / best)
        for name, each in found.items()
    ]


def _head(options: ReplayOptions) -> str:
    columns = ["resident", *options.strategies]
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def _line(points: Sequence[Point], ratio: int, options: ReplayOptions) -> str:
    """Returns the tokens per second, hit rate and, of strategies that copy, the ratio to the best list and
    copies.
    """
    cells = [f"{ratio} %"]
    for point in points:
        each = point.replayed
        cell = f"{each.tokens_per_second:.1f} ({each.hit_rate:.0%})"
        if point.strategy not in STATIC:
            cell += f", {point.of_best_static:.2f}x, {each.exchanges_per_step:.2f} copies"
            cell += f" ({each.copied_bytes_per_step / 1e6:.1f} MB)"
            if each.recovery_tokens is not None:
                cell += f", back after {each.recovery_tokens}"
        cells.append(cell)
    return f"| {' | '.join(cells)} |"
