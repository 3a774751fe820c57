"""Static strategies: each ranks all candidate experts, and as many as are wanted are taken from the front.

Because a larger number only takes more of the same ranking, what is resident at one ratio stays resident at
every larger one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Pair = tuple[int, int]


@dataclass(frozen=True)
class Candidates:
    """What may become resident; filled by `make_placement`."""

    # Ascending; layers that are resident as a whole are not among them.
    layers: tuple[int, ...]
    num_experts: int
    seed: int
    # Layer -> how often each expert was chosen, int64 [num_experts]; None without a statistics file.
    counts: Mapping[int, NDArray[np.int64]] | None = None


@dataclass(frozen=True)
class Strategy:
    """One way to rank."""

    rank: Callable[[Candidates], list[Pair]]
    # Whether a number per layer holds for each layer, or only as their sum.
    keeps_layer_counts: bool = True
    needs_statistics: bool = False


def spread(size: int) -> list[int]:
    """0 ... size - 1 in an order whose every prefix is spread evenly: the van der Corput sequence.

    Its i-th element is i with the binary digits mirrored; positions beyond `size` are left out.
    """
    bits = max(1, (size - 1).bit_length())
    mirrored = (int(format(i, f"0{bits}b")[::-1], 2) for i in range(1 << bits))
    return [position for position in mirrored if position < size]


def _uniform(candidates: Candidates) -> list[Pair]:
    """Round after round one expert of each layer, so that layers never differ by more than one.

    Layers take turns in spread order; each begins elsewhere among the ids, so that no id is preferred.
    """
    ids, count = spread(candidates.num_experts), candidates.num_experts
    layers = [candidates.layers[position] for position in spread(len(candidates.layers))]
    return [(layer, (expert + layer) % count) for expert in ids for layer in layers]


def _frequency(candidates: Candidates) -> list[Pair]:
    """Most often chosen first; among equals, the earlier layer and the smaller id."""
    if candidates.counts is None:
        raise ValueError("the strategy 'frequency' needs counts")
    counts = candidates.counts
    pairs = [(layer, expert) for layer in candidates.layers for expert in range(candidates.num_experts)]
    return sorted(pairs, key=lambda pair: (-int(counts[pair[0]][pair[1]]), pair))


def _front_loading(candidates: Candidates) -> list[Pair]:
    """The first layers wholly, then the next."""
    return [(layer, expert) for layer in candidates.layers for expert in range(candidates.num_experts)]


def _random(candidates: Candidates) -> list[Pair]:
    """Every order is as likely as any other; the seed decides."""
    pairs = _front_loading(candidates)
    random.Random(candidates.seed).shuffle(pairs)
    return pairs


STRATEGIES: Mapping[str, Strategy] = {
    "uniform": Strategy(_uniform),
    "frequency": Strategy(_frequency, needs_statistics=True),
    "front-loading": Strategy(_front_loading, keeps_layer_counts=False),
    "random": Strategy(_random),
}


def take_per_layer(ranking: Sequence[Pair], count: int) -> list[Pair]:
    """The first `count` of each layer."""
    taken: dict[int, int] = {}
    chosen: list[Pair] = []
    for layer, expert in ranking:
        if taken.get(layer, 0) < count:
            taken[layer] = taken.get(layer, 0) + 1
            chosen.append((layer, expert))
    return chosen
