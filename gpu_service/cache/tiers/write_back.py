"""Copies what the prefix tree holds to the tiers below, before it is given up.

Nodes of the tree queue in the order of their making and are copied in pieces, one at a time; a node is
locked, and a state held, only while a piece of it is copied. What is given up earlier is copied to RAM on the
spot.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import structlog

from gpu_service.cache.radix_cache import Node, PrefixHandle
from gpu_service.cache.request_cache import RequestCache
from gpu_service.cache.tiers.digests import state_key
from gpu_service.cache.tiers.disk_tier import DiskTier
from gpu_service.cache.tiers.keeping import Keeping
from gpu_service.cache.tiers.mover import Mover, StoreItem, scatter
from gpu_service.cache.tiers.payloads import Payloads
from gpu_service.cache.tiers.ram_tier import RamTier

_log = structlog.get_logger(__name__)
# A piece is at most so large, and at most this part of all pages, since it is locked meanwhile. On a GPU each
# piece takes some ms of launches whatever its size, by which the rest after it is measured, too: of 8 MiB
# that was 1 GB/s, and prompts that came soon had to copy on the spot what they took the place of.
_PIECE_BYTES, _PIECE_PART = 64 * 2**20, 16


@dataclass(frozen=True, slots=True)
class _Piece:
    """What is being copied; filled by `WriteBack`."""

    items: list[StoreItem]
    handle: PrefixHandle  # locked
    reserved: list[bytes]
    generation: int
    future: Future[None]


class WriteBack:
    """Part of `PrefixTiers`; used by the engine's thread."""

    def __init__(
        self,
        cache: RequestCache,
        mover: Mover,
        payloads: Payloads,
        ram: RamTier | None,
        disk: DiskTier | None,
        keeping: Keeping,
    ) -> None:
        self._cache, self._mover, self._payloads = cache, mover, payloads
        self._ram, self._disk, self._keeping = ram, disk, keeping
        most = cache.pool.num_pages // _PIECE_PART * payloads.page_bytes
        self._piece_bytes = max(payloads.page_bytes, min(_PIECE_BYTES, most))
        # In order: nodes that may have something to copy, and the RAM tier's clock when they came.
        self._pending: dict[Node, int] = {}
        self._piece: _Piece | None = None
        self.held_states: list[int] = []
        self.ram_bytes = 0

    @property
    def is_storing(self) -> bool:
        """Whether a piece is locked now."""
        return self._piece is not None

    @property
    def is_done(self) -> bool:
        """Whether everything that the tree held has been copied, as far as there was room."""
        return not self._pending and self._piece is None

    def add(self, node: Node) -> None:
        """The tree has a node, or the state at its end."""
        self._pending[node] = 0 if self._ram is None else self._ram.clock + 1

    def drop(self) -> None:
        """What waits is not copied."""
        self._pending.clear()

    def poll(self, generation: int) -> bool:
        """Takes in a piece that has been copied, and begins another one; whether one was copied."""
        has_ended = self._piece is not None and self._piece.future.done()
        if has_ended:
            self.finish(generation)
        while self._piece is None and self._pending and self._mover.may_store:
            self._begin(next(iter(self._pending)), generation)
        return has_ended

    def finish(self, generation: int) -> None:
        """The piece has been copied, or never will be."""
        piece, self._piece = self._piece, None
        if piece is None:
            return
        failed = piece.future.cancelled() or piece.future.exception() is not None
        if failed and not piece.future.cancelled():
            _log.error("copying KV blocks down failed", exc_info=piece.future.exception())
        for key in reversed(piece.reserved):
            assert self._ram is not None
            if failed or piece.generation != generation:
                self._ram.abandon(key)
            else:
                self._ram.complete(key)
                self._keeping.stored(piece.handle.node, [key])
        self._cache.tree.unlock(piece.handle)
        for slot in self.held_states:
            assert self._cache.states is not None
            self._cache.states.pool.drop(slot)
        self.held_states.clear()

    def rescue(self, node: Node) -> None:
        """The node is about to go: what RAM lacks of it is copied there now."""
        self._pending.pop(node, None)
        ram = self._ram
        if ram is None:
            return
        before, missing = ram.clock + 1, list[int]()
        for index, key in enumerate(node.digests):
            if key not in ram and ram.reserve(key, _parent(node, index), self._cache.page_size, before):
                missing.append(index)
        views = [ram.views(node.digests[index])[0] for index in missing]
        self._payloads.read_pages([node.pages[index] for index in missing], views)
        for index in missing:
            ram.complete(node.digests[index])
        self._keeping.stored(node, [node.digests[index] for index in missing])
        self.ram_bytes += sum(len(view) for view in views)
        if node.state_slot:
            self.rescue_state(node)

    def rescue_state(self, node: Node) -> None:
        """The node's state is about to go."""
        ram, key = self._ram, state_key(node.digests[-1])
        if ram is None or not ram.reserve(key, node.digests[-1], len(node.tokens), ram.clock + 1):
            return
        payload = self._payloads.scratch(self._payloads.state_bytes)
        self._payloads.read_state(node.state_slot, payload)
        scatter(payload, ram.views(key))
        ram.complete(key)
        self._keeping.stored(node, [key])
        self.ram_bytes += len(payload)

    def _begin(self, node: Node, generation: int) -> None:
        """Copies the next piece of a node; takes it from the queue once nothing is left of it."""
        before = self._pending[node]
        items, reserved, nbytes = list[StoreItem](), list[bytes](), 0
        for index, key in enumerate(node.digests):
            place, parent = node.pages[index], _parent(node, index)
            item = self._item(key, parent, self._cache.page_size, place, before, reserved)
            if item is not None:
                items.append(item)
                nbytes += self._payloads.page_bytes
            if nbytes >= self._piece_bytes:
                break
        else:
            del self._pending[node]
            if node.state_slot:
                digest = node.digests[-1]
                sizes = len(node.tokens), node.state_slot, before
                item = self._item(state_key(digest), digest, *sizes, reserved)
                if item is not None:
                    assert self._cache.states is not None
                    self._cache.states.pool.hold(node.state_slot)
                    self.held_states.append(node.state_slot)
                    items.append(item)
        if not items:
            self._pending.pop(node, None)
            return
        handle = PrefixHandle(node, 0, ())
        self._cache.tree.lock(handle)
        self.ram_bytes += sum(len(view) for item in items for view in item.views)
        self._piece = _Piece(items, handle, reserved, generation, self._mover.store(items))

    def _item(
        self, key: bytes, parent: bytes, tokens: int, place: int, before: int, reserved: list[bytes]
    ) -> StoreItem | None:
        """None: every tier has the block, or has no room for it."""
        ram, disk = self._ram, self._disk
        to_disk = disk is not None and disk.accepts and disk.record(key) is None
        views = []
        if ram is not None and key not in ram and ram.reserve(key, parent, tokens, before):
            reserved.append(key)
            views = ram.views(key)
        return StoreItem(key, parent, tokens, place, views, to_disk) if views or to_disk else None


def _parent(node: Node, index: int) -> bytes:
    """Returns the name of the page before a node's page."""
    if index:
        return node.digests[index - 1]
    assert node.parent is not None
    return node.parent.digests[-1]
