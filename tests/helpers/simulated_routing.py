"""A machine in virtual time whose steps take a fixed time and one for each distinct expert, by its place.

Every row draws its experts: a row of the same request keeps a share of those of the row before it, as real
routing does, and draws the others evenly. So what rows of one request share, and what rows of others do, is
counted, not assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from gpu_service.core.request import Request
from gpu_service.core.results import RowResult
from gpu_service.core.step import Batch

_EXPERTS, _TOP_K, _LAYERS = 128, 8, 4
# Steps whose choices are known: two that follow one another of this number, as a model runner samples them.
SAMPLED_EVERY = 8

# Rows of captured graphs.
_GRAPHS = (1, 2, 4, 8, *range(16, 65, 8))
Chosen = NDArray[np.int32]
"""int32 `[layers, top_k]`: a row's experts."""


@dataclass(frozen=True, slots=True)
class PlaceCosts:
    """Seconds of a step: what it takes without experts, and for each distinct expert of all layers."""

    fixed: float = 2.7e-3
    resident: float = 0.05e-3
    served: float = 1.0e-3
    # Of each row of the captured graph that a step runs.
    graph_row: float = 0.0


class RoutedMachine:
    """A `SimulatedMachine`; the tests change its overlap and its residents while it runs."""

    def __init__(self, overlap: float, resident_share: float, costs: PlaceCosts | None = None) -> None:
        """`overlap`: share of the experts of a request's row that its next row keeps; `resident_share`: of
        all experts, evenly."""
        self.overlap, self.costs = overlap, costs or PlaceCosts()
        self.resident_share = resident_share
        self.steps = 0
        self._rng = np.random.default_rng(3)
        self._latest: WeakKeyDictionary[Request, Chosen] = WeakKeyDictionary()
        # Of steps that are not committed: the rows' choices, by the step's number.
        self._in_flight: dict[int, tuple[Batch, list[list[Chosen]]]] = {}

    def seconds(self, batch: Batch) -> float:
        """Draws what the step's rows choose."""
        drafts = batch.drafts or [[]] * len(batch.requests)
        chains: list[list[Chosen]] = [[] for _ in batch.requests]
        for place in range(1 + max(map(len, drafts))):
            takers = [index for index, own in enumerate(drafts) if place <= len(own)]
            before = [
                chains[index][-1] if place else self._latest_of(batch.requests[index]) for index in takers
            ]
            for index, chosen in zip(takers, self._next(np.stack(before)), strict=True):
                chains[index].append(chosen)
        if not batch.drafts:
            for request, chain in zip(batch.requests, chains, strict=True):
                self._latest[request] = chain[0]
        self._in_flight[id(batch)] = batch, chains
        rows = np.stack([row for chain in chains for row in chain], axis=1)
        distinct = np.zeros((_LAYERS, _EXPERTS), dtype=bool)
        for layer in range(_LAYERS):
            distinct[layer, rows[layer].ravel()] = True
        residents = distinct[:, : self._num_residents].sum() / _LAYERS
        served = distinct.sum() / _LAYERS - residents
        size = next(size for size in _GRAPHS if size >= rows.shape[1])
        fixed = self.costs.fixed + size * self.costs.graph_row
        return fixed + residents * self.costs.resident + served * self.costs.served

    def committed(self, batch: Batch, results: Sequence[RowResult]) -> NDArray[np.int32] | None:
        """Returns the choices of a step that is sampled, int32 `[3, layers, rows, top_k]`: all, those that
        are not resident, and those that servers compute."""
        _, chains = self._in_flight.pop(id(batch))
        for request, chain, own, result in zip(
            batch.requests, chains, batch.drafts or [[]] * len(chains), results, strict=True
        ):
            if batch.drafts:
                given = [result.token_id, *(row.token_id for row in result.verified)]
                accepted = 0
                while accepted < len(own) and own[accepted] == given[accepted]:
                    accepted += 1
                self._latest[request] = chain[accepted]
        self.steps += 1
        if self.steps % SAMPLED_EVERY > 1:
            return None
        rows = np.stack([row for chain in chains for row in chain], axis=1)
        left = np.where(rows < self._num_residents, -1, rows)
        return np.stack([rows, left, left])

    @property
    def _num_residents(self) -> int:
        return round(self.resident_share * _EXPERTS)

    def _latest_of(self, request: Request) -> Chosen:
        if request not in self._latest:
            self._latest[request] = self._next(np.zeros((1, _LAYERS, _TOP_K), dtype=np.int32), 0.0)[0]
        return self._latest[request]

    def _next(self, before: Chosen, overlap: float | None = None) -> Chosen:
        """Returns what the rows after those of `before`, int32 `[rows, layers, top_k]`, choose."""
        ranks = self._rng.random((*before.shape[:2], _EXPERTS))
        kept = self._rng.random(before.shape) < (self.overlap if overlap is None else overlap)
        at = np.take_along_axis(ranks, before, axis=2)
        # An expert that is not kept may not be drawn again: what rows share is exactly the overlap.
        np.put_along_axis(ranks, before, np.where(kept, at - 1, at + 1 if self.overlap else at), axis=2)
        found: Chosen = np.argpartition(ranks, _TOP_K, axis=2)[:, :, :_TOP_K].astype(np.int32)
        return found
