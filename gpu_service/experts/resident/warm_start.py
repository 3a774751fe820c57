"""Which experts a start loads where it is known what requests chose before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Residents = Mapping[int, Sequence[int]]
# Tokens of an even choice that recorded ones are averaged with: few of them say little.
_PRIOR_TOKENS = 32.0


def most_chosen(placed: Residents, known: Mapping[int, NDArray[np.int64]]) -> dict[int, tuple[int, ...]]:
    """Returns as many experts of each layer as `placed` has, those that were chosen most; of equals those
    placed.

    known: counts int64 `[num_experts]` by layer; a layer without counts keeps what is placed.
    """
    found = {layer: tuple(experts) for layer, experts in placed.items()}
    for layer, counts in known.items():
        if layer in found and counts.any():
            ranking = _ranking(counts, found[layer])
            found[layer] = tuple(sorted(ranking[: len(found[layer])]))
    return found


def most_saving(
    placed: Residents,
    known: Mapping[int, NDArray[np.int64]],
    expert_bytes: Mapping[int, int],
    top_k: int,
) -> dict[int, tuple[int, ...]]:
    """Returns the experts of all layers together that save most time per byte, in as many bytes as `placed`
    takes.

    An expert that is resident saves the time in which a server reads its bytes, as often as it is chosen: per
    byte of GPU memory that is how often tokens choose it, whatever its size. Every layer that has residents
    keeps one at least: choices are counted in such layers only. `expert_bytes` by layer. Where a layer's
    counts are missing, layers keep their numbers.
    """
    room = sum(len(experts) * expert_bytes[layer] for layer, experts in placed.items())
    candidates, found = [], dict[int, list[int]]()
    for layer, experts in placed.items():
        counts = known.get(layer)
        if counts is None or not counts.any():
            return most_chosen(placed, known)
        tokens, even = counts.sum() / top_k, top_k / len(counts)
        rates = (counts + _PRIOR_TOKENS * even) / (tokens + _PRIOR_TOKENS)
        first, *others = _ranking(counts, experts)
        found[layer] = [first]
        room -= expert_bytes[layer]
        candidates += [(-float(rates[expert]), place, layer, expert) for place, expert in enumerate(others)]
    for _, _, layer, expert in sorted(candidates):
        if expert_bytes[layer] <= room:
            found[layer].append(expert)
            room -= expert_bytes[layer]
    return {layer: tuple(sorted(experts)) for layer, experts in found.items()}


def _ranking(counts: NDArray[np.int64], placed: Sequence[int]) -> list[int]:
    """Returns expert ids, most often chosen first; of equals those that are placed."""
    held = set(placed)
    return sorted(range(len(counts)), key=lambda expert: (-int(counts[expert]), expert not in held, expert))
