"""Address ranges that stay, and physical memory that moves between them in chunks of one size.

    range a   | 0 | 1 | 2 |   |   |        an address is valid while a chunk is mapped there
    range b   | 3 |   |   |   |            captured graphs and tensors keep their addresses
    free      4 5

A `VirtualMemory` is what a device can do; `PhysicalPool` owns the chunks; each mapped chunk has one owner, a
place of one `VirtualRange`. The caller of `unmap` sees to it that nothing launched reads or writes there.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch


class VirtualMemoryUnavailable(RuntimeError):
    """The device cannot map memory; the message says why."""


class VirtualMemory(ABC):
    """Reservations and physical memory of one device. Addresses and sizes in bytes.

    Every method raises VirtualMemoryUnavailable with what the device says when it refuses.
    """

    device: torch.device
    # Sizes of chunks are multiples of it.
    granularity: int

    @abstractmethod
    def create(self, nbytes: int) -> Any:
        """Returns a handle on physical memory that is mapped nowhere."""

    @abstractmethod
    def release(self, handle: Any) -> None:
        """Gives physical memory back to the device."""

    @abstractmethod
    def reserve(self, nbytes: int) -> int:
        """Returns the address of a range in which nothing is mapped."""

    @abstractmethod
    def unreserve(self, address: int, nbytes: int) -> None:
        """Gives up a range in which nothing is mapped any more."""

    @abstractmethod
    def map(self, address: int, nbytes: int, handles: Sequence[Any]) -> None:
        """Maps one handle of `nbytes` after another from an address on, readable and writable."""

    @abstractmethod
    def unmap(self, address: int, nbytes: int, count: int) -> None:
        """Unmaps `count` handles of `nbytes` each from an address on; their bytes stay."""

    @abstractmethod
    def tensor(self, address: int, nbytes: int, keeps: object) -> torch.Tensor:
        """Returns uint8 `[nbytes]` over a range whose first chunk is mapped now; keeps an object alive."""


class PhysicalPool:
    """Chunks of one size of one device. Any thread may take and give back."""

    def __init__(self, memory: VirtualMemory, chunk_bytes: int) -> None:
        """Raises ValueError unless the chunk is a multiple of what the device can map."""
        if chunk_bytes <= 0 or chunk_bytes % memory.granularity:
            raise ValueError(f"chunks of {chunk_bytes} bytes; allowed: multiples of {memory.granularity}")
        self.memory, self.chunk_bytes = memory, chunk_bytes
        self._lock = threading.Lock()
        self._free: list[Any] = []
        self._size = 0
        # Free chunks that are set aside: `take` with `spares_claimed` leaves them.
        self.claimed = 0
        _pools.add(self)
        # What is free goes back to the device with the pool; not at the process's end, when the driver may
        # have gone before.
        weakref.finalize(self, _release, memory, self._free).atexit = False

    @property
    def size(self) -> int:
        """Chunks in all, mapped or free."""
        return self._size

    @property
    def free(self) -> int:
        """Chunks that are mapped nowhere."""
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks."""
        return self._size * self.chunk_bytes

    def add(self, count: int) -> None:
        """Takes more memory of the device. Raises VirtualMemoryUnavailable when it has no more."""
        for _ in range(count):
            handle = self.memory.create(self.chunk_bytes)
            with self._lock:
                self._free.append(handle)
                self._size += 1

    def claim(self, count: int) -> None:
        """Sets `count` chunks aside, of those that are free or become free, instead of the number before."""
        with self._lock:
            self.claimed = count

    def take(self, count: int, spares_claimed: bool = False) -> list[Any]:
        """Takes free chunks. Raises VirtualMemoryUnavailable, and takes none, where there are too few."""
        with self._lock:
            usable = len(self._free) - (self.claimed if spares_claimed else 0)
            if count > usable:
                raise VirtualMemoryUnavailable(f"{count} chunks wanted, {usable} of {self._size} free")
            first = len(self._free) - count
            taken = self._free[first:]
            del self._free[first:]
        return taken

    def give_back(self, handles: Iterable[Any]) -> None:
        """Returns chunks that are mapped nowhere any more."""
        with self._lock:
            self._free.extend(handles)

    def close(self) -> None:
        """Gives free chunks back to the device; call it once no range is used any more."""
        with self._lock:
            self._size -= len(self._free)
            _release(self.memory, self._free)


