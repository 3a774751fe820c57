"""How many distinct experts of a layer a step's rows choose, by where these are computed.

Steps cost what they read: an expert that several rows choose is read once. Rows of different requests choose
nearly independently; a further row of the same request, which a draft token is, chooses much of what the row
before it chose. So for each place three numbers are kept, decayed means over sampled steps:

    k    choices of a row
    c    share of a row's choices that another request's row has, too
    v    what a further row of a request counts for, in rows of other requests

From them R requests with D draft tokens choose, as independent rows do (each new row finds the share
`(1 - c) ** rows` of its choices not chosen yet),

    k * (1 - (1 - c) ** n) / c,     n = R + v * D

distinct experts. v is counted without any draft token, too: rows of the same requests in two consecutive
steps are what one step with accepted draft tokens would have computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Choices = NDArray[np.int32]
"""int32 `[3, L, T, K]`: the experts of T rows in L layers: all, those that are not resident, and those that
are left to servers; -1 where a choice is not among these."""

# Weight of the newest sample: after three of them half of what is known is newer.
_NEWEST = 0.25
# Choices of a row at a place with fewer say nothing of what rows share there.
_LEAST_CHOICES = 0.05
# A row may share less with the one before it than with others.
_MOST_NEW = 1.5
_BISECTIONS = 30
# Where that large a share of the choices has moved from one place to another, what was known is no guide.
_MOVED = 0.25


class ExpertPlace(IntEnum):
    """Where an expert is computed."""

    RESIDENT = 0  # in a slot of the device
    FETCHED = 1  # copied to the device by the step, or streamed
    SERVED = 2  # by expert servers


class PlaceOverlap(NamedTuple):
    """What rows choose at one place, and share; filled by `ExpertOverlap.observe`."""

    per_row: float  # k
    # c, in [0, 1], and v, in [0, _MOST_NEW]; None: not seen yet, and taken for 0 and 1.
    shared: float | None = None
    new: float | None = None

    def distinct(self, requests: float, drafts: float) -> float:
        """Returns the distinct experts of a layer, of `requests` rows and `drafts` further ones."""
        new = 1.0 if self.new is None else self.new
        return self.per_row * _independent(requests + new * drafts, self.shared or 0.0)


@dataclass(slots=True)
class ExpertOverlap:
    """The overlap by place, in the order of `ExpertPlace`; changed by the first rank's `DraftPace`."""

    # None: nothing was sampled yet.
    places: tuple[PlaceOverlap, ...] | None = None

    def distinct(self, requests: float, drafts: float) -> tuple[float, ...]:
        """Returns distinct experts of a layer by place; zeros before anything was sampled."""
        if self.places is None:
            return (0.0,) * len(ExpertPlace)
        return tuple(place.distinct(requests, drafts) for place in self.places)

    def observe(self, choices: Choices, counts: Sequence[int]) -> None:
        """Takes a sampled step: `counts` rows of each request follow each other, the first of which is its
        own token's."""
        firsts = np.cumsum([0, *counts[:-1]])
        everything, missing, served = choices >= 0
        masks = (everything & ~missing, missing & ~served, served)
        pairs, rows = float(max(1, everything.sum())), choices.shape[1] * choices.shape[2]
        before = self.places or (None,) * len(ExpertPlace)
        found = []
        for known, mask in zip(before, masks, strict=True):
            has_moved = known is not None and abs(mask.sum() - known.per_row * rows) > _MOVED * pairs
            found.append(_observed(None if has_moved else known, choices[0], mask, firsts, len(counts)))
        self.places = tuple(found)


def _observed(
    known: PlaceOverlap | None,
    ids: Choices,
    mask: NDArray[np.bool_],
    firsts: NDArray[np.int64],
    requests: int,
) -> PlaceOverlap:
    """`ids` int32 and `mask` bool `[L, T, K]`: all choices, and which of them are at the place."""
    layers, rows, _ = ids.shape
    first = mask[:, firsts]
    per_row = float(mask.sum()) / (layers * rows)
    drafts = rows - requests
    # The mean of all rows, so that requests whose rows differ are no overlap.
    shared = None if known is None else known.shared
    if requests > 1 and first.sum() >= _LEAST_CHOICES * layers * requests:
        distinct = _count(ids[:, firsts], first)
        shared = _shared_of(requests, distinct / float(first.sum()))
    new = None
    if drafts and per_row >= _LEAST_CHOICES:
        independent = _rows_of(_count(ids, mask) / (layers * per_row), shared or 0.0)
        new = min(_MOST_NEW, max(0.0, (independent - requests) / drafts))
    if known is None:
        return PlaceOverlap(per_row, shared, new)
    choices = known.per_row + _NEWEST * (per_row - known.per_row)
    return PlaceOverlap(choices, _mean(known.shared, shared), _mean(known.new, new))


def _mean(known: float | None, newest: float | None) -> float | None:
    if known is None or newest is None:
        return known if newest is None else newest
    return known + _NEWEST * (newest - known)


def _count(ids: Choices, mask: NDArray[np.bool_]) -> int:
    """Returns the distinct experts of all layers together."""
    found = np.zeros((ids.shape[0], int(ids.max(initial=0)) + 1), dtype=np.bool_)
    layers = np.broadcast_to(np.arange(ids.shape[0])[:, None, None], ids.shape)
    found[layers[mask], ids[mask]] = True
    return int(found.sum())


def _independent(rows: float, shared: float) -> float:
    """Returns distinct choices of independent rows, in choices of one row."""
    if shared < 1e-9:
        return rows
    return float((1.0 - (1.0 - min(1.0, shared)) ** rows) / shared)


def _shared_of(rows: int, share: float) -> float:
    """Returns c of independent rows of whose choices the `share` is distinct."""
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _independent(rows, middle) > rows * share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _rows_of(distinct: float, shared: float) -> float:
    """Returns the number of independent rows with that many distinct choices, in choices of one row."""
    if shared < 1e-9:
        return distinct
    left = 1.0 - min(1.0, shared) * distinct
    if left <= 0 or shared >= 1:
        return math.inf
    return math.log(left) / math.log1p(-shared)
