"""The mildest change of several settings with which a plan fits; each can be lowered step by step."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence

# Number of a setting -> index of one of its values.
Chosen = Mapping[int, int]


def mildest_change(lengths: Sequence[int], fits: Callable[[Chosen], bool]) -> dict[int, int] | None:
    """Returns the settings to change, and each one's mildest value that fits; None: no change is enough.

    `lengths`: values of each setting, from the mildest on; what fits with one is taken to fit with all after
    it. `fits` is asked with what is changed. One setting alone where one is enough, and of several that are
    the first; else as few as possible, where the last settings are given up first.
    """
    for number, length in enumerate(lengths):
        index = _mildest(number, length, {}, fits)
        if index is not None:
            return {number: index}
    changed = {number: length - 1 for number, length in enumerate(lengths) if length}
    if not fits(changed):
        return None
    # What is given up most reluctantly is taken back first.
    for number in sorted(changed, reverse=True):
        rest = {other: index for other, index in changed.items() if other != number}
        if fits(rest):
            changed = rest
        else:
            index = _mildest(number, lengths[number], rest, fits)
            changed[number] = lengths[number] - 1 if index is None else index
    return dict(sorted(changed.items()))


def _mildest(number: int, length: int, rest: Chosen, fits: Callable[[Chosen], bool]) -> int | None:
    found = bisect.bisect_left(range(length), True, key=lambda index: fits({**rest, number: index}))
    return found if found < length else None
