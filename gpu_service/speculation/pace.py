"""The first rank's clock for `policy.py`: what decode steps take, by what they do, with and without drafts.

Measured from commit to commit, as clients see it: a step without drafts overlaps with its neighbours, one
with drafts does not. Only steps in which every request decodes count. Some of them come with the experts that
their rows chose, from which it counts what rows share (`overlap.py`); to all times it fits what experts cost
(`step_costs.py`). Memory is bounded: of steps alike, with as many rows and about as many experts at each
place, one time is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from gpu_service.core.step import Batch
from gpu_service.speculation.overlap import Choices, ExpertOverlap, ExpertPlace
from gpu_service.speculation.step_costs import (
    Features,
    MeasuredStep,
    StepCosts,
    StepModel,
    bucket,
    features,
    fit,
)

# Weight of the newest time, and how much of the mean so far it counts at most: a pause is not the usual.
_NEWEST, _MOST = 0.25, 2.0
# Changes of a time that are not worth a message to all ranks.
_REPORTED_CHANGE = 0.05
# Of the first few times of a number of rows the shortest counts: any of them may have compiled or loaded
# something. Where it was forgotten and is measured again, the median does.
_FIRST = 4
# With a model, this number of times that are as it says count beside those that were measured.
_AS_MODELLED = 1.0
# How often a step without drafts has to be measured before others are compared with it.
_TRUSTED = 3
# Decode steps after which a time that was not measured again is forgotten, so that it is. That of steps
# without drafts at first sooner, each time later: drafts that always are worth it leave none to measure.
_FORGOTTEN, _FORGOTTEN_AT_FIRST = 512, 64
# Decode steps after which the model is fitted again, a time that it is fitted to counts half, and one is
# dropped. Steps count as alike where they leave the same quarter of their experts to servers.
_FITTED_EVERY, _HALF_LIFE, _REMEMBERED, _QUARTERS = 8, 512, 4096, 4
# A model by which a measured step should have taken less than this, or more than its inverse, of what it took
# is of no use.
_LEAST_FACTOR = 0.5


@dataclass(slots=True)
class _Time:
    seconds: float
    done: Features
    step: int  # of all decode steps: when it was last measured
    is_again: bool = False
    count: int = 0
    first: list[tuple[float, Features]] = field(default_factory=list)

    def measured(self, seconds: float, done: Features, step: int) -> None:
        self.count += 1
        if self.count <= _FIRST:
            self.first.append((seconds, done))
            self.first.sort(key=lambda measured: measured[0])
            self.seconds, self.done = self.first[(self.count - 1) // 2 if self.is_again else 0]
        else:
            self.seconds += _NEWEST * (min(seconds, _MOST * self.seconds) - self.seconds)
            self.done = self.done + _NEWEST * (done - self.done)
        self.step = step


_Times = dict[int, _Time]


class DraftPace:
    """Changed by the engine thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Of steps without drafts and with, by rows.
        self._plain: _Times = {}
        self._verifying: _Times = {}
        # Of which there ever were times, by whether drafts were verified, and rows.
        self._known: set[tuple[bool, int]] = set()
        # After how many steps those without drafts are forgotten next, by rows.
        self._lasts: dict[int, int] = {}
        self.overlap = ExpertOverlap()
        # What the model is fitted to, by whether drafts are verified, rows and quarter; and its coefficients.
        self._fitted: dict[tuple[bool, int, int], _Time] = {}
        self._coefficients: tuple[float, ...] | None = None
        self._sampled: tuple[Batch, Choices] | None = None
        # What all ranks know: which times, and whether there is a model; and how many requests decoded last.
        self._reported, self._requests = StepCosts(), 0
        self._reported.update({}, {})
        self._kinds: tuple[set[int], set[int], bool] = set(), set(), True
        # Whether a step has ended since `message` was asked; a prefill lane asks between its layers, too.
        self._has_ended = False
        self._steps = 0
        self._last: float | None = None

    def idled(self) -> None:
        """There was nothing to compute: the time since the last commit is no step's."""
        self._last = self._sampled = None

    def committed(self, batch: Batch, overlaps: bool, choices: Choices | None = None) -> None:
        """A step has ended; `overlaps`: it was launched while another was in flight, or none ever is;
        `choices`: of a step that is sampled, what its rows chose."""
        last, self._last, self._has_ended = self._last, self._clock(), True
        self._sample(batch, choices)
        # A step without drafts in which the drafter runs all the same is of neither kind.
        is_kind = bool(batch.drafts) or (overlaps and not batch.num_drafts and not batch.runs_drafter)
        if last is None or not batch.is_uniform_decode or not is_kind:
            return
        self._steps += 1
        self._measured(batch, self._last - last)
        self._forget()
        if self._steps % _FITTED_EVERY == 0:
            self._fit()

    def _sample(self, batch: Batch, choices: Choices | None) -> None:
        """Counts what rows share, of two consecutive steps as of one with accepted drafts."""
        before, self._sampled = self._sampled, None
        if choices is None or not batch.is_uniform_decode or choices.shape[2] != batch.num_tokens:
            return
        if not (choices[0] >= 0).any():
            return
        if self.overlap.places is None:
            # What steps did so far is not known.
            self._fitted.clear()
        if batch.drafts:
            self.overlap.observe(choices, [1 + len(own) for own in batch.drafts])
            return
        self._sampled = batch, choices
        if before is None or not _follows(batch, before[0]):
            self.overlap.observe(choices, [1] * len(batch.requests))
            return
        pairs = np.stack([before[1], choices], axis=3)
        self.overlap.observe(pairs.reshape(*pairs.shape[:2], -1, pairs.shape[-1]), [2] * len(batch.requests))

    def _forget(self) -> None:
        for rows, known in list(self._verifying.items()):
            if self._steps - known.step > _FORGOTTEN:
                del self._verifying[rows]
        for rows, known in list(self._plain.items()):
            lasts = self._lasts.setdefault(rows, _FORGOTTEN_AT_FIRST)
            if self._steps - known.step > lasts:
                self._lasts[rows] = min(2 * lasts, _FORGOTTEN)
                del self._plain[rows]

    def _measured(self, batch: Batch, seconds: float) -> None:
        verifies, rows, self._requests = bool(batch.drafts), bucket(batch.num_tokens), len(batch.requests)
        done = features(self.overlap, len(batch.requests), batch.num_tokens - len(batch.requests))
        experts = done[-len(ExpertPlace) :]
        served = float(experts[ExpertPlace.SERVED] / max(experts.sum(), 1e-9))
        key = verifies, rows, round(_QUARTERS * served)
        times = self._verifying if verifies else self._plain
        is_again = (verifies, rows) in self._known
        self._known.add((verifies, rows))
        new = partial(_Time, seconds, done, self._steps)
        for known in times.setdefault(rows, new(is_again)), self._fitted.setdefault(key, new()):
            known.measured(seconds, done, self._steps)

    def _fit(self) -> None:
        if self.overlap.places is None:
            return
        ages = {key: self._steps - known.step for key, known in self._fitted.items()}
        self._fitted = {key: known for key, known in self._fitted.items() if ages[key] <= _REMEMBERED}
        found = fit(
            [
                MeasuredStep(known.done, known.seconds, 0.5 ** (ages[key] / _HALF_LIFE))
                for key, known in self._fitted.items()
                if known.count >= (1 if key[0] else _TRUSTED)
            ]
        )
        if found is not None:
            self._coefficients = found

    def message(self) -> str | None:
        """Returns the message for `Speculation.read` of every rank; None: nothing has changed by much."""
        if not self._has_ended:
            return None
        self._has_ended, model = False, None
        if self._coefficients is not None:
            model = StepModel(self._coefficients, self.overlap.places)
        plain = _factors(self._plain, model, _TRUSTED)
        verifying = _factors(self._verifying, model, 1)
        if not all(_LEAST_FACTOR < factor < 1 / _LEAST_FACTOR for factor in {**plain, **verifying}.values()):
            # What the model says is not what steps take.
            model = None
            plain, verifying = _factors(self._plain, None, _TRUSTED), _factors(self._verifying, None, 1)
        kinds = set(plain), set(verifying), model is None
        costs = StepCosts()
        costs.update(plain, verifying, model)
        if kinds == self._kinds and _are_close(costs, self._reported, self._requests):
            return None
        self._kinds, self._reported = kinds, costs
        return costs.to_message()


