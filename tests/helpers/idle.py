"""How little CPU time something uses when no request comes."""

from __future__ import annotations

import time
from collections.abc import Callable


def becomes_idle(cpu_seconds: Callable[[], float], below: float = 0.02, window_s: float = 0.5) -> bool:
    """Returns whether less than this share of one core is used in one of up to 120 windows.

    What spins does so in every window; what sleeps is quiet in at least one, however busy the machine and
    whatever else the same process still had to do.
    """
    for _ in range(120):
        start, used = time.monotonic(), cpu_seconds()
        time.sleep(window_s)
        if cpu_seconds() - used < below * (time.monotonic() - start):
            return True
    return False
