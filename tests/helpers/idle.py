"""How little CPU time something uses when no request comes."""

from __future__ import annotations

import time
from collections.abc import Callable


def idle_share(cpu_seconds: Callable[[], float], *, windows: int = 6, window_s: float = 0.5) -> float:
    """Returns the smallest share of one core over several windows.

    What spins does so in every window; what sleeps is quiet in at least one, however busy the machine and
    whatever else the same process still had to do. Ends early once a window is quiet altogether.
    """
    least = float("inf")
    for _ in range(windows):
        start, used = time.monotonic(), cpu_seconds()
        time.sleep(window_s)
        least = min(least, (cpu_seconds() - used) / (time.monotonic() - start))
        if least == 0:
            break
    return least
