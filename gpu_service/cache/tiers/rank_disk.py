"""The disk below several ranks, each of which writes and reads its own part of every block.

    rank 0     a request comes; what its disk has of the prompt goes to all ranks with the request
    each rank  begins to read its part at the same step, in a thread, and reports how much of it came
    rank 0     announces the smallest number as an operation: all ranks take in as much at the same step

So what the disks hold may differ, as each has errors, a speed and a budget of its own. Nothing is locked to
be written, since locks decide what the tree gives up: blocks are copied to memory of the host when the tree
gets them, as far as there is room for copies, and are written from there in the background.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from gpu_service.cache.radix_cache import Node
from gpu_service.cache.tiers.digests import state_key
from gpu_service.cache.tiers.disk_tier import DiskTier
from gpu_service.cache.tiers.mover import Mover, StagedBlock
from gpu_service.cache.tiers.payloads import Bytes, Payloads

# Copies that wait to be written, bytes; one block may always wait.
_STAGED_BYTES = 64 * 2**20
# What `blocks_on_disk` says of a page.
_PAGE, _STATE = 1, 2


def blocks_on_disk(disk: DiskTier, names: Sequence[bytes], is_in_ram: Callable[[bytes], bool]) -> bytes:
    """Returns a byte for each page of a prompt, by its names: 1 its page is on disk, 2 the state after it.

    Ends before the first page that neither disk nor RAM has; empty where nothing is on disk.
    """
    found = bytearray()
    for name in names:
        has_page = disk.record(name) is not None
        if not has_page and not is_in_ram(name):
            break
        has_state = disk.record(state_key(name)) is not None
        found.append(_PAGE * has_page | _STATE * has_state)
    return bytes(found) if any(found) else b""


def is_on_disk(blocks: bytes, page: int, is_state: bool) -> bool:
    """Returns what `blocks_on_disk` says of a page, or of the state after it."""
    return page < len(blocks) and bool(blocks[page] & (_STATE if is_state else _PAGE))


class DiskStaging:
    """What this rank's disk still has to get of the tree. Used by the engine's thread."""

    def __init__(
        self, page_size: int, mover: Mover, payloads: Payloads, disk: DiskTier, wake: Callable[[], None]
    ) -> None:
        """`page_size`: tokens. `wake`: called by a thread when `poll` may have room for what had none."""
        self._page_size, self._mover, self._payloads, self._disk = page_size, mover, payloads, disk
        self._wake = wake
        # In order: nodes that may have something to copy.
        self._pending: dict[Node, None] = {}
        self._written: list[tuple[Future[None], int]] = []
        self._staged: set[bytes] = set()

    @property
    def is_done(self) -> bool:
        """Whether the disk has everything that it takes. Any thread may ask."""
        return not self._pending and all(future.done() for future, _ in list(self._written))

    def add(self, node: Node) -> None:
        """The tree has a node, or the state at its end."""
        self._pending[node] = None
        self.poll()

    def going(self, node: Node) -> None:
        """The tree gives a node up: what has no room now is not written."""
        if node in self._pending:
            self._stage(node)
            self._pending.pop(node, None)

    def drop(self) -> None:
        """What waits is not written."""
        self._pending.clear()

    def poll(self) -> None:
        """Copies as much as there is room for."""
        self._written = [(future, nbytes) for future, nbytes in self._written if not future.done()]
        if not self._written:
            self._staged.clear()
        for node in list(self._pending):
            if not self._stage(node):
                return
            del self._pending[node]

    def _stage(self, node: Node) -> bool:
        """Copies a node's blocks and has them written; False: there is no room for all of them."""
        room = _STAGED_BYTES - sum(nbytes for _, nbytes in self._written)
        blocks, has_all = list[StagedBlock](), True
        parents = [_parent_name(node), *node.digests]
        for index, key in enumerate(node.digests):
            if self._lacks(key) and (has_all := self._has_room(room, self._payloads.page_bytes)):
                payload = np.empty(self._payloads.page_bytes, np.uint8)
                self._payloads.read_pages([node.pages[index]], [payload])
                blocks.append(self._block(key, parents[index], self._page_size, payload))
                room -= len(payload)
            if not has_all:
                break
        key = state_key(node.digests[-1])
        if has_all and node.state_slot and self._lacks(key):
            has_all = self._has_room(room, self._payloads.state_bytes)
            if has_all:
                payload = np.empty(self._payloads.state_bytes, np.uint8)
                self._payloads.read_state(node.state_slot, payload)
                blocks.append(self._block(key, node.digests[-1], len(node.tokens), payload))
        if blocks:
            self._staged.update(block.key for block in blocks)
            future = self._mover.append(blocks)
            self._written.append((future, sum(len(block.payload) for block in blocks)))
            future.add_done_callback(lambda _: self._wake() if self._pending else None)
        return has_all

    def _block(self, key: bytes, parent: bytes, tokens: int, payload: Bytes) -> StagedBlock:
        return StagedBlock(key, parent, tokens, payload, self._disk.generation)

    def _lacks(self, key: bytes) -> bool:
        return self._disk.accepts and key not in self._staged and self._disk.record(key) is None

    def _has_room(self, room: int, nbytes: int) -> bool:
        return nbytes <= room or room == _STAGED_BYTES


def _parent_name(node: Node) -> bytes:
    assert node.parent is not None
    return node.parent.digests[-1]