def _factors(times: _Times, model: StepModel | None, least: int) -> dict[int, float]:
    """Returns seconds over those of the model, of times that were measured often enough."""
    found = {rows: known for rows, known in times.items() if known.count >= least}
    if model is None:
        return {rows: known.seconds for rows, known in found.items()}
    return {rows: _factor(known, model) for rows, known in found.items()}


def _factor(known: _Time, model: StepModel) -> float:
    """Returns seconds over those of the model, closer to 1 where few were measured."""
    factor = known.seconds / model.seconds(known.done)
    return 1.0 + (factor - 1.0) * known.count / (known.count + _AS_MODELLED)


def _follows(batch: Batch, before: Batch) -> bool:
    """Returns whether a step computes the next token of each request of the one before, and no others."""
    return batch.requests == before.requests and batch.start_positions == [
        start + 1 for start in before.start_positions
    ]


def _are_close(costs: StepCosts, reported: StepCosts, requests: int) -> bool:
    """Returns whether both say about the same of the steps of `requests` that may come next."""
    drafts = {1, 2, 3, requests, 2 * requests, 3 * requests}
    pairs = [(costs.verifying(requests, count), reported.verifying(requests, count)) for count in drafts]
    plain, before = costs.plain(requests), reported.plain(requests)
    if plain is not None and before is not None:
        pairs.append((plain, before))
    return all(abs(now - then) <= _REPORTED_CHANGE * then for now, then in pairs)
