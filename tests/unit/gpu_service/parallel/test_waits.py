"""Invariant: ranks that others wait for are named once the limit is over, and none of a group that works."""

from __future__ import annotations

import pytest

from gpu_service.parallel.waits import CollectiveWaits, late_ranks, late_words


@pytest.mark.parametrize(
    ("waited_s", "late"),
    [
        ([0.0, 0.0, 0.0], ()),
        ([59.9, 0.0, 59.0], ()),
        ([60.0, 0.0, 47.0], (1,)),
        ([0.0, 61.0, 61.0], (0,)),
        ([0.2, 61.0, 29.0, 50.0], (0, 2)),
        # No rank is known to be late: the device of one of them is.
        ([61.0, 46.0, 60.0], ()),
    ],
)
def test_the_ranks_that_do_not_wait_are_late(waited_s: list[float], late: tuple[int, ...]) -> None:
    """Also by heartbeats that are a quarter of the limit old."""
    by_rank = dict(enumerate(waited_s))
    assert late_ranks(by_rank, 60.0) == late


def test_the_words_name_ranks_and_setting() -> None:
    """They are the last line of every rank."""
    waited_s = {0: 61.2, 1: 0.0, 2: 0.1}
    said = late_words((1, 2), waited_s)
    assert said == "ranks 1, 2: others have waited in a step for 61 s (rank_timeout_s)"


def test_the_longest_wait_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait ends with what it covers, also by an error; of several waits the longest is reported."""
    now = [100.0]
    monkeypatch.setattr("gpu_service.parallel.waits.time.monotonic", lambda: now[0])
    own, seen = CollectiveWaits(), []

    def fail() -> None:
        with own.waiting():
            now[0] += 5.0
            with own.waiting():
                now[0] += 2.0
                seen.append(own.longest_s)
            seen.append(own.longest_s)
            raise RuntimeError("the collective failed")

    with pytest.raises(RuntimeError):
        fail()
    assert seen == [7.0, 7.0]
    assert own.longest_s == 0.0
