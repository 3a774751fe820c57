"""What a decode step takes by its requests and draft tokens: measured, and between and beyond that modelled.

A step's time is taken to be linear in what it does,

    fixed + (with drafts) lost overlap + sum over places (distinct experts * per expert)

with the distinct experts that `overlap.py` expects of its rows at present. The coefficients are fitted to
times that were measured (`pace.py`). Captured graphs make stairs of what rows cost, which no line fits: so a
number of rows that was measured has a factor beside it, measured over modelled time, and numbers between two
such have a factor between theirs. Where residents or overlap change, all times follow at once, those that
were measured before as well.

Before there is a model the times themselves are the factors, and the model says 1.
"""

from __future__ import annotations

import json
import operator
import sys
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpu_service.speculation.overlap import ExpertOverlap, ExpertPlace, PlaceOverlap

# Captured graphs make stairs of what rows cost: a step of 9 runs the graph of 16, which took twice as long
# as that of 8 on one H200. With times of 9 to 16 taken as one, 9 looked half as dear.
_MEASURED_ALONE = 64
# Steps of fewer kinds tell fixed and variable times apart by chance only.
_ENOUGH_KINDS = 3
# What the fit prefers small coefficients by: the relative error of all times that a coefficient may cost
# which by itself would explain one whole time.
_SHRINKING = 0.01
# Rounds of the fit: of coordinate descent, and of weights that make outliers count less.
_DESCENTS, _REWEIGHTED = 100, 3
# Coefficients whose shares of a step's time change by less are found.
_SETTLED = 1e-5
# Relative errors from which on a time counts less.
_OUTLIER = 0.1
# Of its time a step takes at least that much by any model.
_LEAST = 1e-7

Features = NDArray[np.float64]
"""float64 `[5]`: 1, whether drafts are verified, and distinct experts of a layer by place."""
NUM_FEATURES = 2 + len(ExpertPlace)


def bucket(rows: int) -> int:
    """Returns rows of steps that are measured as one: each number up to 64, then multiples of 8."""
    return rows if rows <= _MEASURED_ALONE else -(-rows // 8) * 8


def features(overlap: ExpertOverlap, requests: int, drafts: int) -> Features:
    """Returns what a step does; with `drafts` 0 one that verifies none."""
    return np.array([1.0, float(drafts > 0), *overlap.distinct(requests, drafts)])


class MeasuredStep(NamedTuple):
    """Steps alike, for `fit`."""

    done: Features
    seconds: float
    weight: float


def fit(steps: Sequence[MeasuredStep]) -> tuple[float, ...] | None:
    """Returns the seconds of each feature, none negative; None: there are too few kinds of steps.

    Least squares of relative errors, with weights `min(1, bound / error)` (Huber 1964) so that single times
    that are off count little, solved by coordinate descent.
    """
    if len(steps) < _ENOUGH_KINDS or len({bool(step.done[1]) for step in steps}) < 2:
        return None
    seconds = np.array([step.seconds for step in steps])
    matrix = np.stack([step.done for step in steps]) / seconds[:, None]
    weights = known = np.array([step.weight for step in steps])
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-12)
    matrix = matrix / scale
    found = np.zeros(NUM_FEATURES)
    for _ in range(_REWEIGHTED):
        found = _nonnegative(matrix, weights, found)
        errors = np.abs(matrix @ found - 1.0)
        weights = known * np.minimum(1.0, _OUTLIER / np.maximum(errors, 1e-12))
    return tuple((found / scale).tolist())


def _nonnegative(matrix: Features, weights: Features, begin: Features) -> Features:
    """Minimises the weighted squares of `matrix @ found - 1`, and of `found` a little."""
    gram = (matrix * weights[:, None]).T @ matrix + _SHRINKING**2 * weights.sum() * np.eye(len(begin))
    target = matrix.T @ weights
    # Plain numbers: so few of them cost less than calls of numpy.
    rows, targets, found = gram.tolist(), target.tolist(), begin.tolist()
    for _ in range(_DESCENTS):
        moved = 0.0
        for index, row in enumerate(rows):
            rest = sum(map(operator.mul, row, found)) - row[index] * found[index]
            now = max(0.0, (targets[index] - rest) / row[index])
            moved, found[index] = max(moved, abs(now - found[index])), now
        if moved < _SETTLED:
            break
    return np.array(found)


