"""How many requests of batches run at once: as many as requests of clients leave room for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

_POLL_S = 0.05  # clients' requests that end are not announced


class Slots:
    """At most `max(1, (most - live) / processes)` requests of batches start to run in this process while
    `live` requests of clients run in all processes of the port; those that wait are served in order."""

    def __init__(self, most: int, processes: int, live: Callable[[], int]) -> None:
        self._most = most
        self._processes = processes
        self._live = live
        self.running = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @property
    def room(self) -> int:
        """How many may run now."""
        return max(1, (self._most - self._live()) // self._processes)

    async def take(self) -> None:
        """Waits until one more may run; `give` ends it."""
        async with self._turn:
            while self.running >= self.room:
                self._freed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), _POLL_S)
            self.running += 1

    def give(self) -> None:
        """Ends one that was taken."""
        self.running -= 1
        self._freed.set()
