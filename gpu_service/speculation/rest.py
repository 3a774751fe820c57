"""When a device drafter rests: it takes time in every step, whether or not its drafts are worth verifying.

Seconds of steps without drafts are those of steps without the drafter, so drafts are chosen only where they
pay for it, too. Where they hardly ever are chosen, the drafter does not run at all for some steps, for longer
each time that it is tried again in vain. Tokens that it has not seen are missing in what it attends to: its
drafts are a little worse for requests that go on, and no token changes.

Counts decode steps and nothing else, so ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Callable

# Decode steps after which it is decided, and of these those with drafts that are enough to go on: of a
# drafter that runs, and of one that has rested. The latter costs time in every trial, and a few steps show
# whether what was given up is chosen again.
_RUNNING, _RETRIED = (64, 4), (16, 1)
# Decode steps of a rest, the first time and at most.
_FIRST, _MOST = 256, 1 << 15


class DrafterRest:
    """Asked by the speculation policy for each decode step."""

    def __init__(self) -> None:
        self._left = 0
        self._next = _FIRST
        self._window, self._enough = _RUNNING
        self._steps = self._with_drafts = 0

    @property
    def is_on(self) -> bool:
        """Whether the drafter rests."""
        return self._left > 0

    def counts_down(self) -> bool:
        """Returns whether the drafter rests in the step that is planned now."""
        if self._left == 0:
            return False
        self._left -= 1
        return True

    def ends(self) -> None:
        """Drafts pay again: the drafter runs from the next step on."""
        self._left, self._next = 0, _FIRST
        self._window, self._enough = _RUNNING

    def planned(self, has_drafts: bool, pays: Callable[[], bool] = lambda: False) -> None:
        """A step was planned in which the drafter does not rest; `has_drafts`: it verifies or brings some;
        `pays`: whether those of usual requests would be worth it, though the present ones' are not.
        """
        self._steps += 1
        self._with_drafts += has_drafts
        if self._steps < self._window:
            return
        if self._with_drafts >= self._enough or pays():
            self._next = _FIRST
            self._window, self._enough = _RUNNING
        else:
            self._left, self._next = self._next, min(2 * self._next, _MOST)
            self._window, self._enough = _RETRIED
        self._steps = self._with_drafts = 0