def _release(memory: VirtualMemory, handles: list[Any]) -> None:
    while handles:
        memory.release(handles.pop())


_pools: weakref.WeakSet[PhysicalPool] = weakref.WeakSet()


def pooled_bytes(device: torch.device) -> int:
    """Returns the bytes of all chunks on a device: torch's allocator knows nothing of them."""
    held = [pool for pool in list(_pools) if pool.memory.device.type == device.type]
    return sum(pool.nbytes for pool in held if device.index in (None, pool.memory.device.index))


class VirtualRange:
    """One reservation, in places of a chunk each; places are mapped and unmapped in any order."""

    def __init__(self, pool: PhysicalPool, nbytes: int) -> None:
        """Reserves whole chunks for `nbytes`, of which none is mapped."""
        self.pool, self.nbytes = pool, nbytes
        self._handles: list[Any] = [None] * max(1, -(-nbytes // pool.chunk_bytes))
        self._address = pool.memory.reserve(len(self._handles) * pool.chunk_bytes)

    @property
    def places(self) -> int:
        """Chunks that the whole range takes."""
        return len(self._handles)

    @property
    def mapped(self) -> int:
        """Chunks that are mapped."""
        return len(self._handles) - self._handles.count(None)

    def is_mapped(self, place: int) -> bool:
        """Returns whether a chunk is mapped at a place."""
        return self._handles[place] is not None

    def holders(self) -> list[Any]:
        """Returns the handles that are mapped, for checks."""
        return [handle for handle in self._handles if handle is not None]

    def map(self, places: Iterable[int], spares_claimed: bool = False) -> None:
        """Maps a chunk at each of these places. Raises as `PhysicalPool.take`, and maps none."""
        wanted = sorted(place for place in places if self._handles[place] is None)
        handles = self.pool.take(len(wanted), spares_claimed)
        size, memory = self.pool.chunk_bytes, self.pool.memory
        for first, count in _runs(wanted):
            taken, handles = handles[:count], handles[count:]
            memory.map(self._address + first * size, size, taken)
            self._handles[first : first + count] = taken

    def unmap(self, places: Iterable[int]) -> None:
        """Returns the chunks at these places to the pool; nothing may read or write there any more."""
        mapped = sorted(place for place in places if self._handles[place] is not None)
        size = self.pool.chunk_bytes
        for first, count in _runs(mapped):
            self.pool.memory.unmap(self._address + first * size, size, count)
            self.pool.give_back(self._handles[first : first + count])
            self._handles[first : first + count] = [None] * count

    def tensor(self) -> torch.Tensor:
        """Returns uint8 `[nbytes]` over the whole range, its first chunk being mapped for the moment at
        least.

        What is not mapped must not be touched. Reservation and chunks live as long as the tensor.
        """
        is_lent = self._handles[0] is None
        if is_lent:
            self.map([0])
        found = self.pool.memory.tensor(self._address, self.nbytes, _Reservation(self))
        if is_lent:
            self.unmap([0])
        return found


class _Reservation:
    """Ends a range when the last tensor over it has gone."""

    def __init__(self, held: VirtualRange) -> None:
        weakref.finalize(self, _end, held).atexit = False


def _end(held: VirtualRange) -> None:
    held.unmap(range(held.places))
    held.pool.memory.unreserve(held._address, held.places * held.pool.chunk_bytes)


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """Returns first place and length of each run of neighbours; `places` ascend."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and place == runs[-1][0] + runs[-1][1]:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((place, 1))
    return runs
