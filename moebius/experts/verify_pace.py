"""How fast packed experts are compared with their checksums in the background, by expert servers and engines.

Comparing takes memory bandwidth, or a GPU's link, from requests: it is spread evenly over the configured
interval, and never takes more than a share of the time.
"""

from __future__ import annotations

import time

# Of its time a thread that compares checksums computes at most this part.
VERIFY_SHARE = 0.2


class VerifyPace:
    """The pace of one pass over all experts, which begins when it is made. Used by one thread."""

    def __init__(self, total_bytes: int, interval_s: float) -> None:
        """`total_bytes`: of all experts together. `interval_s` of 0: the share of time is the only bound."""
        self._total_bytes, self._interval_s = max(total_bytes, 1), interval_s
        self._begin = time.monotonic()
        self._done_bytes = 0

    def pause_s(self, nbytes: int, spent_s: float) -> float:
        """Returns the seconds to wait after an expert of `nbytes` whose comparison took `spent_s`; may be
        negative.
        """
        self._done_bytes += nbytes
        due = self._begin + self._interval_s * self._done_bytes / self._total_bytes
        return max(spent_s * (1 / VERIFY_SHARE - 1), due - time.monotonic())

    @property
    def elapsed_s(self) -> float:
        """Seconds since the pass began."""
        return time.monotonic() - self._begin
