"""How often draft tokens are accepted once all before them are, by where they come from."""

from __future__ import annotations

from enum import IntEnum

# Draft tokens of all requests together that count, beside a request's own.
_PRIOR = 2.0
# What remains, after a token, of what is known of a request's draft tokens, and of all requests'.
KEPT, KEPT_OF_ALL = 0.98, 0.998


class DraftSource(IntEnum):
    """Where draft tokens come from."""

    TEXT = 0  # a host drafter
    LAYERS = 1  # a device drafter


class AcceptanceRates:
    """Draft tokens of late, of one request or of all; older ones count less. Filled by the policy."""

    def __init__(self, kept: float = KEPT) -> None:
        """`kept`: what remains of the counts after a token."""
        self._kept = kept
        self.accepted = [0.0] * len(DraftSource)
        self.verified = [0.0] * len(DraftSource)

    def add(self, source: DraftSource, verified: int, accepted: int, num_tokens: int) -> None:
        """Counts draft tokens of a step that gave a number of tokens of output."""
        kept = self._kept**num_tokens
        self.accepted = [kept * count for count in self.accepted]
        self.verified = [kept * count for count in self.verified]
        self.accepted[source] += accepted
        self.verified[source] += verified

    def rate(self, source: DraftSource, of_all: AcceptanceRates) -> float:
        """Returns the share that is accepted; where little is known of it, close to that `of_all`."""
        usual = (1 + of_all.accepted[source]) / (1 + of_all.verified[source])
        return (_PRIOR * usual + self.accepted[source]) / (_PRIOR + self.verified[source])
