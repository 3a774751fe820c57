"""What several tasks have to send over one stream, taken in batches."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Arrival:
    """Wakes the one task that waits for something to come; used in one event loop."""

    __slots__ = ("_waited",)

    def __init__(self) -> None:
        self._waited: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Ends the wait, if there is one."""
        if self._waited is not None and not self._waited.done():
            self._waited.set_result(None)

    async def wait(self) -> None:
        """Returns at the next `wake`."""
        self._waited = asyncio.get_running_loop().create_future()
        await self._waited


class Outbox(Generic[T]):
    """Items of many senders for one taker; used in one event loop."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._arrival = Arrival()
        self._closed = False

    def put(self, item: T) -> None:
        """Adds one; after `close` it is dropped."""
        if not self._closed:
            self._items.append(item)
            self._arrival.wake()

    def close(self) -> None:
        """Nothing more will come; what is there may still be taken."""
        self._closed = True
        self._arrival.wake()

    async def take(self) -> list[T]:
        """Returns all items since the last call, at least one; empty: closed. For one task only."""
        if not self._items and not self._closed:
            await self._arrival.wait()
        items, self._items = self._items, []
        return items
