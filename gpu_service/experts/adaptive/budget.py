"""How much of the link exchanges of experts may take: as much as steps are measured to bear.

Copies read the memory that expert servers read, and lengthen the steps that they run beside. By how much is
measured while serving: a step beside which copies ran against the latest steps of as many decoding rows
beside which none did. Where there is always something to copy two steps of eight begin no copy, and the
second of them is one to compare with:

    copies begin | x x x x x x . . | x x x x x x . . | …
    compared     | w w w w w w - r |                       r: the reference of w

The median of seconds(w) / median seconds(r) - 1 is the slow-down, by which `share` is corrected.
"""

from __future__ import annotations

from collections import deque
from statistics import median

# What copies may lengthen a step by.
MOST_SLOWDOWN = 0.02
# The part of a step's time that its copies may take of the link: at first, at least and at most.
_FIRST_SHARE, _LEAST_SHARE, _MOST_SHARE = 0.05, 0.005, 0.25
# By how much it grows where steps are lengthened by less than half of what they may be.
_GROWTH = 1.5
# Steps that are compared before the share is corrected; references of each, and those that are enough.
_COMPARED, _REFERENCES, _ENOUGH = 96, 32, 8
# Of this many steps the last two begin no copies.
_PERIOD = 8
# Copies that a step begins, at most. Experts for empty slots take no other's place and are worth more: by
# this factor more of them, and of the link for them.
_MOST_A_STEP, _REFILLS = 8, 4


class TransferBudget:
    """The transfer budget of one rank.

    The thread that launches steps calls `allowed`, the one that ends them `observe`.
    """

    def __init__(self) -> None:
        self.share = _FIRST_SHARE
        # By how much copies lengthened the latest steps that were compared; None: none were.
        self.slowdown: float | None = None
        # Seconds of the link that steps left to later ones.
        self._credit = 0.0
        self._turn = 0
        self._rows = 0
        self._references: deque[float] = deque(maxlen=_REFERENCES)
        self._compared: list[float] = []

    def allowed(self, step_s: float, link: float, nbytes: int, are_refills: bool = False) -> int:
        """How many copies of `nbytes` a step of about `step_s` seconds may begin. Once before each step that
        has something to copy.

        `link`: bytes per second. `are_refills`: they fill empty slots.
        """
        times = _REFILLS if are_refills else 1
        each, most = nbytes / link, times * _MOST_A_STEP
        self._turn = (self._turn + 1) % _PERIOD
        own = times * self.share * step_s
        # What a long step or a pause has left is not spent at once.
        self._credit = min(self._credit + own, max(each, _PERIOD * own))
        if self._turn >= _PERIOD - 2:
            return 0
        count = min(int(self._credit / each), most)
        self._credit -= count * each
        return count

    def observe(self, rows: int, seconds: float, has_copies: bool | None) -> None:
        """A step of `rows` decoding rows took so long. `has_copies`: whether copies ran beside it; None: that
        is not known.
        """
        if rows != self._rows:
            self._rows = rows
            self._references.clear()
        if has_copies is None or seconds <= 0:
            return
        if not has_copies:
            self._references.append(seconds)
        elif len(self._references) >= _ENOUGH:
            self._compared.append(seconds / median(self._references) - 1)
            if len(self._compared) >= _COMPARED:
                self._correct(median(self._compared))

    def _correct(self, slowdown: float) -> None:
        self.slowdown, self._compared = slowdown, []
        if slowdown > MOST_SLOWDOWN:
            self.share = max(_LEAST_SHARE, self.share * max(0.5, MOST_SLOWDOWN / slowdown))
        elif slowdown < MOST_SLOWDOWN / 2:
            self.share = min(_MOST_SHARE, self.share * _GROWTH)
