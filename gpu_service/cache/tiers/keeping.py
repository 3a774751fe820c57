"""How long prefixes are kept, between the tree and the tiers below it: their time travels down and up.

The tree counts seconds of rank 0's monotonic clock, which ends with the machine; the tiers below count
seconds since the epoch, which engines of several starts and hosts share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from gpu_service.cache.radix_cache import Node, PrefixHandle, RadixCache
from gpu_service.cache.tiers.digests import DIGEST_BYTES, state_key
from gpu_service.cache.tiers.disk_tier import DiskTier
from gpu_service.cache.tiers.mover import Mover
from gpu_service.cache.tiers.ram_tier import RamTier


class Keeping:
    """Part of `PrefixTiers`; used by the engine's thread."""

    def __init__(
        self,
        tree: RadixCache,
        ram: RamTier | None,
        disk: DiskTier | None,
        mover: Mover,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        is_of_ranks: bool = False,
    ) -> None:
        """`clock`: what the tree's seconds are of. `wall_clock`: what those of `ram` are of.

        `is_of_ranks`: what this rank's disk says decides nothing, since others may differ, and its seconds
        alone are of the epoch.
        """
        self._is_of_ranks = is_of_ranks
        self._tree, self._ram, self._disk, self._mover = tree, ram, disk, mover
        self._clock, self._wall_clock = clock, wall_clock
        self._noted: Future[None] | None = None

    @property
    def is_done(self) -> bool:
        """Whether the disk knows of all that is kept."""
        return self._noted is None or self._noted.done()

    def kept(self, node: Node) -> None:
        """The tree keeps a prefix, which ends with a node: so do the tiers below."""
        until, nodes = self._until(node), _prefix_nodes(node)
        if until <= self._wall_clock():
            return
        for part in nodes:
            self.stored(part, [*part.digests, state_key(part.digests[-1])])
        if self._disk is not None:
            digests = [digest for part in nodes for digest in part.digests]
            if self._is_of_ranks:
                until += time.time() - self._wall_clock()
            self._noted = self._mover.keep(digests, until)

    def stored(self, node: Node, keys: Iterable[bytes]) -> None:
        """Blocks of a node are in RAM."""
        if self._ram is not None:
            self._ram.keep(keys, self._until(node))

    def filled(self, key: bytes) -> None:
        """A block has come from the disk to RAM."""
        if self._ram is not None and self._disk is not None and not self._is_of_ranks:
            self._ram.keep([key], self._disk.kept_until(key[:DIGEST_BYTES]))

    def came_back(self, tokens: Sequence[int], namespace: str, handle: PrefixHandle) -> None:
        """The tree has a prefix that came from below, and keeps as much of it as was kept there."""
        digests = [digest for node in _prefix_nodes(handle.node) for digest in node.digests]
        now = self._wall_clock()
        for index in range(len(digests) - 1, -1, -1):
            until = self._kept_below(digests[index])
            if until > now:
                kept = self._tree.match_pages(tokens[: (index + 1) * self._tree.page_size], namespace)
                self._tree.keep_until(kept, until - now + self._clock())
                return

    def _kept_below(self, digest: bytes) -> float:
        in_ram = 0.0 if self._ram is None else self._ram.kept_until(digest)
        if self._disk is None or self._is_of_ranks:
            return in_ram
        return max(in_ram, self._disk.kept_until(digest))

    def _until(self, node: Node) -> float:
        """Returns until when a node is kept, seconds since the epoch; the past where it is not."""
        return node.keep_until_s - self._clock() + self._wall_clock()


def _prefix_nodes(node: Node) -> list[Node]:
    """Returns the nodes of a prefix, the first one first, without the root."""
    nodes = []
    while node.parent is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]
