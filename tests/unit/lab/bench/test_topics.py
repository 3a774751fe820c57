"""Guards `moebius bench topics`: what counts as settled and as back, and runs too short to say."""

from __future__ import annotations

import pytest

from lab.bench.engine.drive import TokenEvent
from lab.bench.topics import result_of
from moebius.errors import UserError


def events(*rates: int) -> list[TokenEvent]:
    """Returns a window of each rate, and the beginning of one more."""
    return [TokenEvent(n + i / rate, 0, 1, False) for n, rate in enumerate([*rates, 1]) for i in range(rate)]


def test_back_is_where_two_windows_in_a_row_reach_the_settled_rate() -> None:
    """One fast window between slow ones is not back; the settled rate is that of the last third."""
    result = result_of(2, events(40, 96, 50, 95, 100, 100, 100, 100, 100))
    assert (result.topic, result.first, result.settled) == (2, 40.0, 100.0)
    assert result.seconds_until_back == 3.0
    assert result.ratio == 0.4


def test_a_rate_that_never_changes_is_back_at_once() -> None:
    """Where every expert is on the GPU, a topic costs nothing."""
    assert result_of(0, events(50, 50, 50, 50)).seconds_until_back == 0.0


def test_too_short_a_topic_is_refused() -> None:
    """Three windows at least, or settled and first are the same."""
    with pytest.raises(UserError, match="more --seconds"):
        result_of(0, events(50, 50))
