"""One pool of memory: KV pages and expert slots lend it to each other while requests are served.

Requests come first. Pages that running requests need or will soon, and those of waiting prompts, are claimed
from experts (`SlotSupply` gives up the least chosen ones); what pages leave idle goes to experts.

    pages with memory   |-- in use --|-- needed soon --|-- cached, still worth it --|-- spare → experts --|

A cached prefix is worth its memory as long as computing it again would cost more than experts there would
save. Used once `age` seconds ago, it is expected again at a rate of hit share / age, so it stays until

    hit share * (seconds to compute a byte of KV again) / age  <  (seconds a byte of slots saves in a second)

Memory goes back only when what was needed in the last half second leaves it spare, so it does not flap.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import structlog

from gpu_service.cache.elastic_pages import ElasticPages
from gpu_service.cache.request_cache import RequestCache
from gpu_service.core.request import Request
from gpu_service.core.step import Batch
from gpu_service.device.stream import DeviceStream
from gpu_service.device.virtual_memory import PhysicalPool
from gpu_service.scheduler.supply import PageSupply, Queues
from gpu_service.telemetry.figures import Figure

_log = structlog.get_logger(__name__)
# Tokens that a running request is to have room for before memory has to come from experts: more than it
# makes during a step of the prefill lane, in which no slot changes.
_HEADROOM_TOKENS = 256
# For how long the most that was needed counts, and how often cached prefixes are looked at, seconds.
_HELD_S, _LOOK_S = 0.5, 0.1
# Chunks that change their owner between two steps, at most: each takes the host some microseconds.
_MOST_MOVED = 256
# A prefix that is worth its memory for longer than this, in seconds, is never given up.
_OLDEST_S = 3600.0


class SlotMemory(Protocol):
    """What gives up memory of slots; `AdaptivePlacement` is the real one."""

    @property
    def wants_memory(self) -> bool:
        """Whether more slots would hold something."""

    def give_up_now(self) -> None:
        """Gives the pool what is claimed there, before it returns: while no step is in flight."""


class ElasticMemory(PageSupply):
    """The elastic memory of one rank; driven by the engine's thread."""

    def __init__(
        self,
        pages: ElasticPages,
        cache: RequestCache,
        slots: SlotMemory,
        stream: DeviceStream,
        floor_pages: int,
        stale_after_s: Callable[[float], float] = lambda hit_share: math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`floor_pages`: experts never get these. `stale_after_s`: for a share of prompt tokens found in the
        cache, the age from which a prefix is worth less than experts in its place.
        """
        self._pages, self._cache, self._slots, self._stream = pages, cache, slots, stream
        self._floor, self._stale_after_s, self._clock = floor_pages, stale_after_s, clock
        # Numbers of steps that were planned and may still run, or run again.
        self._open: set[int] = set()
        # Groups whose pages no request has any more, with the number of the next step then.
        self._withdrawn: dict[int, int] = {}
        # What was needed most of late, and until when that counts.
        self._peak, self._peak_until = floor_pages, 0.0
        # Pages of prefixes that are worth their memory, as of the last look.
        self._fresh, self._next_look, self._stale_time = 0, 0.0, 0
        # Moments, and the prefix tree's time then.
        self._moments: list[float] = []
        self._times: list[int] = []
        # Bytes that pages got and gave up since the start.
        self.taken_bytes = self.given_bytes = 0

    @property
    def pool(self) -> PhysicalPool:
        """The memory that pages and slots share."""
        return self._pages.pool

    @property
    def page_bytes(self) -> int:
        """Bytes of a page over all layers."""
        return self._pages.row_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of the pool that pages have now."""
        return self._pages.mapped * self.pool.chunk_bytes

    def planned(self, batch: Batch) -> None:
        self._open.add(batch.step)

    def ended(self, batch: Batch) -> None:
        self._open.discard(batch.step)

    def before_step(self, queues: Queues) -> None:
        now = self._clock()
        self._release(queues.next_step)
        if now >= self._next_look:
            self._next_look = now + _LOOK_S
            self._look_at_prefixes(now)
        capacity = self._pages.num_pages
        wanted = min(capacity, needed_pages(queues) + self._fresh)
        if wanted >= self._peak or now >= self._peak_until:
            self._peak, self._peak_until = wanted, now + _HELD_S
        held = self._cache.pool.usable + 1
        if wanted > held:
            self._grow(wanted - held)
        else:
            self.pool.claim(0)
            spare = held - max(self._peak, min(self._floor, capacity))
            if spare > 2 * self._pages.pages_per_group and self._slots.wants_memory:
                self._shrink(spare - self._pages.pages_per_group, queues.next_step)

    def figures(self) -> list[Figure]:
        """Returns what has moved between pages and experts, bytes."""
        moved = "Bytes of device memory that KV pages "
        return [
            Figure("gpu_pool_taken_bytes", moved + "got from experts", self.taken_bytes),
            Figure("gpu_pool_given_bytes", moved + "gave up to experts", self.given_bytes),
        ]

    def holders(self) -> list[object]:
        """Returns the chunks that pages have, for checks."""
        return self._pages.holders()

    def check_integrity(self) -> None:
        """Raises AssertionError when a page that may be used has no memory."""
        absent = {page for group in self._withdrawn for page in self._pages.pages_of(group)}
        state = self._cache.pool.absent_pages()
        assert state == sorted({*self._pages.absent_pages(), *absent}), "pages and their memory differ"

    # ---- more pages ----

    def _grow(self, count: int) -> None:
        """Adds memory for `count` pages: what is there now, and a claim on the rest."""
        for group in sorted(self._withdrawn):  # their memory is here still
            if count <= 0:
                break
            del self._withdrawn[group]
            count -= self._use(group)
        missing = -(-count // self._pages.pages_per_group) if count > 0 else 0
        is_idle = not self._open
        while missing > 0:
            groups = self._absent_groups(missing if is_idle else min(missing, self._groups_at_once))
            if not groups:
                break
            self.pool.claim(self._pages.chunks_for(groups))
            if is_idle and self.pool.claimed > self.pool.free:
                with self._stream.active():
                    self._slots.give_up_now()
            affordable = _affordable(self._pages, groups, self.pool.free)
            self._add(affordable)
            missing -= len(affordable)
            if not affordable or not is_idle:
                break
        if missing <= 0:
            self.pool.claim(0)

    @property
    def _groups_at_once(self) -> int:
        per_group = max(1, self._pages.chunks_per_group)
        return max(1, _MOST_MOVED // per_group)

    def _absent_groups(self, count: int) -> list[int]:
        held = self._pages.present
        absent = (group for group in range(self._pages.num_groups) if group not in held)
        return [group for group, _ in zip(absent, range(count), strict=False)]

    def _add(self, groups: Sequence[int]) -> None:
        if not groups:
            return
        before = self._pages.mapped
        # Zeroed before any step that is launched later, of the lane too.
        with self._stream.active():
            self._pages.add(groups)
        self.taken_bytes += (self._pages.mapped - before) * self.pool.chunk_bytes
        self.pool.claim(max(0, self.pool.claimed - (self._pages.mapped - before)))
        for group in groups:
            self._use(group)

    def _use(self, group: int) -> int:
        pages = self._pages.pages_of(group)
        self._cache.pool.add(pages)
        return len(pages)

    # ---- fewer pages ----

    def _shrink(self, count: int, next_step: int) -> None:
        """Withdraws whole free groups, the highest first, of up to `count` pages.

        Prefixes that are not worth their memory are dropped for it, also where free pages lie between theirs.
        """
        pool = self._cache.pool
        groups = self._free_groups(count)
        if not groups:
            pool.free(self._cache.tree.evict(count, until=self._stale_time))
            groups = self._free_groups(count)
        for group in groups:
            pool.withdraw(self._pages.pages_of(group))
            self._withdrawn[group] = next_step

    def _free_groups(self, most_pages: int) -> list[int]:
        """Groups whose pages are all free; few enough to be unmapped between two steps."""
        size, found = self._pages.pages_per_group, list[int]()
        pages = np.array(self._cache.pool.free_pages(), np.int64)
        free = np.bincount(pages // size, minlength=self._pages.num_groups)
        room = min(most_pages // size, self._groups_at_once - len(self._withdrawn))
        for group in sorted(self._pages.present - {0}, reverse=True):
            if len(found) < room and free[group] == len(self._pages.pages_of(group)):
                found.append(group)
        return found

    def _release(self, next_step: int) -> None:
        """Unmaps withdrawn groups that no step can touch any more, not even one that is run again.

        A step that was planned after the withdrawal has to have ended: before it, on the device's stream,
        pages may have been cleared.
        """
        if not self._withdrawn:
            return
        oldest = min(self._open, default=next_step)
        gone = [group for group, step in self._withdrawn.items() if oldest > step]
        if gone:
            before = self._pages.mapped
            self._pages.remove(gone)
            self.given_bytes += (before - self._pages.mapped) * self.pool.chunk_bytes
            for group in gone:
                del self._withdrawn[group]

    def _look_at_prefixes(self, now: float) -> None:
        cache, tree = self._cache, self._cache.tree
        self._moments.append(now)
        self._times.append(tree.time)
        old = bisect.bisect_left(self._moments, now - _OLDEST_S)
        del self._moments[:old], self._times[:old]
        share = cache.hit_tokens / cache.query_tokens if cache.query_tokens else 0.0
        place = bisect.bisect_right(self._moments, now - self._stale_after_s(share)) - 1
        self._stale_time = self._times[place] if place >= 0 else 0
        # The tree is walked only where some prefixes are worth their memory and others are not.
        some = 0 < self._stale_time < tree.time
        self._fresh = tree.evictable_since(self._stale_time) if some else 0
        if not self._stale_time:
            self._fresh = tree.evictable_pages


def needed_pages(queues: Queues) -> int:
    """Pages, the dummy one included, that running requests have and will soon need, and those of waiting ones
    that there are slots for.
    """
    cache, limits = queues.cache, queues.limits
    needed = 1 + cache.pool.usable - cache.available + limits.watermark_pages
    needed += sum(_missing(request, request.scheduled_len, cache) for request in queues.running)
    room = max(0, limits.max_num_seqs - len(queues.running))
    return needed + sum(_missing(request, 0, cache) for request in queues.waiting[:room])


def _missing(request: Request, computed: int, cache: RequestCache) -> int:
    """Pages that a request lacks for all it is known to be and some tokens more."""
    last = request.prompt_len + request.params.max_tokens
    soon = min(last, max(request.total_len, computed) + _HEADROOM_TOKENS)
    return max(0, cache.pages_for(soon) - len(request.pages))


def first_groups(pages: ElasticPages, chunks: int, num_pages: int) -> list[int]:
    """Returns groups from the first on, as many as `chunks` are enough for, of up to about `num_pages`."""
    groups = list(range(-(-num_pages // pages.pages_per_group)))
    return list(_affordable(pages, groups, chunks))


def _affordable(pages: ElasticPages, groups: Sequence[int], chunks: int) -> Sequence[int]:
    """Returns the first of `groups`, which ascend and have no memory, as many as `chunks` are enough for."""
    counts = range(1, len(groups) + 1)
    return groups[: bisect.bisect_right(counts, chunks, key=lambda n: pages.chunks_for(groups[:n]))]


def stale_after(
    hit_share: float, prompt_token_s: float | None, token_bytes: float, saved_per_byte: float | None
) -> float:
    """Seconds, by the rule of this file: a prefix that was not used for longer is worth less than experts.

    `prompt_token_s`: to compute a token; `token_bytes` of KV; `saved_per_byte`: seconds that a byte of slots
    saves in a second. None: not known yet, so prefixes stay, unless none was ever found again.
    """
    if not hit_share:
        return 0.0
    if prompt_token_s is None or not saved_per_byte:
        return math.inf
    return hit_share * prompt_token_s / token_bytes / saved_per_byte
