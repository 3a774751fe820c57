"""How often draft tokens are accepted once all before them are, by where they come from and their place.

The first draft token of a layer is accepted more often than the second, which that layer drafts from what it
made itself. So rates of all requests together are kept by place. Of one request too few tokens are known for
that: what is kept is by what factor its draft tokens are accepted more or less often than those of all.
"""

from __future__ import annotations

from enum import IntEnum

# Draft tokens of all requests together that count, beside a request's own: texts differ more than layers.
_PRIOR = (4.0, 16.0)
# What remains, after a token, of what is known of a request's draft tokens, and of all requests'.
_KEPT, _KEPT_OF_ALL = 0.98, 0.998
# Accepted draft tokens after which none would be wrong never are for sure.
_SUREST = 0.999


class DraftSource(IntEnum):
    """Where draft tokens come from."""

    TEXT = 0  # a host drafter
    LAYERS = 1  # a device drafter


class PlaceRates:
    """Draft tokens of all requests of late, older ones count less. Filled by the policy."""

    def __init__(self, places: int) -> None:
        """`places`: draft tokens of a request in a step, at most."""
        empty = [[0.0] * places for _ in DraftSource]
        self._accepted, self._verified = empty, [list(own) for own in empty]

    def add(self, source: DraftSource, verified: int, accepted: int, num_tokens: int) -> None:
        """Counts draft tokens of a step that gave a number of tokens of output: the first `accepted` of the
        first `verified` were right."""
        kept = _KEPT_OF_ALL**num_tokens
        for table in (self._accepted, self._verified):
            table[:] = [[kept * count for count in own] for own in table]
        for place in range(verified):
            self._verified[source][place] += 1
            self._accepted[source][place] += place < accepted

    def rates(self, source: DraftSource) -> list[float]:
        """Returns the accepted share by place; where little is known, close to that of the place before, of
        the first place 1: so it is tried."""
        found, before = [], 1.0
        for accepted, verified in zip(self._accepted[source], self._verified[source], strict=True):
            before = (before + accepted) / (1 + verified)
            found.append(before)
        return found


class RequestRates:
    """The same of one request, against all. Filled by the policy."""

    def __init__(self) -> None:
        self._accepted = [0.0] * len(DraftSource)
        # What of all requests' would have been accepted.
        self._expected = [0.0] * len(DraftSource)

    def add(
        self, source: DraftSource, verified: int, accepted: int, num_tokens: int, usual: list[float]
    ) -> None:
        """Counts the same as `PlaceRates.add`; `usual`: its rates of this source before."""
        kept = _KEPT**num_tokens
        self._accepted = [kept * count for count in self._accepted]
        self._expected = [kept * count for count in self._expected]
        self._accepted[source] += accepted
        self._expected[source] += sum(usual[:verified])

    def rates(self, source: DraftSource, usual: list[float]) -> list[float]:
        """Returns the accepted share by place; where little is known of the request, about the `usual`."""
        known = _PRIOR[source] * usual[0]
        factor = (known + self._accepted[source]) / (known + self._expected[source])
        return [min(_SUREST, factor * rate) for rate in usual]
