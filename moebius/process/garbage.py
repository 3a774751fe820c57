"""Sets how often Python's garbage collector runs in processes that serve."""

from __future__ import annotations

import gc

# Allocations between two collections of the youngest generation. A request makes some hundreds of objects,
# most of which die with it. With Python's 700, collections take a sixth of the CPU time of a gateway's burst;
# in an engine a model's layers and graphs would be looked at between two steps.
_YOUNG = 10_000
_YOUNG_ROUNDS, _OLD_ROUNDS = 20, 20


def collect_rarely() -> None:
    """Excludes all objects that exist so far, of which a start leaves no garbage, and collects the others
    less often: at most a millisecond at a time for the youngest generation."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(_YOUNG, _YOUNG_ROUNDS, _OLD_ROUNDS)
