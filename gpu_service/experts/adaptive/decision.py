"""What a placement wants exchanged by all it has seen: free of threads and devices, so that
`moebius bench replay` decides as the engine does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpu_service.experts.adaptive.counts import Observation
from gpu_service.experts.adaptive.exchange import Wanted
from gpu_service.experts.adaptive.forecast import RoutingForecast
from gpu_service.experts.adaptive.policy import worthwhile

# Exchanges that may wait, and experts for empty slots: later counts know better.
_MOST_WANTED, _MOST_REFILLED = 64, 256


class PlacementDecision:
    """Decides the exchanges of layers with slots. Not thread safe."""

    def __init__(
        self,
        layers: Sequence[int],
        slots: Sequence[int],
        resident: NDArray[np.bool_],
        top_k: int,
        known: NDArray[np.int64] | None = None,
    ) -> None:
        """`slots`: how many each layer has. `resident` bool `[layers, experts]`: in slots now. `known`:
        recorded counts int64 `[layers, experts]`, to begin with.
        """
        self._layers = tuple(layers)
        self._slots = np.asarray(slots)
        self._forecast = RoutingForecast(resident, top_k, known)

    def resize(self, slots: NDArray[np.int64]) -> None:
        """Sets how many slots each layer has now, int64 `[layers]`."""
        self._slots = slots

    def observe(self, observation: Observation, copy_price: float) -> None:
        """Notes what was chosen after everything that was observed before; copies cost `copy_price` reads."""
        self._forecast.observe(observation, copy_price)

    def wanted(self, resident: NDArray[np.bool_], copy_price: float) -> list[Wanted]:
        """Returns the most urgent exchanges first.

        `resident` bool `[layers, experts]`: in a slot, or on its way.
        """
        expected = self._forecast.expected
        refilled = self._refilled(resident, expected)
        found = worthwhile(expected, resident, copy_price).best(_MOST_WANTED)
        pairs = zip(found.rows.tolist(), found.newcomers.tolist(), found.leavers.tolist(), strict=True)
        return refilled + [Wanted(self._layers[row], newcomer, leaver) for row, newcomer, leaver in pairs]

    def _refilled(self, resident: NDArray[np.bool_], expected: NDArray[np.float64]) -> list[Wanted]:
        """Returns the best absent experts for empty slots: those of layers that got memory, or whose expert
        could not be copied.
        """
        empty = self._slots - resident.sum(axis=1)
        rates, found = self.rates, list[tuple[float, Wanted]]()
        for row in np.flatnonzero(empty > 0).tolist():
            absent = np.where(resident[row], -1.0, expected[row])
            best = np.argsort(-absent, kind="stable")[: empty[row]].tolist()
            found += [(float(-rates[row, n]), Wanted(self._layers[row], n, -1)) for n in best]
        found.sort(key=lambda pair: pair[0])
        return [wanted for _, wanted in found[:_MOST_REFILLED]]

    @property
    def rates(self) -> NDArray[np.float64]:
        """The rates that `RoutingForecast.rates` gives."""
        return self._forecast.rates

    @property
    def half_lives(self) -> dict[int, float]:
        """By layer: what its forecast follows, tokens."""
        return dict(zip(self._layers, self._forecast.half_lives.tolist(), strict=True))

    def to_record(self) -> NDArray[np.int64]:
        """Counts int64 `[layers, experts]` for a file that a later start begins with."""
        return self._forecast.to_record()