class StepModel:
    """What a step should take at the present overlap and placement."""

    def __init__(self, coefficients: Sequence[float], overlap: Iterable[Iterable[Any]] | None = None) -> None:
        """`coefficients`: as `fit` returns; `overlap`: those of `ExpertOverlap.places`, or None."""
        self.coefficients = tuple(coefficients)
        places = None if overlap is None else tuple(PlaceOverlap(*place) for place in overlap)
        self.overlap = ExpertOverlap(places)

    def seconds(self, done: Features) -> float:
        """Returns the time of a step that does so much."""
        return max(_LEAST, float(np.dot(self.coefficients, done)))

    def of(self, requests: int, drafts: int) -> float:
        """Returns the time of a step of these numbers of requests and draft tokens."""
        fixed, verifies, *experts = self.coefficients
        distinct = self.overlap.distinct(requests, drafts)
        chosen = sum(each * count for each, count in zip(experts, distinct, strict=True))
        return max(_LEAST, fixed + (verifies if drafts else 0.0) + chosen)


class StepCosts:
    """Seconds of decode steps; read by the policy, alike on every rank."""

    def __init__(self) -> None:
        self._plain: Mapping[int, float] = {}
        self._verifying: list[tuple[int, float]] = []
        self._model: StepModel | None = None
        self._modelled: dict[tuple[int, int], float] = {}
        self.is_measured = False
        # Of what is known: another one after each `update`.
        self.version = 0

    def update(
        self, plain: Mapping[int, float], verifying: Mapping[int, float], model: StepModel | None = None
    ) -> None:
        """Takes the factors measured of steps without drafts, and with, by `bucket`: seconds over those of
        the model, or without one the seconds."""
        self._plain, self._model, self._modelled = plain, model, {}
        self._verifying = sorted({**plain, **verifying}.items())
        self.is_measured = True
        self.version += 1

    def plain(self, rows: int) -> float | None:
        """Returns the time of a step without drafts; None: it has to be measured first."""
        if not self.is_measured:
            return 1.0
        factor = self._plain.get(bucket(rows))
        return None if factor is None else factor * self._model_of(rows, 0)

    def verifying(self, requests: int, drafts: int) -> float:
        """Returns the time of a step with drafts. Without a model more rows than were ever tried cost as much
        as those."""
        if not self._verifying:
            return 1.0
        return self._factor(requests + drafts) * self._model_of(requests, drafts)

    def to_message(self) -> str:
        """Returns the text that `read` of every rank takes."""
        model = self._model
        parts = None if model is None else [model.coefficients, model.overlap.places]
        return json.dumps([self._plain, dict(self._verifying), parts])

    def read(self, message: str) -> None:
        """Takes the costs of another rank. Raises ValueError for what `to_message` did not write."""
        plain, verifying, parts = json.loads(message)
        model = None if parts is None else StepModel(*parts)
        self.update(_by_rows(plain), _by_rows(verifying), model)

    def _model_of(self, requests: int, drafts: int) -> float:
        if self._model is None:
            return 1.0
        found = self._modelled.get((requests, drafts))
        if found is None:
            found = self._modelled[requests, drafts] = self._model.of(requests, drafts)
        return found

    def _factor(self, rows: int) -> float:
        at = bisect_left(self._verifying, (rows, 0.0))
        if at == len(self._verifying):
            return self._verifying[-1][1]
        above, factor = self._verifying[at]
        if at == 0 or above == rows:
            return factor
        below, less = self._verifying[at - 1]
        return less + (factor - less) * (rows - below) / (above - below)

    def most_rows(self, rows: int) -> int:
        """Returns what may be tried: twice what was, unless there is a model. `rows`: of requests alone."""
        if not self.is_measured or self._model is not None:
            return sys.maxsize
        tried = self._verifying[-1][0] if self._verifying else rows
        return 2 * max(rows, tried)


def _by_rows(table: Mapping[str, float]) -> dict[int, float]:
    return {int(rows): factor for rows, factor in table.items()}
