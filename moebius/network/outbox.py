"""What several tasks have to send over one stream, taken in batches."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """Items of many senders for one taker; used in one event loop."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._arrived: asyncio.Future[None] | None = None
        self._closed = False

    def put(self, item: T) -> None:
        """Adds one; after `close` it is dropped."""
        if not self._closed:
            self._items.append(item)
            self._wake()

    def close(self) -> None:
        """Nothing more will come; what is there may still be taken."""
        self._closed = True
        self._wake()

    async def take(self) -> list[T]:
        """Returns all items since the last call, at least one; empty: closed. For one task only."""
        if not self._items and not self._closed:
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        items, self._items = self._items, []
        return items

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
