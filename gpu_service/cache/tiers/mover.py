"""Moves blocks between the device, the host's memory and a disk, in two threads of its own, or on the spot.

In threads, what requests wait for (`load`) never stands behind what is written in the background (`store`).
Writing rests after each piece for three times as long as the piece took, so that it has at most a quarter of
the link, of the disk and of a core, however fast they are. Knows places and bytes; who owns them, its caller
knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import numpy as np
import structlog

from gpu_service.cache.tiers.digests import is_state
from gpu_service.cache.tiers.disk_tier import DiskTier
from gpu_service.cache.tiers.payloads import Bytes, Payloads

_log = structlog.get_logger(__name__)
# Rest after a piece, by the time that it took.
_REST = 3.0
# Pages that are read from a disk before they are copied up together: a page at a time waits for the device.
_TOGETHER_BYTES = 32 * 2**20
# What counts of earlier copies in a tier's speed, with each copy.
_EARLIER = 0.7
# How long a speed is believed without another copy, seconds: one slow moment must not rule a tier out.
_BELIEVED_S = 10.0


@dataclass(frozen=True, slots=True)
class StoreItem:
    """One block to copy down; filled by `PrefixTiers`."""

    key: bytes
    parent: bytes
    tokens: int
    place: int  # the page, or the slot of the state
    views: Sequence[Bytes]  # of the RAM tier; empty: it does not take the block
    to_disk: bool


@dataclass(frozen=True, slots=True)
class StagedBlock:
    """One block to write to the disk; filled by `DiskStaging`."""

    key: bytes
    parent: bytes
    tokens: int
    payload: Bytes  # a copy of its own
    generation: int  # of the disk when it was copied: what was dropped since then is not written


@dataclass(frozen=True, slots=True)
class LoadItem:
    """One block to copy up; filled by `PrefixTiers`."""

    key: bytes
    place: int  # the page, or the slot of the state
    views: Sequence[Bytes]  # of the RAM tier: what is read, or of a block on disk what is filled, too
    is_on_disk: bool  # else it is in the RAM tier


class Speed:
    """Bytes per second of late: of what was copied in all, so that small copies count for little."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bytes = self._seconds = 0.0
        self._copied_at = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        """A copy has ended."""
        self._bytes = _EARLIER * self._bytes + nbytes
        self._seconds = _EARLIER * self._seconds + seconds
        self._copied_at = self._clock()

    @property
    def now(self) -> float | None:
        """None: nothing was copied lately."""
        if self._clock() - self._copied_at > _BELIEVED_S or not self._bytes:
            return None
        return self._bytes / max(1e-9, self._seconds)


_P = ParamSpec("_P")
_T = TypeVar("_T")


