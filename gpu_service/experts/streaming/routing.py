"""Which experts steps chose lately: what a step had better copy, and what it leaves to expert servers.

Routing is uneven and changes slowly from step to step. Servers take few rows of many experts quickly and many
rows slowly, a link copies an expert in the same time whatever its rows. So those with the most rows are
streamed, by the counts of earlier steps; those that get none are not copied, and cost servers nothing. A
prediction that was wrong costs time only: expert servers compute what is not copied, and the prefill lane,
which asks none, copies what its router has chosen against expectation.

Ranks that share layers route alike, and take the largest of all ranks' counts, so that their plans are the
same whatever rounding does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from gpu_service.experts.streaming.plan import SHARES

# Of the sums, what remains when the next step is added.
_KEPT = 0.8
# Of a step's (row, expert) pairs, how many more another order has to bring into the streamed half: what lies
# side by side is copied faster, and a new order means new plans.
_WORTH = 0.04
# Weight of a step's pairs in what is expected of the next one.
_NEWEST = 0.3
# An expert is taken to have been chosen so often more than it was: that it has not been yet says no more.
_UNSEEN = 0.5
# Rows that an expert is expected to have at least, or it will rather have none (by Poisson's distribution).
_LEAST_EXPECTED = math.log(2)

Counts = npt.NDArray[np.int64]
"""int64 `[layers, num_experts]`: rows of each expert."""


def count_chosen(chosen: Sequence[torch.Tensor], num_experts: int) -> torch.Tensor:
    """Returns int32 `[layers, num_experts]` of int32 ids `[T, K]` of each layer; ids below 0 are none.

    Waits for nothing.
    """
    ids = torch.stack([each.reshape(-1) for each in chosen]).long()
    layers = ids.shape[0]
    rows = torch.arange(layers, device=ids.device)[:, None] * num_experts
    places = torch.where(ids >= 0, ids + rows, layers * num_experts).reshape(-1)
    counts = torch.zeros(layers * num_experts + 1, dtype=torch.int32, device=ids.device)
    counts.scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32))
    return counts[:-1].view(layers, num_experts)


class RecentRouting:
    """The routing of one rank's layers. Driven by the thread that launches steps."""

    def __init__(self, layers: Sequence[int], num_experts: int, known: Mapping[int, Sequence[int]]) -> None:
        """`known`: recorded counts by layer, for the first steps; layers without any have all alike."""
        self.layers = tuple(layers)
        self._sums = np.zeros((len(self.layers), num_experts))
        # Of all experts, those that may not be streamed included.
        self._pairs = np.zeros((len(self.layers), 1))
        # What plans are made from; all alike: the first experts, which lie together.
        self._used = np.array([known.get(layer, (0,) * num_experts) for layer in self.layers], np.int64)
        self._left: npt.NDArray[np.float64] | None = None

    def counts(self, layer: int) -> Sequence[int]:
        """Returns the counts for `chosen_experts`: those with the largest numbers are streamed."""
        used: list[int] = self._used[self.layers.index(layer)].tolist()
        return used

    def add(self, counts: Counts, available: npt.NDArray[np.bool_]) -> bool:
        """A step has ended; True: other experts are streamed first now.

        `available` `[layers, num_experts]`: may be streamed. An order is judged by a step that it was not
        made from: of even routing each step's own order would always look better than another.
        """
        self._pairs = _KEPT * self._pairs + counts.sum(axis=1, keepdims=True)
        step = np.where(available, counts, 0)
        if not step.any():
            return False
        half = SHARES // 2
        changed = False
        if self._sums.any():
            found = covered(step, np.where(available, self._sums, -1.0), available)
            # Three standard deviations of such a difference by chance.
            worth = _WORTH + 3 * (0.5 / step.sum()) ** 0.5
            if found[half] > covered(step, self._order(available), available)[half] + worth:
                self._used = np.ceil(self._sums * 16).astype(np.int64)
                self._left, changed = None, True
        left = 1.0 - covered(step, self._order(available), available)
        self._left = left if self._left is None else self._left + _NEWEST * (left - self._left)
        self._sums = _KEPT * self._sums + step
        return changed

    def unrouted(self, pairs: int) -> npt.NDArray[np.bool_]:
        """Returns `[layers, num_experts]`: experts that probably have no row in a step of `pairs` (row,
        expert) pairs a layer. None where no step has shown anything yet.
        """
        weight = self._sums + _UNSEEN
        expected = pairs * weight / (self._pairs + _UNSEEN * weight.shape[1])
        found: npt.NDArray[np.bool_] = (self._pairs > 0) & (expected < _LEAST_EXPECTED)
        return found

    def left(self) -> tuple[float, ...]:
        """By streamed share, 0 to SHARES: the part of the pairs that servers should have; empty: unknown."""
        return () if self._left is None else tuple(self._left.tolist())

    def _order(self, available: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        return np.where(available, self._used.astype(np.float64), -1.0)


def covered(
    step: Counts, order: npt.NDArray[np.float64], available: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """Returns `[SHARES + 1]`: by share, which part of a step's pairs streaming the largest of `order` takes.

    Experts that are not available have the smallest numbers.
    """
    ranked = np.take_along_axis(step, np.argsort(-order, axis=1, kind="stable"), axis=1)
    sums = np.concatenate([np.zeros((len(step), 1), np.int64), ranked.cumsum(axis=1)], axis=1)
    # As `chosen_experts` does, for every layer and share.
    chosen = -(-available.sum(axis=1)[:, None] * np.arange(SHARES + 1) // SHARES)
    taken: npt.NDArray[np.float64] = np.take_along_axis(sums, chosen, axis=1).sum(axis=0) / max(
        1, int(step.sum())
    )
    return taken
