"""Pages of requests: taken from the prefix tree or the pool, given back to the tree.

`PagePool` knows which pages are free, owned by a request, or held by the prefix tree: page numbers only, no
tokens, requests or tensors. Page 0 is the dummy page that padding reads and writes; it is never handed out.
`RequestCache` is the one place where the pool and the tree meet, so that every page is free, cached or owned.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from gpu_service.cache.radix_cache import PrefixHandle, RadixCache
from gpu_service.cache.request_states import RequestStates, StatePool, num_snapshots
from gpu_service.cache.state_cache import StateSlots
from gpu_service.core.request import Pooling, Request
from gpu_service.core.results import RowResult
from gpu_service.core.step import Batch
from moebius.config import GpuConfig

# Pages that are taken at once, from which they are those of a prompt.
_MANY_PAGES = 8
_LONGEST_WAIT_S = 0.1


class PageState(enum.IntEnum):
    """Every page but 0 is in exactly one of these sets."""

    FREE = 0
    OWNED = 1
    CACHED = 2
    ABSENT = 3  # Without memory, for now.


class OutOfPages(RuntimeError):
    """More pages were asked for than are free; the caller must evict or preempt first."""


class PagePool:
    """The free pages and each page's state. The lowest free page is handed out first, so that memory of high
    ones can be given up. Where memory moves, many at once are the highest: a prompt's pages lie together, and
    those that decoding requests take one by one meanwhile do not keep the memory that it leaves.
    """

    def __init__(self, num_pages: int, absent: Iterable[int] = ()) -> None:
        """`absent`: pages without memory at first. Raises ValueError unless one page can be handed out."""
        if num_pages < 2:
            raise ValueError(f"num_pages must be at least 2 (page 0 is the dummy page), got {num_pages}")
        self.num_pages = num_pages
        self._state = bytearray(num_pages)
        for page in absent:
            self._state[page] = PageState.ABSENT
        self._has_absent = any(state == PageState.ABSENT for state in self._state)
        # A heap.
        self._free = [page for page in range(1, num_pages) if self._state[page] == PageState.FREE]
        self.usable = len(self._free)  # Pages that have memory, but for the dummy page.

    @property
    def available(self) -> int:
        """Pages on the free list."""
        return len(self._free)

    def free_pages(self) -> list[int]:
        """Returns the pages on the free list, in no order."""
        return list(self._free)

    def absent_pages(self) -> list[int]:
        """Returns the pages without memory, ascending."""
        return [page for page in range(self.num_pages) if self._state[page] == PageState.ABSENT]

    def alloc(self, count: int) -> list[int]:
        """Takes `count` free pages; the caller owns them. Raises OutOfPages and takes none if too few."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} free of {self.usable}")
        if self._has_absent and count >= _MANY_PAGES:
            # Sorted it is a heap still.
            self._free.sort()
            pages = self._free[len(self._free) - count :]
            del self._free[len(self._free) - count :]
        else:
            pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._state[page] = PageState.OWNED
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Returns owned or cached pages. Raises ValueError for the dummy page and for a double free."""
        in_use = (PageState.OWNED, PageState.CACHED)
        for page in pages:
            if not 0 < page < self.num_pages or self._state[page] not in in_use:
                last = self.num_pages - 1
                raise ValueError(f"page {page} is not in use (pages 1..{last} can be freed once)")
            self._state[page] = PageState.FREE
            heapq.heappush(self._free, page)

    def add(self, pages: Iterable[int]) -> None:
        """These pages have memory from now on. Raises ValueError for one that had some."""
        for page in pages:
            if self._state[page] != PageState.ABSENT:
                raise ValueError(f"page {page} is {PageState(self._state[page]).name}, expected ABSENT")
            self._state[page] = PageState.FREE
            heapq.heappush(self._free, page)
            self.usable += 1

    def withdraw(self, pages: Iterable[int]) -> None:
        """These free pages are to lose their memory. Raises ValueError for one that is not free."""
        withdrawn = set(pages)
        for page in withdrawn:
            if page == 0 or self._state[page] != PageState.FREE:
                raise ValueError(f"page {page} is {PageState(self._state[page]).name}, expected FREE")
            self._state[page] = PageState.ABSENT
        self._free = [page for page in self._free if page not in withdrawn]
        heapq.heapify(self._free)
        self.usable -= len(withdrawn)

    def hand_to_cache(self, pages: Sequence[int]) -> None:
        """Moves owned pages to the prefix tree. Raises ValueError when a page is not owned."""
        for page in pages:
            if self._state[page] != PageState.OWNED:
                raise ValueError(f"page {page} is {PageState(self._state[page]).name}, expected OWNED")
            self._state[page] = PageState.CACHED

    def check_integrity(self, owned: Iterable[int], cached: Iterable[int]) -> None:
        """Raises AssertionError unless free + owned + cached is every page that has memory, once, as the
        callers see it.
        """
        expected = bytearray(self.num_pages)
        absent = self.absent_pages()
        seen = [0, *self._free, *absent]
        for page in absent:
            expected[page] = PageState.ABSENT
        for state, pages in ((PageState.OWNED, owned), (PageState.CACHED, cached)):
            for page in pages:
                expected[page] = state
                seen.append(page)
        if sorted(seen) != list(range(self.num_pages)):
            missing = sorted(set(range(self.num_pages)) - set(seen))
            double = sorted({page for page in seen if seen.count(page) > 1})
            raise AssertionError(f"pages lost: {missing}, pages in two sets: {double}")
        if expected != self._state:
            wrong = [page for page in range(self.num_pages) if expected[page] != self._state[page]]
            raise AssertionError(f"pages whose recorded state differs from their holder: {wrong}")


class LowerCopies(Protocol):
    """What a cache knows of its tiers below: `cache.tiers.prefix_tiers`."""

    @property
    def arriving_pages(self) -> list[int]:
        """Pages on their way up, which nothing else owns."""

    @property
    def arriving_states(self) -> list[int]:
        """The same of slots of states, which count as snapshots."""

    @property
    def copied_states(self) -> list[int]:
        """Slots that are held because they are copied down."""

    has_moved: bool  # Something has ended since `wait_for_tiers` was called last.

    @property
    def is_busy(self) -> bool:
        """Whether something is on its way whose end may let a request start."""

    def open(self) -> None:
        """From now on blocks are kept and fetched."""

    def close(self) -> None:
        """Ends whatever runs beside the engine's thread, once no step is computed any more."""

    def attached(self, request: Request, handle: PrefixHandle) -> None:
        """A request starts from a prefix of the tree."""

    def drop(self) -> None:
        """Forgets all that is kept below, and what is on its way."""

    def planned(self, batch: Batch) -> None:
        """A step is going to be launched."""

    def ended(self, batch: Batch) -> None:
        """The step writes no page any more that is free."""

    def poll(self) -> None:
        """Takes in what has arrived, and starts what may start."""

    def awaits(self, request: Request, has_room: Callable[[PrefixHandle], bool]) -> bool:
        """Whether a waiting request should not start yet, since blocks of its prefix are on their way up."""


