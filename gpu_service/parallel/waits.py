"""Which rank the others wait for: each says how long it has waited, and rank 0 names those that do not.

A rank that is stuck outside of collectives (a file system, a driver, a kernel that is compiled) still sends
heartbeats, while all others wait for it. torch's own time-out ends such a wait, too, without a name.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class CollectiveWaits:
    """The waits of one rank's threads. Thread safe."""

    def __init__(self) -> None:
        # By wait: when it began, on the monotonic clock.
        self._begins: dict[object, float] = {}

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Covers what returns only when other ranks have come to it, too."""
        wait = object()
        self._begins[wait] = time.monotonic()
        try:
            yield
        finally:
            del self._begins[wait]

    @property
    def longest_s(self) -> float:
        """Returns how long the longest wait has lasted, seconds; 0 where none does."""
        begins = list(self._begins.values())
        return time.monotonic() - min(begins) if begins else 0.0


def late_ranks(waited_s: Mapping[int, float], limit_s: float) -> tuple[int, ...]:
    """Returns the ranks that others have waited for longer than `limit_s`, ascending; none where no rank has,
    or where all ranks wait, so that none of them is known to be late.

    `waited_s`: by rank, as of its latest heartbeat, which may be as old as a quarter of the limit.
    """
    if max(waited_s.values()) < limit_s:
        return ()
    return tuple(rank for rank, waited in sorted(waited_s.items()) if waited < limit_s / 2)


def late_words(late: tuple[int, ...], waited_s: Mapping[int, float]) -> str:
    """Returns what is wrong with a group some of whose ranks are late."""
    names = f"rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"
    return f"{names}: others have waited in a step for {max(waited_s.values()):.0f} s (rank_timeout_s)"
