"""Which slots of states are free, and how many hold each of the others.

Knows slot numbers only. Slot 0 is all zeros: everybody may read it, nobody holds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from gpu_service.cache.state_cache import ZERO_SLOT


class OutOfStates(RuntimeError):
    """A slot was asked for and none is free; the caller must wait for a step's commit first."""


class StatePool:
    """Slots with counts of holders. The last slot freed is the first handed out again."""

    def __init__(self, num_slots: int) -> None:
        """`num_slots` includes slot 0, as in `StateCache`."""
        if num_slots < 2:
            raise ValueError(f"num_slots must be at least 2 (slot 0 is all zeros), got {num_slots}")
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, 0, -1))
        self._holders = [0] * num_slots

    @property
    def available(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def alloc(self) -> int:
        """A slot that nobody holds, held once now. Raises OutOfStates when there is none."""
        if not self._free:
            raise OutOfStates(f"all {self.num_slots - 1} slots of states are held")
        slot = self._free.pop()
        self._holders[slot] = 1
        return slot

    def hold(self, slot: int) -> None:
        """One holder more. Raises ValueError for a slot that is free."""
        if slot == ZERO_SLOT:
            return
        if self._holders[slot] < 1:
            raise ValueError(f"slot {slot} is free: its state may be overwritten")
        self._holders[slot] += 1

    def drop(self, slot: int) -> None:
        """One holder less; the last one frees the slot. Raises ValueError when there was none."""
        if slot == ZERO_SLOT:
            return
        if self._holders[slot] < 1:
            raise ValueError(f"slot {slot} is held by nobody")
        self._holders[slot] -= 1
        if self._holders[slot] == 0:
            self._free.append(slot)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raises AssertionError unless `held`, once for each holder, is what was counted."""
        counts = Counter(slot for slot in held if slot != ZERO_SLOT)
        seen = [counts[slot] for slot in range(self.num_slots)]
        assert seen == self._holders, f"holders of states {seen}, counted {self._holders}"
        free = sorted(slot for slot in range(1, self.num_slots) if self._holders[slot] == 0)
        assert sorted(self._free) == free, f"free slots {sorted(self._free)}, expected {free}"
