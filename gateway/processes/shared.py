"""The state that the gateway processes of one port share."""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from moebius.models.identity import Parts

_BYTES = 8
ALLOWANCES = ("requests_per_minute", "tokens_per_minute")
_ALLOWANCE_WORDS = 3
_SLOTS = 4096  # keys with shared counts
_LOCK_TRIES = 1000


class Places:
    """The number of requests in flight per process, in memory that all of them map. A process writes only
    its own number, so no lock is needed; a sum may be a request or two behind."""

    def __init__(self, count: int = 1, index: int = 0, descriptor: int | None = None) -> None:
        """`descriptor`: of `shared_memory`; None: one process alone. `index`: the process's, < `count`."""
        self._memory = mmap.mmap(-1 if descriptor is None else descriptor, count * _BYTES)
        self._numbers = memoryview(self._memory).cast("q")
        self._index = index

    def add(self, change: int) -> None:
        """Adds to this process's own number."""
        self._numbers[self._index] += change

    @property
    def total(self) -> int:
        """The sum over all processes."""
        return sum(self._numbers)

    @property
    def count(self) -> int:
        """The number of processes."""
        return len(self._numbers)

    def clear(self, index: int) -> None:
        """Resets the number of a process that has ended."""
        self._numbers[index] = 0


class KeyTable:
    """The use of each API key in all processes: a slot per key, which the first process that meets it takes.

    A process writes only its own number of requests in flight; allowances are common, and changed under a
    lock that is held for microseconds.
    """

    def __init__(self, count: int = 1, index: int = 0, descriptor: int | None = None) -> None:
        """Takes the arguments of `Places`, whose memory the table's follows."""
        self.count, self.index = count, index
        self._descriptor = descriptor
        self._words = _ALLOWANCE_WORDS * len(ALLOWANCES) + 1 + count  # of a slot; the first is the key's
        size = _table_bytes(count)
        self._memory = mmap.mmap(-1 if descriptor is None else descriptor, count * _BYTES + size)
        rest = memoryview(self._memory)[count * _BYTES :]
        self.integers, self.floats = rest.cast("q"), rest.cast("d")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Excludes other changes of allowances, unless a process was stopped while it held the lock."""
        if self._descriptor is None:
            yield
            return
        held = False
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            held = True
            break
        try:
            yield
        finally:
            if held:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def slot(self, name: str) -> KeySlot | None:
        """Returns the slot of a key; None: all are taken."""
        digest = hashlib.sha256(name.encode()).digest()
        mark = int.from_bytes(digest[:8], "big", signed=True) or 1
        with self.locked():
            for step in range(_SLOTS):
                first = (mark + step) % _SLOTS * self._words
                if self.integers[first] in (0, mark):
                    self.integers[first] = mark
                    return KeySlot(self, first + 1)
        return None

    def clear(self, index: int) -> None:
        """Resets the numbers of a process that has ended."""
        for first in range(0, _SLOTS * self._words, self._words):
            if self.integers[first]:
                KeySlot(self, first + 1).numbers[index] = 0


class KeySlot:
    """One key's place in a `KeyTable`."""

    def __init__(self, table: KeyTable, first: int) -> None:
        """`first`: the index of its first word after the key's."""
        self._table = table
        self._first = first
        begin = first + _ALLOWANCE_WORDS * len(ALLOWANCES)
        self.numbers = table.integers[begin : begin + table.count]

    @property
    def in_flight(self) -> int:
        """The key's requests in all processes."""
        return sum(self.numbers)

    def add(self, change: int) -> None:
        """Adds to this process's own number."""
        self.numbers[self._table.index] += change

    @contextmanager
    def allowance(self, name: str) -> Iterator[memoryview[float]]:
        """Yields its rate, the rest and the time of the last change, as floats, under the lock."""
        first = self._first + _ALLOWANCE_WORDS * ALLOWANCES.index(name)
        with self._table.locked():
            yield self._table.floats[first : first + _ALLOWANCE_WORDS]


def _table_bytes(count: int) -> int:
    return _SLOTS * (_ALLOWANCE_WORDS * len(ALLOWANCES) + 1 + count) * _BYTES


def shared_memory(count: int) -> int:
    """Returns a descriptor for `Places` and `KeyTable` of `count` processes; the caller closes it."""
    descriptor = os.memfd_create("moebius-gateway-places")
    os.ftruncate(descriptor, count * _BYTES + _table_bytes(count))
    return descriptor


@dataclass(frozen=True)
class Shared:
    """A process's access to the others; filled by `gateway/workers`, or by `alone` for a single process."""

    places: Places
    keys: KeyTable
    # Returns the metrics of all processes, as Prometheus text; None: this process is the only one.
    metrics: Callable[[], Awaitable[bytes]] | None = None
    # Returns why a listening process could not answer or be replaced; empty: none. None: a single process.
    why_not_ready: Callable[[], Awaitable[str]] | None = None
    # Another process can serve meanwhile: this one listens when it is ready, instead of answering 503.
    listens_when_ready: bool = False
    # Digests of files that the first process has found; others are not compared.
    files: Parts = field(default_factory=dict)


def alone() -> Shared:
    """Returns the state for the only process of a port."""
    return Shared(Places(), KeyTable())