class RequestCache:
    """Gives requests pages and takes them back.

    pages of a request   |-- the tree's, locked --|---- owned ----|
    tokens               0               handle.num_tokens      ceil(scheduled_len / page_size) pages
    """

    def __init__(
        self, pool: PagePool, tree: RadixCache, prefix_caching: bool, states: RequestStates | None = None
    ) -> None:
        """`states`: of a model with linear attention; the tree reports which ones it gives up."""
        self.pool = pool
        self.tree = tree
        self.states = states
        self.page_size = tree.page_size
        self.prefix_caching = prefix_caching
        self.tiers: LowerCopies | None = None  # None: what the tree gives up is gone.
        # Prompt tokens looked up in, and found in, the tree since start.
        self.query_tokens = 0
        self.hit_tokens = 0
        # Of each request that holds one, the prefix of the tree that its first pages are.
        self._prefixes: dict[Request, PrefixHandle] = {}
        # Never repeated, over all requests: a request may be given the memory address of an ended one.
        self._epochs = itertools.count(1)

    @property
    def available(self) -> int:
        """Pages a request could get without preempting anyone."""
        return self.pool.available + self.tree.evictable_pages

    @property
    def counts(self) -> dict[str, int]:
        """For `EngineLoad`: pages by who has them, and prompt tokens that were looked up and found."""
        evictable = self.tree.evictable_pages
        return {
            "used_pages": self.pool.usable - self.pool.available - evictable,
            "cached_pages": evictable,
            "kept_pages": self.tree.kept_pages,
            "usable_pages": self.pool.num_pages - 1,
            "query_tokens": self.query_tokens,
            "hit_tokens": self.hit_tokens,
        }

    def pages_for(self, num_tokens: int) -> int:
        """Returns the number of pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def probe(self, request: Request) -> PrefixHandle | None:
        """The cached prefix the request would start from, unlocked; None when it may not use one.

        At least one token is left to compute, because only computed tokens have logits. Prompt
        log-probabilities need the logits of every prompt token, and a mean its hidden states, so they forgo
        the cache.
        """
        wanted = request.params.prompt_logprobs is not None
        if not self.prefix_caching or (wanted and len(request.prompt_logprobs) < request.prompt_len):
            return None
        if request.params.pooling == Pooling.MEAN:
            return None
        return self.tree.match(request.prefix_keys(request.total_len - 1), request.cache_namespace)

    def attach(self, request: Request, handle: PrefixHandle | None) -> None:
        """Starts a request on its cached prefix (which is locked) or on nothing."""
        if self.prefix_caching and request.num_preemptions == 0:
            self.query_tokens += request.prompt_len
            self.hit_tokens += handle.num_tokens if handle else 0
        if handle is not None:
            self.tree.lock(handle)
            self._prefixes[request] = handle
            if self.tiers is not None:
                self.tiers.attached(request, handle)
        if self.states is not None:
            self.states.start(request, handle.state_slot if handle else 0)
        self._set_pages(request, list(handle.pages) if handle else [])
        start = handle.num_tokens if handle else 0
        request.computed_len = request.scheduled_len = start
        if request.num_preemptions == 0:
            request.cached_len = start

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Makes room for the first `num_tokens` tokens, evicting from the tree; False when out of pages."""
        wanted = self.pages_for(num_tokens) - len(request.pages)
        if wanted <= 0:
            return True
        if wanted > self.available:
            return False
        request.pages.extend(self.take(wanted))
        return True

    def grow_for_drafts(self, batch: Batch, index: int, count: int, spared_pages: int) -> bool:
        """Makes room for drafts of a request of a batch; False: not without the last `spared_pages` pages, or
        too few states are free."""
        if not self.grow_where_free(batch.requests[index], count, spared_pages):
            return False
        return self.states is None or self.states.advance_drafts(batch, index, count)

    def grow_where_free(self, request: Request, count: int, spared_pages: int) -> bool:
        """Makes room in pages for tokens after those that are planned; False: not without the last
        `spared_pages` pages."""
        num_tokens = request.scheduled_len + count
        wanted = self.pages_for(num_tokens) - len(request.pages)
        return wanted <= self.available - spared_pages and self.grow(request, num_tokens)

    def accept_draft(self, batch: Batch, index: int, place: int) -> None:
        """The `place`-th draft of a request of a batch was right, and is among its `computed_len` tokens."""
        if self.states is not None:
            request, slot = batch.requests[index], batch.draft_states[index][place]
            self.states.accept(request, slot)
            self.keep_state(request, slot)

    def take(self, count: int) -> list[int]:
        """Returns `count` pages, at most `available`, evicting from the tree; the caller owns them."""
        if count > self.pool.available:
            self.pool.free(self.tree.evict(count - self.pool.available))
        return self.pool.alloc(count)

    @property
    def has_free_state(self) -> bool:
        """Returns whether one request more can be in the next step, as far as its state matters."""
        return self.states is None or self.states.pool.available > 0

    def scheduled(self, request: Request, batch: Batch) -> None:
        """The batch's next row is of this request."""
        if self.states is not None:
            self.states.advance(request, batch)

    def poisoned_pages(self, batch: Batch, results: Sequence[RowResult]) -> list[int]:
        """Returns pages with KV that is not finite, before `commit`; no request has them once that is done.

        Of a request that ends by its own error all that only it has; else from the first failed draft on.
        """
        pages: list[int] = []
        if not any(result.error or result.verified for result in results):
            return pages
        for request, start, result in zip(batch.requests, batch.start_positions, results, strict=True):
            if request.slot < 0 or request.finished or not (result.error or result.verified):
                continue
            failed = next((place for place, row in enumerate(result.verified, 1) if row.error), 0)
            if result.error:
                pages += self.exclusive_pages(request)
            elif failed:
                pages += request.pages[(start + failed) // self.page_size :]
        return pages

    def planned(self, batch: Batch) -> None:
        """The batch has all its rows and is going to be launched."""
        if self.tiers is not None:
            self.tiers.planned(batch)

    def ended(self, batch: Batch) -> None:
        """The batch will never be run again."""
        if self.states is not None:
            self.states.committed(batch)
        if self.tiers is not None:
            self.tiers.ended(batch)

    def opened_lane(self, batch: Batch) -> None:
        """The batch is the prefill lane's, whose requests give up no page before its end: so it writes none
        that blocks of a lower tier arrive in.
        """
        if self.tiers is not None:
            self.tiers.ended(batch)

    def open_tiers(self) -> None:
        """From now on what the tree gives up is kept, and prefixes come back from lower tiers."""
        if self.tiers is not None:
            self.tiers.open()

    def poll_tiers(self) -> None:
        """Takes in what has arrived from lower tiers."""
        if self.tiers is not None:
            self.tiers.poll()

    def wait_for_tiers(self, wait: Callable[[float], None]) -> bool:
        """Whether requests may start once something has come or gone: called where none can start now.

        `wait` blocks until there is a message, for at most that many seconds; what comes posts one.
        """
        tiers = self.tiers
        if tiers is None or not (tiers.is_busy or tiers.has_moved):
            return False
        if not tiers.has_moved:
            wait(_LONGEST_WAIT_S)
        tiers.has_moved = False
        return True

    @property
    def keeps_states(self) -> bool:
        """Returns whether states at the end of a prompt's whole pages are worth computing."""
        return self.prefix_caching and self.states is not None and self.states.max_snapshots > 0

    def keep_state(self, request: Request, slot: int) -> None:
        """The state after `computed_len` tokens is in a slot: a snapshot of it, if prefixes can end there.

            |------- prompt -------|------ output ------|
                             ^ whole pages of it   ^ latest whole pages: the two that a request keeps

        Outputs may take half of all snapshots, so that long answers do not cost others their prompts.
        """
        states, length = self.states, request.computed_len
        if states is None or not self.keeps_states or length % self.page_size:
            return
        prompt_end = (request.prompt_len - 1) // self.page_size * self.page_size
        if request.snapshots and request.snapshots[-1][0] != prompt_end:
            states.forget(request.snapshots.pop()[1])
        if length > request.prompt_len:
            if 2 * states.num_snapshots < states.max_snapshots:
                states.snapshot(request, slot, length)
        elif not states.is_full or self.tree.evict_state():
            states.snapshot(request, slot, length)

    def store(self, request: Request) -> None:
        """Puts the computed whole pages into the tree, with linear attention as far as there are snapshots;
        the request goes on using them.

        Only committed tokens count: pages of a step in flight may yet turn out to be worthless.
        """
        if self.states is None:
            self._store_pages(request, request.computed_len // self.page_size)
            return
        for length, slot in self.states.take_snapshots(request):
            if not self._store_pages(request, length // self.page_size, slot):
                self.states.forget(slot)

    def _store_pages(self, request: Request, whole: int, state_slot: int = 0) -> bool:
        """Stores the first `whole` pages and the state after them; returns whether the tree keeps the state.

        |-- locked --|-- duplicates of the tree's --|-- new to the tree --|-- last, partial page --|
        0         locked                         already                whole             computed_len
        """
        locked = len(self._prefix_pages(request))
        if not self.prefix_caching or whole <= locked:
            return False
        tokens = request.prefix_keys(whole * self.page_size)
        result = self.tree.insert(tokens, request.pages[:whole], request.cache_namespace, state_slot)
        already = result.already_cached // self.page_size
        self.pool.hand_to_cache(request.pages[already:whole])
        self.pool.free(request.pages[locked:already])
        self.tree.lock(result.handle)
        if request in self._prefixes:
            self.tree.unlock(self._prefixes[request])
        self._prefixes[request] = result.handle
        if already > locked:
            self._set_pages(request, [*result.handle.pages, *request.pages[whole:]])
        return result.takes_state

    def _set_pages(self, request: Request, pages: list[int]) -> None:
        """Replaces entries rather than appending: holders of a copy of the old ones see it by the epoch."""
        request.pages = pages
        request.pages_epoch = next(self._epochs)

    def exclusive_pages(self, request: Request) -> list[int]:
        """Pages that the request owns and the tree does not know."""
        return request.pages[len(self._prefix_pages(request)) :]

    def _prefix_pages(self, request: Request) -> tuple[int, ...]:
        """Returns the tree's pages that the request begins with and holds locked."""
        handle = self._prefixes.get(request)
        return () if handle is None else handle.pages

    def release(self, request: Request, keep: bool = True) -> None:
        """Takes all pages from a request, its whole computed ones into the tree if `keep`."""
        if keep:
            self.store(request)
        if self.states is not None:
            self.states.leave(request)
        self.pool.free(self.exclusive_pages(request))
        handle = self._prefixes.pop(request, None)
        if handle is not None:
            if keep and request.keep_prefix_s:
                self.tree.keep(handle, request.keep_prefix_s)
            self.tree.unlock(handle)
        self._set_pages(request, [])
        request.computed_len = request.scheduled_len = 0

    def flush(self) -> int:
        """Drops every prefix that no request holds, in all tiers; returns the pages freed."""
        tree = self.tree
        (tiers, events), tree.tiers = (tree.tiers, tree.events), None
        pages = tree.evict(tree.num_pages)
        tree.tiers = tiers
        if events is not None and not tree.num_pages:
            events.cleared()
        self.pool.free(pages)
        if self.tiers is not None:
            self.tiers.drop()
        return len(pages)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raises AssertionError unless every page is free, cached or owned by one of `requests`, once."""
        requests = list(requests)
        self.tree.check_integrity()
        assert self._prefixes.keys() <= set(requests), "a request that left holds a prefix"
        tiers = self.tiers
        if self.states is not None:
            kept = [node.state_slot for node in self.tree.nodes() if node.state_slot]
            if tiers is not None:
                kept += tiers.arriving_states
            self.states.check_integrity(requests, kept, [] if tiers is None else tiers.copied_states)
        owned = [] if tiers is None else list(tiers.arriving_pages)
        for request in requests:
            locked = self._prefix_pages(request)
            assert tuple(request.pages[: len(locked)]) == locked, f"{request.key} lost its prefix pages"
            owned.extend(request.pages[len(locked) :])
        self.pool.check_integrity(owned, (page for node in self.tree.nodes() for page in node.pages))


def make_request_cache(
    gpu: GpuConfig, states: StateSlots | None, num_pages: int, absent: Iterable[int] = ()
) -> RequestCache:
    """Accounts for pages, prefixes and, where there are some, states; `absent` as in `PagePool`."""
    pool = PagePool(num_pages, absent)
    held = None if states is None else RequestStates(StatePool(states.num_slots), num_snapshots(gpu))
    tree = RadixCache(gpu.page_size, None if held is None else held.forget, most_kept_pages=num_pages // 2)
    return RequestCache(pool, tree, gpu.prefix_caching, held)
