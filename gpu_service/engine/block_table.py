"""The host's mirror of which pages each slot's request has; only changes are written."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpu_service.request import Request


class BlockTable:
    """int32 `[num_slots, max_pages]`, padded with the dummy page 0."""

    def __init__(self, num_slots: int, max_pages: int) -> None:
        self._table = np.zeros((num_slots, max_pages), dtype=np.int32)
        # Per slot: the pages_epoch that the row was written for, and how many entries are written.
        self._epoch = [0] * num_slots
        self._written = [0] * num_slots

    def sync(self, request: Request) -> None:
        """Brings the row of a running request up to date."""
        slot, count = request.slot, len(request.pages)
        start = self._written[slot]
        if self._epoch[slot] != request.pages_epoch:
            start = 0
            self._table[slot] = 0
            self._epoch[slot] = request.pages_epoch
        if count > start:
            self._table[slot, start:count] = request.pages[start:]
        self._written[slot] = count

    def rows(self, requests: list[Request]) -> npt.NDArray[np.int32]:
        """A copy `[R, longest]`: a step in flight must not see later changes."""
        longest = max(len(request.pages) for request in requests)
        return self._table[[request.slot for request in requests], :longest]