class _OnTheSpot(Executor):
    """Runs what is submitted before it returns the future."""

    def submit(self, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        done: Future[_T] = Future()
        try:
            done.set_result(function(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


class Mover:
    """`store` and `load` return at once; the rest is as its caller orders it."""

    def __init__(
        self,
        payloads: Payloads,
        disk: DiskTier | None,
        wake: Callable[[], None],
        is_direct: bool = False,
    ) -> None:
        """`wake` is called by the threads whenever something has ended.

        `is_direct`: there are no threads.
        """
        self._payloads, self._disk, self._wake = payloads, disk, wake
        self._loads: Executor = _OnTheSpot() if is_direct else ThreadPoolExecutor(1, "kv-load")
        self._stores: Executor = _OnTheSpot() if is_direct else ThreadPoolExecutor(1, "kv-store")
        largest = max(payloads.page_bytes, payloads.state_bytes)
        # Each thread has its own.
        self._load_scratch = payloads.scratch(max(largest, _TOGETHER_BYTES if disk is not None else 0))
        self._store_scratch = payloads.scratch(largest)
        self._rest: Future[None] | None = None
        self.ram_speed, self.disk_speed = Speed(), Speed()

    @property
    def may_store(self) -> bool:
        """Whether the rest after the last piece is over."""
        return self._rest is None or self._rest.done()

    def store(self, items: Sequence[StoreItem]) -> Future[None]:
        """Copies blocks down, in order."""
        done = self._stores.submit(self._store, items)
        done.add_done_callback(lambda _: self._wake())
        return done

    def load(self, items: Sequence[LoadItem]) -> Future[int]:
        """Copies blocks up, in order, up to the first that cannot be read; the future gets how many came."""
        done = self._loads.submit(self._load, items)
        done.add_done_callback(lambda _: self._wake())
        return done

    def refresh(self) -> Future[None]:
        """Takes in what other engines have written to the disk, as far as it can be listed."""
        assert self._disk is not None
        done = self._loads.submit(self._refresh, self._disk)
        done.add_done_callback(lambda _: self._wake())
        return done

    def keep(self, digests: Sequence[bytes], until: float) -> Future[None]:
        """Lets the disk keep the pages of a prefix until a time, seconds since the epoch."""
        assert self._disk is not None
        return self._stores.submit(self._disk.keep, digests, until)

    def append(self, blocks: Sequence[StagedBlock]) -> Future[None]:
        """Writes blocks to the disk that the host has copies of, in order."""
        return self._stores.submit(self._append, blocks)

    def close(self) -> None:
        """Ends the threads once what they are at has ended; what waits is given up."""
        for pool in (self._loads, self._stores):
            pool.shutdown(wait=True, cancel_futures=True)

    def _store(self, items: Sequence[StoreItem]) -> None:
        begin = time.monotonic()
        try:
            plain = [item for item in items if not is_state(item.key) and item.views]
            self._payloads.read_pages([item.place for item in plain], [item.views[0] for item in plain])
            for item in items:
                payload = self._read(item)
                if item.to_disk and self._disk is not None:
                    self._disk.append(item.key, item.parent, item.tokens, payload)
        finally:
            with suppress(RuntimeError):  # `close` was called meanwhile
                self._rest = self._stores.submit(time.sleep, _REST * (time.monotonic() - begin))
                self._rest.add_done_callback(lambda _: self._wake())

    def _append(self, blocks: Sequence[StagedBlock]) -> None:
        assert self._disk is not None
        begin = time.monotonic()
        for block in blocks:
            if block.generation == self._disk.generation:
                self._disk.append(block.key, block.parent, block.tokens, block.payload)
        time.sleep(_REST * (time.monotonic() - begin))

    def _read(self, item: StoreItem) -> Bytes:
        """Returns the block's payload on the host, once the RAM tier has it if it takes it."""
        if is_state(item.key):
            payload = self._store_scratch[: self._payloads.state_bytes]
            self._payloads.read_state(item.place, payload)
            scatter(payload, item.views)
            return payload
        if item.views:
            return item.views[0]
        payload = self._store_scratch[: self._payloads.page_bytes]
        if item.to_disk:
            self._payloads.read_pages([item.place], [payload])
        return payload

    def _load(self, items: Sequence[LoadItem]) -> int:
        if self._disk is not None:
            keys = [item.key for item in items if item.is_on_disk]
            if any(self._disk.record(key) is None for key in keys):
                self._refresh(self._disk)
            self._disk.announce(keys)
        count = 0
        while count < len(items):
            run = self._pages_together(items, count)
            came = self._load_pages(items[count : count + run]) if run else self._load_state(items[count])
            count += came
            if came < max(1, run):
                break
        return count

    def _pages_together(self, items: Sequence[LoadItem], first: int) -> int:
        """Returns how many items from here on are pages of one tier that are copied up at once; 0: the first
        is a state."""
        is_on_disk, end = items[first].is_on_disk, first
        # Pages are empty in a model that attends to none.
        at_once = len(self._load_scratch) // max(1, self._payloads.page_bytes)
        most = first + at_once if is_on_disk else len(items)
        while end < min(most, len(items)) and not is_state(items[end].key):
            if items[end].is_on_disk != is_on_disk:
                break
            end += 1
        return end - first

    @staticmethod
    def _refresh(disk: DiskTier) -> None:
        """Another engine may have written what this one is asked for."""
        try:
            disk.refresh()
        except OSError as error:
            _log.warning("what is on disk cannot be listed", because=str(error))

    def _load_pages(self, items: Sequence[LoadItem]) -> int:
        """Copies pages of one tier up; returns how many came, which is fewer where one cannot be read."""
        begin, nbytes, payloads = time.monotonic(), self._payloads.page_bytes, list[Bytes]()
        for index, item in enumerate(items):
            payload = item.views[0] if item.views else self._load_scratch[index * nbytes :][:nbytes]
            if item.is_on_disk and not self._read_block(item, payload):
                break
            payloads.append(payload)
        if payloads:
            self._payloads.write_pages([item.place for item in items[: len(payloads)]], payloads)
            speed = self.disk_speed if items[0].is_on_disk else self.ram_speed
            speed.add(len(payloads) * nbytes, time.monotonic() - begin)
        return len(payloads)

    def _load_state(self, item: LoadItem) -> int:
        """Copies a state up; returns 1, or 0 where it cannot be read."""
        begin, payload = time.monotonic(), self._load_scratch[: self._payloads.state_bytes]
        if not item.is_on_disk:
            np.concatenate(item.views, out=payload)
        elif self._read_block(item, payload):
            scatter(payload, item.views)
        else:
            return 0
        self._payloads.write_state(item.place, payload)
        speed = self.disk_speed if item.is_on_disk else self.ram_speed
        speed.add(len(payload), time.monotonic() - begin)
        return 1

    def _read_block(self, item: LoadItem, into: Bytes) -> bool:
        record = None if self._disk is None else self._disk.record(item.key)
        return self._disk is not None and record is not None and self._disk.read(record, into)


def scatter(payload: Bytes, views: Sequence[Bytes]) -> None:
    """Copies a payload into the parts that it takes, in order; into none if there are none."""
    begin = 0
    for view in views:
        view[:] = payload[begin : begin + len(view)]
        begin += len(view)
