"""Which exchanges of resident experts are worth their copies.

An expert that a token needs and the GPU lacks is read from RAM by an expert server. Copying it to the GPU
reads it from RAM as well, once, and takes that bandwidth from the servers; then tokens that choose it cost
nothing there. So an exchange pays when the newcomer is chosen, within the time for which the forecast
holds, more often than who leaves by as many choices as the copy costs (`ExpertCosts.copy_price`). Differences
within what chance makes of so few observed tokens are not believed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpu_service.experts.adaptive.forecast import Rates

# Of a half-life, the mean time that a weight of it lasts: 1 / ln 2.
_MEAN_LIFE = 1.4427
# Standard errors by which a newcomer has to be better.
_DOUBT = 0.7


@dataclass(frozen=True, slots=True)
class Exchange:
    """One expert for another in a layer's slot; filled by `worthwhile`."""

    row: int  # Of the layer, among those that have slots.
    newcomer: int
    leaver: int
    gain: float  # Choices per token.


def worthwhile(
    rates: Rates,
    tokens: NDArray[np.float64],
    half_lives: NDArray[np.float64],
    resident: NDArray[np.bool_],
    most: int,
    copy_price: float,
) -> list[Exchange]:
    """At most `most` exchanges, the best first, each expert in one of them at most.

    copy_price: choices by which a newcomer has to be ahead of who leaves. rates float64
    `[layers, experts]`; tokens and half_lives float64 `[layers]`, as a `RoutingForecast` has them; resident
    bool `[layers, experts]`: in a slot, or on its way there.
    """
    found: list[Exchange] = []
    threshold = copy_price / (_MEAN_LIFE * half_lives)
    absent = np.where(resident, -1.0, rates)
    present = np.where(resident, rates, np.inf)
    # Most layers have nothing to gain: the best that is absent against the worst that is present.
    margin = absent.max(axis=1) - present.min(axis=1) - threshold
    for row in np.argsort(-margin)[: most or None]:
        if margin[row] <= 0:
            break
        found += _of_layer(int(row), absent[row], present[row], float(tokens[row]), float(threshold[row]))
    found.sort(key=lambda exchange: -exchange.gain)
    return found[:most]


def _of_layer(
    row: int, absent: NDArray[np.float64], present: NDArray[np.float64], tokens: float, threshold: float
) -> list[Exchange]:
    found = []
    for newcomer, leaver in zip(
        np.argsort(-absent, kind="stable"), np.argsort(present, kind="stable"), strict=True
    ):
        better, worse = float(absent[newcomer]), float(present[leaver])
        if better < 0 or not np.isfinite(worse):
            break
        doubt = _DOUBT * ((better + worse) / max(1.0, tokens)) ** 0.5
        if better - worse <= threshold + doubt:
            break
        found.append(Exchange(row, int(newcomer), int(leaver), better - worse))
    return found
