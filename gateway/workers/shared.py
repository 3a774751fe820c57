"""What the gateway processes of one port have in common."""

from __future__ import annotations

import mmap
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

_BYTES = 8


class Places:
    """How many requests each process has in flight, in memory that all of them map. A process writes its own
    number only, so nothing has to be locked; a sum may be a request or two behind."""

    def __init__(self, count: int = 1, index: int = 0, descriptor: int | None = None) -> None:
        """`descriptor`: of `shared_memory`; None: one process alone. `index`: the process's, < `count`."""
        self._memory = mmap.mmap(-1 if descriptor is None else descriptor, count * _BYTES)
        self._numbers = memoryview(self._memory).cast("q")
        self._index = index

    def add(self, change: int) -> None:
        """To this process's own number."""
        self._numbers[self._index] += change

    @property
    def total(self) -> int:
        """Of all processes."""
        return sum(self._numbers)

    def clear(self, index: int) -> None:
        """The process with this number is gone, and its requests with it."""
        self._numbers[index] = 0


def shared_memory(count: int) -> int:
    """A descriptor for `Places` of `count` processes; closed by whoever made it."""
    descriptor = os.memfd_create("moebius-gateway-places")
    os.ftruncate(descriptor, count * _BYTES)
    return descriptor


@dataclass(frozen=True)
class Shared:
    """A process's access to the others; filled by `member.py`, or as here for one process alone."""

    places: Places
    # The metrics of all processes, as Prometheus text; None: those of this process are all there are.
    metrics: Callable[[], Awaitable[bytes]] | None = None
    # Whether every process that listens knows its model; None: there is only this one.
    all_ready: Callable[[], Awaitable[bool]] | None = None
    # Another process can serve meanwhile: this one listens once it can, rather than answer 503.
    listens_when_ready: bool = False


def alone() -> Shared:
    """For the only process of a port."""
    return Shared(Places())
