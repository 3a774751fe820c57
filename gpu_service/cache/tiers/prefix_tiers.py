"""Three tiers under one prefix tree: pages on the device, blocks in RAM, blocks on disk.

What the tree holds is copied down in the background, so that giving it up costs nothing; what is given up
before that is copied to RAM on the spot. A waiting request whose prefix goes on below waits for its blocks
(a fetch), while the scheduler computes others; then the tree has them, as if they had never left:

    tokens     |-- in the tree, locked --|-- fetched from RAM or disk --|-- computed --|
    fetch      the scheduler asks -> pages are taken -> steps that could write them end -> copied -> inserted

A prefix that cannot be read, is slower than computing it, or does not arrive in time, is computed. Of several
ranks each has its part of every block, and nothing may depend on how long a copy takes: RAM is filled when
the tree gives a block up, on the spot, and read on the spot, or, where there is a disk, once all ranks have
what each reads (`rank_disk`). Driven by the engine's thread; only `Mover` has others. Steps are not waited
for: a page that was freed may still be written by a step in flight, so a copy into it begins once every step
that was open then has ended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakSet

import structlog

from gpu_service.cache.radix_cache import Node, PrefixHandle, TokenArray
from gpu_service.cache.request_cache import RequestCache
from gpu_service.cache.tiers.below import Below, Prefix
from gpu_service.cache.tiers.digests import page_digests, root_digest
from gpu_service.cache.tiers.disk_tier import DiskTier
from gpu_service.cache.tiers.keeping import Keeping
from gpu_service.cache.tiers.mover import LoadItem, Mover
from gpu_service.cache.tiers.payloads import Payloads
from gpu_service.cache.tiers.ram_tier import RamTier
from gpu_service.cache.tiers.rank_disk import DiskStaging
from gpu_service.cache.tiers.write_back import WriteBack
from gpu_service.core.request import Request
from gpu_service.core.step import Batch
from gpu_service.telemetry.figures import Figure

_log = structlog.get_logger(__name__)
# Fetches at once: the disk and the link serve one after another, more would only hold pages.
_MOST_FETCHES = 4
# How long a fetch may take where the cost of computing its tokens is not known, and at least, seconds.
_PATIENCE_S, _LEAST_PATIENCE_S = 30.0, 1.0
# How old the view of what other engines have written may be, seconds.
_REFRESH_S = 1.0


@dataclass(slots=True, eq=False)
class _Fetch:
    """Blocks of one request on their way; filled by `PrefixTiers`."""

    request: Request
    tokens: list[int]  # of the whole prefix, as far as it is fetched
    handle: PrefixHandle  # of what the tree has of it, locked
    pages: list[int]
    state_slot: int  # 0: the model has no states
    items: list[LoadItem]
    begun: float
    deadline: float
    generation: int
    # Steps that were open when the pages were taken.
    waits_for: set[int]
    read: list[bytes] = field(default_factory=list)  # Pinned in RAM, to be read,
    filled: list[bytes] = field(default_factory=list)  # and to be filled from the disk.
    future: Future[int] | None = None
    # Of several ranks with disks: counted alike on all of them; what is said of it at last.
    number: int = 0
    agreed: int | None = None
    is_late: bool = False
    given_up_at: float = math.inf  # by a clock of this rank's


class Ranks(Protocol):
    """The other ranks of this engine; `gpu_service.parallel.group.RankGroup` is one."""

    def fail(self, reason: str) -> None:
        """This rank cannot do what the others do."""

    def report(self, fetch: int, blocks: int) -> None:
        """`blocks` of a fetch have come to this rank; any thread may call."""

    def give_up(self, fetch: int) -> None:
        """No rank shall wait for a fetch any more; of rank 0, others have no say."""


class PrefixTiers:
    """What lies below a request cache. `close` ends its threads."""

    def __init__(
        self,
        cache: RequestCache,
        payloads: Payloads,
        identity: bytes,
        ram: RamTier | None,
        disk: DiskTier | None,
        wake: Callable[[], None],
        token_seconds: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        ranks: Ranks | None = None,
    ) -> None:
        """`wake`: called by other threads when `poll` has something to do. `token_seconds`: what computing a
        token of a prompt takes; None while that is not known. `clock`, `wall_clock`: seconds that the tree's
        are of, and seconds since the epoch. `ranks`: the others, which decide alike by the tree's time
        alone, and of which `wake` lets rank 0 call `poll` on all; None: there are none.
        """
        self._cache, self._identity, self.payloads = cache, identity, payloads
        self.ram, self.disk = ram, disk
        self._token_seconds, self._clock = token_seconds, clock
        self._wake, self._ranks = wake, ranks
        self._is_direct = ranks is not None and disk is None
        self.mover = Mover(payloads, disk, (lambda: None) if ranks else wake, self._is_direct)
        self._keeping = Keeping(cache.tree, ram, disk, self.mover, clock, wall_clock, ranks is not None)
        self._staging: DiskStaging | None = None
        if ranks is not None and disk is not None:
            self._staging = DiskStaging(cache.page_size, self.mover, payloads, disk, wake)
        self._below = Below(cache, identity, ram, disk, ranks is not None)
        self._num_fetches = 0
        self._write_back = WriteBack(cache, self.mover, payloads, ram, disk, self._keeping)
        self._fetches: dict[Request, _Fetch] = {}
        # Waiting requests that are not asked about again.
        self._settled: WeakSet[Request] = WeakSet()
        self._open_steps: set[int] = set()
        self._refresh: Future[None] | None = None
        # Of several ranks the tree's time stands still while no request comes.
        self._real_clock = time.monotonic if ranks is not None else clock
        self._refreshed_at = self._real_clock()
        self._generation = 0
        self._is_open = False
        self.has_moved = False
        self.hit_tokens = {"ram": 0, "disk": 0}
        self.num_late = self.num_failed = 0
        self.fetch_seconds = 0.0
        cache.tiers = self
        cache.tree.tiers = self

    # ---- the tree's hooks ----

    def digests(self, namespace: str, parent: Node, tokens: TokenArray) -> list[bytes]:
        """Implements `LowerTiers`."""
        if not parent.digests:
            parent.digests = [root_digest(self._identity, namespace)]
        return page_digests(parent.digests[-1], tokens, self._cache.page_size)

    def kept(self, node: Node) -> None:
        """Implements `LowerTiers`."""
        if not self._is_open:
            return
        if self._ranks is not None:
            if self._staging is not None:
                self._staging.add(node)
            return
        if self._write_back.is_done:
            # The engine may be about to wait for messages.
            self._wake()
        self._write_back.add(node)

    def keeping(self, node: Node) -> None:
        """Implements `LowerTiers`."""
        if self._is_open:
            self._keeping.kept(node)

    def evicting(self, node: Node) -> None:
        """Implements `LowerTiers`."""
        if self._is_open:
            if self._staging is not None:
                self._staging.going(node)
            self._write_back.rescue(node)

    def evicting_state(self, node: Node) -> None:
        """Implements `LowerTiers`."""
        if self._is_open:
            self._write_back.rescue_state(node)

    # ---- the cache's hooks ----

    @property
    def arriving_pages(self) -> list[int]:
        """Pages that fetches own."""
        return [page for fetch in self._fetches.values() for page in fetch.pages]

    @property
    def arriving_states(self) -> list[int]:
        """Slots that fetches own, as snapshots."""
        return [fetch.state_slot for fetch in self._fetches.values() if fetch.state_slot]

    @property
    def copied_states(self) -> list[int]:
        """Slots that are held because they are copied down."""
        return self._write_back.held_states

    def attached(self, request: Request, handle: PrefixHandle) -> None:
        """Implements `LowerCopies`; should the request be preempted, it may fetch again."""
        self._settled.discard(request)
        node: Node | None = handle.node
        while self.ram is not None and node is not None:
            self.ram.touch(reversed(node.digests))
            node = node.parent

    def open(self) -> None:
        """Implements `LowerCopies`."""
        if not self._is_open and self.ram is not None:
            self.ram.segment.begin_locks()
        self._is_open = True

    def drop(self) -> None:
        """Implements `LowerCopies`."""
        if not self._is_open:
            return
        self._generation += 1
        self._write_back.drop()
        if self._staging is not None:
            self._staging.drop()
        if self.ram is not None:
            self.ram.drop()
        if self.disk is not None:
            self.disk.drop()

    # ---- the scheduler's ----

    @property
    def is_busy(self) -> bool:
        """Whether something is on its way whose end may let a request start."""
        return bool(self._fetches) or self._refresh is not None or self._write_back.is_storing

    @property
    def is_copied(self) -> bool:
        """Whether lower tiers have all that the tree holds and they have room for. Any thread may ask."""
        is_staged = self._staging is None or self._staging.is_done
        return self._write_back.is_done and self._keeping.is_done and is_staged

    def planned(self, batch: Batch) -> None:
        """A step is going to be launched."""
        self._open_steps.add(batch.step)

    def ended(self, batch: Batch) -> None:
        """The step writes no page any more that is freed before."""
        self._open_steps.discard(batch.step)

    def poll(self) -> None:
        """Takes in what has arrived, and starts what may start."""
        for fetch in list(self._fetches.values()):
            self._start(fetch)
            if self._has_ended(fetch):
                self._arrived(fetch)
            elif self._ranks is not None and self._real_clock() > fetch.given_up_at:
                fetch.given_up_at = math.inf
                self._ranks.give_up(fetch.number)
        if self._staging is not None:
            self._staging.poll()
        if self._refresh is not None and self._refresh.done():
            self._refresh, self.has_moved = None, True
        self.has_moved |= self._write_back.poll(self._generation)

    def look(self, requests: Sequence[Request]) -> None:
        """Rank 0: lets all ranks know what its disk has of a prompt, which outputs share."""
        if not self._is_open or self.disk is None:
            return
        if self._real_clock() - self._refreshed_at >= _REFRESH_S:
            self._refreshed_at = self._real_clock()
            self.mover.refresh()
        self._below.note_disk(requests)

    def agreed(self, number: int, came: int) -> None:
        """At least `came` blocks of a fetch are on every rank; -1: rank 0 does not wait for it any more."""
        for fetch in self._fetches.values():
            if fetch.number == number:
                if came < 0:
                    fetch.is_late = True
                else:
                    fetch.agreed = came
        self.has_moved = True
        self.poll()

    def awaits(self, request: Request, has_room: Callable[[PrefixHandle], bool]) -> bool:
        """Returns whether a waiting request should not start yet, because blocks of its prefix are on their
        way.

        Begins to fetch them where that is worth it and `has_room` for all pages of the request, given what
        the tree has of them.
        """
        fetch = self._fetches.get(request)
        if fetch is not None:
            return not self._is_late(fetch)
        if request in self._settled or not self._is_open:
            return False
        if self._looks_at_disk():
            return True
        prefix = self._below.find(request)
        if prefix is None or not self._is_worth(prefix):
            self._settled.add(request)
            return False
        on_the_way = {item.key for other in self._fetches.values() for item in other.items}
        if prefix.keys[0] in on_the_way or len(self._fetches) >= _MOST_FETCHES:
            return True
        return has_room(prefix.handle) and self._begin(request, prefix)

    def close(self) -> None:
        """Ends the threads, and lets other engines have the files. No step is computed any more."""
        self._is_open = False
        self.mover.close()
        for fetch in list(self._fetches.values()):
            self._arrived(fetch)
        self._write_back.finish(self._generation)
        if self.disk is not None:
            self.disk.close()
        if self.ram is not None:
            self.ram.segment.close()

    def figures(self) -> list[Figure]:
        """Since the start, and of now."""
        ram, disk = self.ram, self.disk
        held = {"ram": ram.used_bytes if ram else 0, "disk": disk.held_bytes if disk else 0}
        written = {"ram": self._write_back.ram_bytes, "disk": disk.written_bytes if disk else 0}
        text = "Prefix cache below the device: "
        return [
            Figure("kv_tier_bytes", text + "bytes that are held", held, False, "tier"),
            Figure("kv_tier_written_bytes", text + "bytes that were copied down", written, by="tier"),
            Figure("kv_tier_hit_tokens", text + "tokens that came back", dict(self.hit_tokens), by="tier"),
            Figure("kv_tier_fetch_seconds", text + "time in which prefixes came back", self.fetch_seconds),
            Figure("kv_tier_late", text + "prefixes computed since they did not arrive", self.num_late),
            Figure("kv_tier_failed", text + "prefixes of which a block could not be read", self.num_failed),
            Figure("kv_tier_errors", text + "errors of the disk", disk.num_errors if disk else 0),
        ]

    # ---- fetches ----

    def _looks_at_disk(self) -> bool:
        """Whether it is being looked up what other engines have written; at most once in a while."""
        if self.disk is None or self._ranks is not None:
            return False
        if self._refresh is None and self._clock() - self._refreshed_at >= _REFRESH_S:
            self._refreshed_at = self._clock()
            self._refresh = self.mover.refresh()
        return self._refresh is not None and self._clock() - self._refreshed_at < _LEAST_PATIENCE_S

    def _is_worth(self, prefix: Prefix) -> bool:
        """Returns whether fetching takes less time than computing, as far as both are known."""
        a_token = self._token_seconds()
        if a_token is None:
            return True
        return self._below.seconds(prefix, self.payloads, self.mover) <= a_token * prefix.saved_tokens

    def _begin(self, request: Request, prefix: Prefix) -> bool:
        """Takes what the blocks need on the device; False: there is no state to put one in."""
        cache, tree, states = self._cache, self._cache.tree, self._cache.states
        count = len(prefix.keys) - (states is not None)
        tree.lock(prefix.handle)
        read = [key for key in prefix.keys if self.ram is not None and key in self.ram]
        before = 0
        if self.ram is not None:
            self.ram.pin(read)
            before = self.ram.clock
            self.ram.touch(reversed(read))
        slot = 0
        if states is not None:
            if (states.is_full and not tree.evict_state()) or not states.pool.available:
                tree.unlock(prefix.handle)
                self._unpin(read)
                self._settled.add(request)
                return False
            slot = states.adopt()
        pages = cache.take(count)
        a_token = self._token_seconds()
        patience = _PATIENCE_S
        if a_token is not None:
            patience = max(_LEAST_PATIENCE_S, a_token * prefix.saved_tokens)
        fetch = _Fetch(
            *(request, prefix.tokens, prefix.handle, pages, slot, []),
            begun=self._clock(),
            deadline=self._clock() + patience,
            generation=self._generation,
            waits_for=set(self._open_steps),
            read=read,
        )
        for key, parent, place in zip(
            prefix.keys, prefix.parents, [*pages, *([slot] if slot else [])], strict=True
        ):
            fetch.items.append(self._item(fetch, key, parent, place, before))
        self._num_fetches += 1
        fetch.number, fetch.given_up_at = self._num_fetches, self._real_clock() + patience
        self._fetches[request] = fetch
        self._start(fetch)
        return True

    def _start(self, fetch: _Fetch) -> None:
        """Begins to copy, once no step can write to the pages any more."""
        if fetch.future is None and not fetch.waits_for & self._open_steps:
            fetch.future = self.mover.load(fetch.items)
            if self._is_direct:
                # The request need not wait for a message.
                self.has_moved = True
            elif self._ranks is not None:
                report, number = self._ranks.report, fetch.number
                fetch.future.add_done_callback(lambda done: report(number, _blocks_of(done)))

    def _has_ended(self, fetch: _Fetch) -> bool:
        if self._ranks is None or self._is_direct:
            return fetch.future is not None and fetch.future.done()
        return fetch.agreed is not None

    def _item(self, fetch: _Fetch, key: bytes, parent: bytes, place: int, before: int) -> LoadItem:
        """A block's way up; from the disk it goes to RAM, too."""
        ram = self.ram
        if ram is not None and key in fetch.read:
            return LoadItem(key, place, ram.views(key), is_on_disk=False)
        assert self.disk is not None
        views = []
        if ram is not None and ram.reserve(key, parent, self._cache.page_size, before):
            fetch.filled.append(key)
            views = ram.views(key)
        return LoadItem(key, place, views, is_on_disk=True)

    def _arrived(self, fetch: _Fetch) -> None:
        """Puts what came into the tree, and gives back what the rest would have taken."""
        cache, states = self._cache, self._cache.states
        del self._fetches[fetch.request]
        self.has_moved = True
        came = self._result(fetch)
        is_whole, is_current = came == len(fetch.items), fetch.generation == self._generation
        self.num_failed += not is_whole
        self.fetch_seconds += self._clock() - fetch.begun
        self._settle_ram(fetch, came, is_current)
        had = min(len(fetch.handle.pages), len(fetch.tokens) // cache.page_size)
        end = had + min(came, len(fetch.pages))
        if not is_current or (states is not None and not is_whole):
            end = 0
        arrived = max(0, end - had)
        keeps_state = False
        if end > had or (end and fetch.state_slot):
            pages = [*fetch.handle.pages[:had], *fetch.pages[:arrived]]
            tokens, namespace = fetch.tokens[: end * cache.page_size], fetch.request.cache_namespace
            result = cache.tree.insert(tokens, pages, namespace, fetch.state_slot)
            # The request may have begun without its prefix meanwhile, and have computed some of it.
            known = max(had, result.already_cached // cache.page_size)
            cache.pool.hand_to_cache(pages[known:])
            cache.pool.free(pages[had:known])
            keeps_state = result.takes_state
            self._keeping.came_back(tokens, namespace, result.handle)
            self._count(fetch, arrived)
        cache.pool.free(fetch.pages[arrived:])
        if states is not None and not keeps_state:
            states.forget(fetch.state_slot)
        cache.tree.unlock(fetch.handle)
        self._settled.add(fetch.request)
        fetch.request.expected_len = -1

    def _result(self, fetch: _Fetch) -> int:
        """Returns how many items came."""
        if fetch.future is None or fetch.future.cancelled():
            return 0
        error = fetch.future.exception()
        if error is not None:
            _log.error(
                "fetching KV blocks failed; they are computed", request=fetch.request.key, exc_info=error
            )
            if self._ranks is not None and self._is_direct:
                self._ranks.fail(f"fetching KV blocks failed: {error!r}")
            return 0
        return fetch.future.result() if fetch.agreed is None else fetch.agreed

    def _settle_ram(self, fetch: _Fetch, came: int, is_current: bool) -> None:
        ram = self.ram
        if ram is None:
            return
        self._unpin(fetch.read)
        arrived = {item.key for item in fetch.items[:came]} if is_current else set[bytes]()
        # The last first, so that nothing that is left continues what goes.
        for key in reversed(fetch.filled):
            if key in arrived:
                ram.complete(key)
                self._keeping.filled(key)
            else:
                ram.abandon(key)
        if not is_current:
            ram.discard(reversed(fetch.read))

    def _unpin(self, keys: Sequence[bytes]) -> None:
        if self.ram is not None:
            self.ram.unpin(keys)

    def _count(self, fetch: _Fetch, arrived: int) -> None:
        """Tokens by where their pages came from; of a state alone, all that it saves came from its tier."""
        size = self._cache.page_size
        for item in fetch.items[:arrived]:
            self.hit_tokens["disk" if item.is_on_disk else "ram"] += size
        if not arrived:
            self.hit_tokens["disk" if fetch.items[-1].is_on_disk else "ram"] += len(fetch.tokens)

    def _is_late(self, fetch: _Fetch) -> bool:
        """Returns whether its request is to be computed instead; what arrives later is for others."""
        if not fetch.is_late and self._clock() < fetch.deadline:
            return False
        if fetch.request not in self._settled:
            self._settled.add(fetch.request)
            self.num_late += 1
            _log.warning("KV blocks do not arrive in time and are computed again", request=fetch.request.key)
        return True


def _blocks_of(done: Future[int]) -> int:
    """Returns how many items came to this rank."""
    return 0 if done.cancelled() or done.exception() is not None else done.result()
