"""Which exchanges of resident experts are worth their copies.

An expert that a token needs and the GPU lacks is read from RAM by an expert server. Copying it to the GPU
reads it from RAM as well, once, and takes that bandwidth from the servers; then tokens that choose it cost
nothing there. So an exchange pays when the newcomer is expected to be chosen more often than who leaves by as
many choices as the copy costs reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moebius import _kernels

# What a copy is taken to cost, in reads by servers, before it was measured (`ExpertCosts.copy_price`). On an
# H200 beside 16 AMX cores eight copies of 2.65 MB lengthened a step by 0.36 ms, 45 us each, where servers
# read such an expert in 17; and a forecast may be wrong.
USUAL_COPY_PRICE = 4.0
# Of choices, those that fetch slots are taken to leave at least.
_LEAST_LEFT = 0.1


@dataclass(frozen=True, eq=False, slots=True)
class Exchanges:
    """One expert for another in a slot of the same row; filled by `worthwhile`. N exchanges."""

    rows: NDArray[np.int64]  # [N]: of the layer, among those that have slots.
    newcomers: NDArray[np.int64]
    leavers: NDArray[np.int64]
    gains: NDArray[np.float64]  # [N]: choices, less the copy's cost.

    def __len__(self) -> int:
        return len(self.rows)

    def best(self, most: int) -> Exchanges:
        """Returns at most `most` of them, those that gain most first."""
        order = np.argsort(-self.gains, kind="stable")[:most]
        return Exchanges(self.rows[order], self.newcomers[order], self.leavers[order], self.gains[order])


def price_beside_fetching(copy_price: float, fetched: float) -> float:
    """Returns what a copy costs where decode steps fetch experts that they lack, in choices.

    A choice that a fetch slot holds takes no time, resident or not. `fetched`: the share of such choices
    among those of no resident, of late; only the others are saved by a copy. The share counts twice, because
    the choices by which a newcomer is ahead are the latest ones, which fetch slots hold more often than the
    rest: docs/benchmarks.md has what `moebius bench replay --fetch-slots 32` says of it.
    """
    return copy_price / max(_LEAST_LEFT, 1.0 - fetched) ** 2


def worthwhile(expected: NDArray[np.float64], resident: NDArray[np.bool_], copy_price: float) -> Exchanges:
    """Returns all that pay, each expert in one of them at most.

    expected: float64 `[rows, experts]`, choices within the time for which the forecast holds. resident: bool
    `[rows, experts]`, in a slot or on its way there. copy_price: choices by which a newcomer must be ahead.
    """
    return Exchanges(*_kernels.worthwhile_exchanges(expected, resident, copy_price))
