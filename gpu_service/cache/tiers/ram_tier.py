"""Which blocks are in the host's memory, and which one goes when another needs its slots.

Least recently used, weighed by what a block saves: Greedy-Dual-Size (Cao and Irani, 1997, "Cost-aware WWW
proxy caching algorithms"). A block that is used gets the priority `floor + value`, where `value` is the
tokens it saves by byte (each token takes about equally many seconds to compute, so the order is that of
seconds); the lowest priority goes first and becomes the floor. Only blocks that no other one continues may
go, since a prefix is of no use without its beginning.

A block that is kept goes after all that are not, until its time is over. Kept blocks have at most half of the
slots: beyond that, those whose time ends first count as any other.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpu_service.cache.tiers.digests import DIGEST_BYTES, is_state, state_key
from gpu_service.cache.tiers.ram_segment import RECORD, RamSegment

Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class _Entry:
    key: bytes
    parent: bytes
    slots: list[int]
    nbytes: int
    value: float
    priority: float = 0.0
    used: int = 0
    keep_until: float = 0.0  # seconds since the epoch; 0: not kept
    pins: int = 0
    is_complete: bool = False
    is_queued: bool = False


class RamTier:
    """The index over a segment. Used by the engine's thread alone; views may be handed to other threads
    while their block is pinned."""

    def __init__(
        self,
        segment: RamSegment,
        page_bytes: int,
        state_bytes: int,
        wall_clock: Callable[[], float] = time.time,
        counted: tuple[int, int] | None = None,
    ) -> None:
        """Takes over what a predecessor left in the segment. `wall_clock`: seconds since the epoch.

        `counted`: bytes of a page and of a state that their slots and values follow from, at least their
        own, so that ranks whose parts differ give up the same blocks; None: their own.
        """
        self.segment, self._wall_clock = segment, wall_clock
        self._page_bytes, self._state_bytes = page_bytes, state_bytes
        self._counted = counted or (page_bytes, state_bytes)
        self._slot_bytes = segment.slots.shape[1]
        self._free = list(range(len(segment.slots) - 1, -1, -1))
        self._entries: dict[bytes, _Entry] = {}
        # Blocks that continue each block, whether that one is here or not.
        self._children: Counter[bytes] = Counter()
        # (priority, used, key, entry): every block that no other continues and that is not kept, with a
        # priority that may be old.
        self._heap: list[tuple[float, int, bytes, _Entry]] = []
        # (keep_until, serial, entry): every block that is kept, with a time that may be old.
        self._kept: list[tuple[float, int, _Entry]] = []
        self._serials = itertools.count()
        self._num_kept_slots = 0
        self._floor = 0.0
        self.clock = 0
        self.num_evicted = 0
        if segment.is_inherited:
            self._inherit(segment.records)

    def __contains__(self, key: bytes) -> bool:
        """Returns whether a block is here as a whole."""
        entry = self._entries.get(key)
        return entry is not None and entry.is_complete

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def keys(self) -> list[bytes]:
        """The keys of all blocks. Any thread may ask."""
        return list(self._entries)

    @property
    def kept_keys(self) -> list[bytes]:
        """The keys of the blocks that are kept. Any thread may ask."""
        now = self._wall_clock()
        return [entry.key for entry in list(self._entries.values()) if entry.keep_until > now]

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that hold something."""
        return (len(self.segment.slots) - len(self._free)) * self._slot_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all slots."""
        return len(self.segment.slots) * self._slot_bytes

    def touch(self, keys: Iterable[bytes]) -> None:
        """These blocks are used; those that are not here do not matter."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                self._use(entry)

    def pin(self, keys: Iterable[bytes]) -> None:
        """Keeps blocks, which are here, until as many calls of `unpin`."""
        for key in keys:
            self._entries[key].pins += 1

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Ends one `pin` of each; blocks that were dropped meanwhile are gone for good."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                entry.pins -= 1

    def keep(self, keys: Iterable[bytes], until: float) -> None:
        """Blocks that are here go after all that are not kept, until a time, seconds since the epoch."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or until <= max(entry.keep_until, self._wall_clock()):
                continue
            if not entry.keep_until:
                heapq.heappush(self._kept, (until, next(self._serials), entry))
                self._num_kept_slots += len(entry.slots)
            entry.keep_until = until
            self.segment.records["keep_until"][entry.slots] = until

    def kept_until(self, key: bytes) -> float:
        """Returns until when a block is kept, seconds since the epoch; 0 where it is not."""
        entry = self._entries.get(key)
        return 0.0 if entry is None else entry.keep_until

    def reserve(self, key: bytes, parent: bytes, tokens: int, before: int) -> bool:
        """Makes room for a block and pins it; False: it is here already, or there is no room.

        `tokens`: that it saves. Blocks used at `before` (a value of `clock`) or later do not go for it. The
        caller fills `views(key)` and calls `complete`, or calls `abandon`.
        """
        nbytes = self._state_bytes if is_state(key) else self._page_bytes
        counted = self._counted[is_state(key)]
        count = -(-counted // self._slot_bytes)
        if key in self._entries:
            return False
        # From now on, so that its parent does not go for it.
        self._children[parent] += 1
        while len(self._free) < count:
            if not self._evict_one(before):
                self._leaves(parent)
                return False
        slots = [self._free.pop() for _ in range(count)]
        self.segment.reached(max(slots))
        entry = _Entry(key, parent, slots, nbytes, tokens / counted, pins=1)
        self._entries[key] = entry
        self._use(entry)
        return True

    def views(self, key: bytes) -> list[Bytes]:
        """Returns the memory of a block, one part for each slot, as long as what is left."""
        entry = self._entries[key]
        left, views = entry.nbytes, []
        for slot in entry.slots:
            views.append(self.segment.slots[slot, : min(left, self._slot_bytes)])
            left -= len(views[-1])
        return views

    def complete(self, key: bytes) -> None:
        """A reserved block is filled: it may be used, by a successor of this process, too. Ends its pin."""
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.is_complete = True
        entry.pins -= 1
        digest, parent = key[:DIGEST_BYTES], entry.parent
        for part, slot in enumerate(entry.slots):
            count = len(entry.slots)
            self.segment.records[slot] = (
                *(digest, parent, entry.value, entry.used, entry.keep_until),
                *(is_state(key), part, count, 1),
            )
        self._queue(entry)

    def abandon(self, key: bytes) -> None:
        """A reserved block was not filled."""
        entry = self._entries.get(key)
        if entry is not None:
            self._remove(entry)

    def drop(self) -> None:
        """Forgets all blocks but those that are being filled or read, which go as soon as that has ended."""
        for entry in list(self._entries.values()):
            if entry.pins == 0:
                self._remove(entry)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Forgets these blocks if nothing reads or fills them."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and entry.pins == 0:
                self._remove(entry)

    def check_integrity(self) -> None:
        """Raises AssertionError when slots, records, children or the heap contradict one another."""
        held = [slot for entry in self._entries.values() for slot in entry.slots]
        assert sorted([*held, *self._free]) == list(range(len(self.segment.slots))), "slots lost or doubled"
        children = Counter(entry.parent for entry in self._entries.values())
        assert children == +self._children, "children of blocks drifted"
        for entry in self._entries.values():
            recorded = self.segment.records["is_complete"][entry.slots]
            assert (recorded == entry.is_complete).all(), "records differ from the index"
            assert (
                entry.is_queued or self._children[entry.key] or entry.keep_until or not entry.is_complete
            ), "a leaf is not queued"
            assert entry.pins >= 0, "unpinned more often than pinned"
        kept = [entry for entry in self._entries.values() if entry.keep_until]
        assert sum(len(entry.slots) for entry in kept) == self._num_kept_slots, "kept slots drifted"
        assert set(kept) <= {entry for *_, entry in self._kept}, "a kept block would be kept for ever"
        assert not self.segment.records["is_complete"][self._free].any(), "a free slot has a record"

    def _use(self, entry: _Entry) -> None:
        """Marks the block as used; its place in the heap is corrected once it comes up: priorities
        only grow.
        """
        self.clock += 1
        entry.used, entry.priority = self.clock, self._floor + entry.value

    def _queue(self, entry: _Entry) -> None:
        is_leaf = entry.is_complete and not self._children[entry.key]
        if is_leaf and not entry.is_queued and not entry.keep_until:
            entry.is_queued = True
            heapq.heappush(self._heap, (entry.priority, entry.used, entry.key, entry))

    def _evict_one(self, before: int) -> bool:
        """Drops the block of lowest priority, a kept one where no other may go; False: none may go."""
        self._end_keeping()
        aside: list[_Entry] = []
        found = None
        while self._heap and found is None:
            priority, used, key, entry = heapq.heappop(self._heap)
            if self._entries.get(key) is not entry:
                continue
            entry.is_queued = False
            if self._children[key] or entry.keep_until:
                continue
            if (priority, used) != (entry.priority, entry.used):
                self._queue(entry)
            elif entry.pins or entry.used >= before:
                aside.append(entry)
            else:
                found = entry
        for entry in aside:
            self._queue(entry)
        found = found or self._oldest_kept(before)
        if found is None:
            return False
        self._floor = max(self._floor, found.priority)
        self.num_evicted += 1
        self._remove(found)
        return True

    def _oldest_kept(self, before: int) -> _Entry | None:
        may_go = [
            entry
            for *_, entry in self._kept
            if self._entries.get(entry.key) is entry
            and entry.is_complete
            and not (entry.pins or self._children[entry.key])
            and entry.used < before
        ]
        return min(may_go, key=lambda entry: (entry.priority, entry.used), default=None)

    def _end_keeping(self) -> None:
        """Blocks whose time is over, and those of too many whose time ends first, are as any other."""
        now, most = self._wall_clock(), len(self.segment.slots) // 2
        while self._kept and (self._kept[0][0] <= now or self._num_kept_slots > most):
            until, serial, entry = self._kept[0]
            is_here = self._entries.get(entry.key) is entry
            if is_here and entry.keep_until > until:
                heapq.heapreplace(self._kept, (entry.keep_until, serial, entry))
                continue
            heapq.heappop(self._kept)
            if is_here:
                self._unkeep(entry)
                self._queue(entry)

    def _unkeep(self, entry: _Entry) -> None:
        if entry.keep_until:
            self._num_kept_slots -= len(entry.slots)
            entry.keep_until = 0.0
            self.segment.records["keep_until"][entry.slots] = 0.0

    def _remove(self, entry: _Entry) -> None:
        self._unkeep(entry)
        self.segment.records["is_complete"][entry.slots] = 0
        del self._entries[entry.key]
        self._free.extend(entry.slots)
        self._leaves(entry.parent)

    def _leaves(self, parent: bytes) -> None:
        """One block less continues this one."""
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            entry = self._entries.get(parent)
            if entry is not None:
                self._queue(entry)

    def _inherit(self, records: npt.NDArray[np.void]) -> None:
        """Builds the index of what is complete, in the order in which it was used."""
        parts: dict[bytes, list[int]] = {}
        complete = np.flatnonzero(records["is_complete"])
        for slot in complete[np.argsort(records["used"][complete], kind="stable")].tolist():
            digest = records[slot]["digest"].tobytes()
            parts.setdefault(state_key(digest) if records[slot]["is_state"] else digest, []).append(slot)
        for key, slots in parts.items():
            slots.sort(key=lambda slot: int(records[slot]["part"]))
            if [int(records[slot]["part"]) for slot in slots] == list(range(records[slots[0]]["num_parts"])):
                self._adopt(key, slots, records[slots[0]])
        held = {slot for entry in self._entries.values() for slot in entry.slots}
        self.segment.reached(max(held, default=0))
        self._free = [slot for slot in self._free if slot not in held]
        self.segment.records["is_complete"][self._free] = 0
        for entry in self._entries.values():
            self._queue(entry)

    def _adopt(self, key: bytes, slots: Sequence[int], record: np.void) -> None:
        nbytes = self._state_bytes if is_state(key) else self._page_bytes
        entry = _Entry(
            key, record["parent"].tobytes(), list(slots), nbytes, float(record["value"]), is_complete=True
        )
        self._entries[key] = entry
        self._children[entry.parent] += 1
        self._use(entry)
        self.keep([key], float(record["keep_until"]))


def slot_size(page_bytes: int) -> int:
    """Returns the bytes of a slot for pages of `page_bytes`: a state takes several."""
    return max(64, -(-page_bytes // 64) * 64)


assert RECORD.itemsize == 104, "records of several processes have one form"
