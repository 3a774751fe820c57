"""Which KV pages are free, owned by a request, or held by the prefix tree.

Knows page numbers only: no tokens, no requests, no tensors. Page 0 is the dummy page that padding reads
and writes; it is never handed out.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence


class PageState(enum.IntEnum):
    """Every page but 0 is in exactly one of these sets."""

    FREE = 0
    OWNED = 1
    CACHED = 2


class OutOfPages(RuntimeError):
    """More pages were asked for than are free; the caller must evict or preempt first."""


class PagePool:
    """The free list and each page's state. The last page freed is the first handed out again."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages must be at least 2 (page 0 is the dummy page), got {num_pages}")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._state = bytearray(num_pages)

    @property
    def usable(self) -> int:
        """Pages that can ever be handed out."""
        return self.num_pages - 1

    @property
    def available(self) -> int:
        """Pages on the free list."""
        return len(self._free)

    def alloc(self, count: int) -> list[int]:
        """Takes `count` free pages; the caller owns them. Raises OutOfPages and takes none if too few."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} free of {self.usable}")
        if count <= 0:
            return []
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        for page in pages:
            self._state[page] = PageState.OWNED
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Returns owned or cached pages. Raises ValueError for the dummy page and for a double free."""
        for page in pages:
            if not 0 < page < self.num_pages or self._state[page] == PageState.FREE:
                raise ValueError(f"page {page} is not in use (pages 1..{self.usable} can be freed once)")
            self._state[page] = PageState.FREE
        self._free.extend(reversed(pages))

    def hand_to_cache(self, pages: Sequence[int]) -> None:
        """Moves owned pages to the prefix tree. Raises ValueError when a page is not owned."""
        for page in pages:
            if self._state[page] != PageState.OWNED:
                raise ValueError(f"page {page} is {PageState(self._state[page]).name}, expected OWNED")
            self._state[page] = PageState.CACHED

    def check_integrity(self, owned: Iterable[int], cached: Iterable[int]) -> None:
        """Raises AssertionError unless free + owned + cached is every page once, as the callers see it."""
        expected = bytearray(self.num_pages)
        seen = [0, *self._free]
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
