"""What the tiers below the tree have of a request's prefix, and what fetching it would take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from gpu_service.cache.radix_cache import PrefixHandle
from gpu_service.cache.request_cache import RequestCache
from gpu_service.cache.tiers.digests import is_state, page_digests, root_digest, state_key
from gpu_service.cache.tiers.disk_tier import DiskTier
from gpu_service.cache.tiers.mover import Mover
from gpu_service.cache.tiers.payloads import Payloads
from gpu_service.cache.tiers.ram_tier import RamTier
from gpu_service.cache.tiers.rank_disk import blocks_on_disk, is_on_disk
from gpu_service.core.request import Request


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the tiers below have of a request's prefix."""

    tokens: list[int]
    handle: PrefixHandle
    # Of the pages that the tree lacks, and of the state after them.
    keys: list[bytes]
    parents: list[bytes]
    saved_tokens: int  # That the request need not compute.


class Below:
    """Part of `PrefixTiers`; used by the engine's thread."""

    def __init__(
        self,
        cache: RequestCache,
        identity: bytes,
        ram: RamTier | None,
        disk: DiskTier | None,
        is_of_ranks: bool,
    ) -> None:
        """`is_of_ranks`: what is on disk, requests say, as rank 0 found it."""
        self._cache, self._identity, self._ram, self._disk = cache, identity, ram, disk
        self._is_of_ranks = is_of_ranks
        # Names of pages of requests that wait.
        self._names: WeakKeyDictionary[Request, tuple[int, list[bytes]]] = WeakKeyDictionary()

    def note_disk(self, requests: Sequence[Request]) -> None:
        """Lets outputs of one prompt say what this rank's disk has of it."""
        if self._disk is None:
            return
        first, ram = requests[0], self._ram
        names = self._names_of(first, first.prefix_keys(first.total_len - 1))
        found = blocks_on_disk(self._disk, names, lambda name: ram is not None and name in ram)
        for request in requests:
            request.blocks_on_disk = found

    def find(self, request: Request) -> Prefix | None:
        """None: the tree has as much of the request's prefix as all tiers together."""
        cache = self._cache
        usable = cache.probe(request)
        if usable is None:
            return None
        tokens = request.prefix_keys(request.total_len - 1)
        names = self._names_of(request, tokens)
        handle = cache.tree.match_pages(tokens, request.cache_namespace)
        have = end = len(handle.pages)
        while end < len(names) and self._has(request, names[end], end):
            end += 1
        if cache.states is not None:
            while end > len(usable.pages) and not self._has(request, state_key(names[end - 1]), end - 1):
                end -= 1
        if end <= len(usable.pages):
            return None
        root = root_digest(self._identity, request.cache_namespace)
        keys, parents = names[have:end], [root, *names][have:end]
        if cache.states is not None:
            keys, parents = [*keys, state_key(names[end - 1])], [*parents, names[end - 1]]
        tokens = tokens[: end * cache.page_size]
        return Prefix(tokens, handle, keys, parents, len(tokens) - usable.num_tokens)

    def _names_of(self, request: Request, tokens: Sequence[int]) -> list[bytes]:
        """Returns the names of all whole pages of a request; kept while it waits."""
        length, names = self._names.get(request, (0, []))
        if length != len(tokens):
            root = root_digest(self._identity, request.cache_namespace)
            names = page_digests(root, np.asarray(tokens, np.int64), self._cache.page_size)
            self._names[request] = (len(tokens), names)
        return names

    def _has(self, request: Request, key: bytes, page: int) -> bool:
        if self._ram is not None and key in self._ram:
            return True
        if self._is_of_ranks:
            return is_on_disk(request.blocks_on_disk, page, is_state(key))
        return self._disk is not None and self._disk.record(key) is not None

    def seconds(self, prefix: Prefix, payloads: Payloads, mover: Mover) -> float:
        """Returns what fetching a prefix would take, as far as speeds are known."""
        seconds = 0.0
        for key in prefix.keys:
            is_in_ram = self._ram is not None and key in self._ram
            speed = (mover.ram_speed if is_in_ram else mover.disk_speed).now
            nbytes = payloads.state_bytes if is_state(key) else payloads.page_bytes
            seconds += nbytes / speed if speed else 0.0
        return seconds
