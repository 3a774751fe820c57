"""How often a process of the gateway looks for garbage in cycles."""

from __future__ import annotations

import gc

# New objects until the young ones are looked at. A request makes some hundreds, and most are gone with it.
# With Python's 700 a sixth of a burst's processor time goes into looking at requests that still run.
_YOUNG = 10_000
_YOUNG_ROUNDS, _OLD_ROUNDS = 20, 20


def collect_rarely() -> None:
    """Leaves out what has been imported and read so far, and looks at the rest less often: at most a
    millisecond at a time for the young objects."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(_YOUNG, _YOUNG_ROUNDS, _OLD_ROUNDS)
