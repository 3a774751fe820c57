"""A tree of cached prefixes: token runs whose KV is in pages that outlive their request.

Knows tokens and page numbers; knows nothing of requests, the page pool or the device. All lengths are
multiples of the page size. "Time" is a counter of operations, so that equal histories give equal trees.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

# Token ids, and 63-bit keys of images in the place of theirs.
TokenArray = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens and their pages; children are keyed by the bytes of their first page of tokens."""

    tokens: TokenArray
    pages: list[int]
    parent: Node | None
    serial: int
    children: dict[bytes, Node] = field(default_factory=dict)
    # Running requests whose prefix ends in or below this node. A locked node's ancestors are locked.
    locks: int = 0
    last_access: int = 0
    # Until then it is given up after all that is not kept, seconds of `RadixCache.advance`.
    keep_until_s: float = 0.0
    # Where the state of linear attention after the node's last token is kept; 0: nowhere.
    state_slot: int = 0
    # Names of the pages, where there are tiers below.
    digests: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class PrefixHandle:
    """An immutable claim on a matched prefix; valid while locked (a later split keeps it valid)."""

    node: Node
    num_tokens: int
    pages: tuple[int, ...]
    # Where the state after the prefix is kept, until the next `evict` or `evict_state`; 0: there is none.
    state_slot: int = 0


@dataclass(frozen=True, slots=True)
class InsertResult:
    """What `insert` found: tokens that were in the tree before, and the handle on the whole run."""

    already_cached: int
    handle: PrefixHandle
    takes_state: bool = False  # Whether the tree keeps the state that came with the run.


class LowerTiers(Protocol):
    """What keeps pages and states that the tree gives up; `cache.tiers.prefix_tiers` is the real one."""

    def digests(self, namespace: str, parent: Node, tokens: TokenArray) -> list[bytes]:
        """Returns the names of the whole pages of `tokens`, which follow a node."""

    def kept(self, node: Node) -> None:
        """The tree has a new node, or a state at the end of one."""

    def keeping(self, node: Node) -> None:
        """The prefix that ends with a node is kept until the node's `keep_until_s`."""

    def evicting(self, node: Node) -> None:
        """A node is about to go, with its pages."""

    def evicting_state(self, node: Node) -> None:
        """A node's state is about to go."""


class TreeEvents(Protocol):
    """What follows the pages of a tree; `cache.prefix_events` is the real one."""

    def digests(self, namespace: str, parent: Node, tokens: TokenArray) -> list[bytes]:
        """Returns the names of whole pages where there are no tiers to name them."""

    def stored(self, namespace: str, node: Node) -> None:
        """The tree has a new node."""

    def removed(self, node: Node) -> None:
        """The tree has given a node up."""

    def cleared(self) -> None:
        """The tree is empty."""

    def close(self) -> None:
        """Nothing comes any more."""


class RadixCache:
    """Page-aligned prefix tree with one root per namespace, lock counts and LRU eviction of leaves.

    For models with linear attention, a prefix is only as good as the state after it: nodes may have one at
    their end, and a match ends at the deepest node that does. States go with their node, or before it.
    """

    def __init__(
        self, page_size: int, drop_state: Callable[[int], None] | None = None, most_kept_pages: int = 0
    ) -> None:
        """Makes an empty tree.

        `drop_state` gets each slot that the tree no longer keeps; None: prefixes need no states.
        `most_kept_pages`: while `keep` holds for more, it counts for nothing.
        """
        self.page_size = page_size
        self._most_kept_pages = most_kept_pages
        self._now_s = self._last_kept_s = 0.0
        self._kept_pages: int | None = None  # None: to be counted again. Steps ask for it.
        self._drop_state = drop_state
        self.tiers: LowerTiers | None = None  # None: what is evicted is gone.
        self.events: TreeEvents | None = None  # None: nothing follows what the tree has.
        self._roots: dict[str, Node] = {}
        self._clock = 0
        self._serial = 0
        self.num_pages = 0
        # Pages of unlocked nodes; eviction can return all of them.
        self.evictable_pages = 0

    def match(self, tokens: Sequence[int], namespace: str = "") -> PrefixHandle:
        """Returns the longest cached prefix of whole pages (that ends in a state, if states are needed).

        May split a node; locks nothing.

        The caller must `lock` the handle before the next `evict`, or drop it.
        """
        handle = self.match_pages(tokens, namespace)
        if self._drop_state is None:
            return handle
        node, pages = handle.node, list(handle.pages)
        while node.parent is not None and node.state_slot == 0:
            del pages[len(pages) - len(node.pages) :]
            node = node.parent
        return PrefixHandle(node, len(pages) * self.page_size, tuple(pages), node.state_slot)

    def match_pages(self, tokens: Sequence[int], namespace: str = "") -> PrefixHandle:
        """The longest cached prefix of whole pages, whether it ends in a state or not; else as `match`."""
        node, pages = self._walk(np.asarray(tokens, dtype=np.int64), self._root(namespace))
        return PrefixHandle(node, len(pages) * self.page_size, tuple(pages), node.state_slot)

    def insert(
        self, tokens: Sequence[int], pages: Sequence[int], namespace: str = "", state_slot: int = 0
    ) -> InsertResult:
        """Adds a run of whole pages; the tree takes over the pages it did not have.

            tokens   |---- already in the tree ----|------- new -------|
            pages    |  duplicates: caller frees   |  now the tree's   |
                     0                       already_cached       len(tokens)

        `state_slot`: where the state after the run is; the tree keeps it unless it has one.
        Raises ValueError unless len(tokens) == len(pages) * page_size.
        """
        if len(tokens) != len(pages) * self.page_size:
            raise ValueError(f"{len(tokens)} tokens do not fill {len(pages)} pages of {self.page_size}")
        array, root = np.asarray(tokens, dtype=np.int64), self._root(namespace)
        node, found = self._walk(array, root)
        already = len(found) * self.page_size
        if already < len(array):
            self._roots[namespace] = root
            new, parent = array[already:].copy(), node
            node = self._add_child(parent, new, list(pages[len(found) :]))
            if (namer := self.tiers or self.events) is not None:
                node.digests = namer.digests(namespace, parent, new)
            if self.events is not None:
                self.events.stored(namespace, node)
            found = [*found, *node.pages]
        takes_state = state_slot != 0 and node.state_slot == 0
        if takes_state:
            node.state_slot = state_slot
        if self.tiers is not None and (takes_state or already < len(array)):
            self.tiers.kept(node)
        handle = PrefixHandle(node, len(array), tuple(found), node.state_slot)
        return InsertResult(already, handle, takes_state)

    def lock(self, handle: PrefixHandle) -> None:
        """Protects the prefix from eviction; calls nest, each needs one `unlock`."""
        self._kept_pages = None
        for node in _ancestry(handle.node):
            if node.locks == 0:
                self.evictable_pages -= len(node.pages)
            node.locks += 1

    def unlock(self, handle: PrefixHandle) -> None:
        """Ends one `lock`. Raises ValueError when there was none."""
        self._kept_pages = None
        for node in _ancestry(handle.node):
            if node.locks <= 0:
                raise ValueError("unlock of a prefix that is not locked")
            node.locks -= 1
            if node.locks == 0:
                self.evictable_pages += len(node.pages)

    def unlocked_pages(self, handle: PrefixHandle) -> int:
        """Returns how many pages of the prefix are unlocked, which locking takes from `evictable_pages`."""
        return sum(len(node.pages) for node in _ancestry(handle.node) if node.locks == 0)

    def advance(self, now_s: float) -> None:
        """Sets what `keep` counts from, unless it is later already; equal on all ranks, so no clock."""
        self._now_s, self._kept_pages = max(self._now_s, now_s), None

    @property
    def now_s(self) -> float:
        """What was set by `advance` last, seconds."""
        return self._now_s

    def keep(self, handle: PrefixHandle, seconds: float) -> None:
        """From now on `evict` gives up the prefix after those that are not kept, for a time."""
        self.keep_until(handle, self._now_s + seconds)

    def keep_until(self, handle: PrefixHandle, until_s: float) -> None:
        """Keeps the prefix as `keep` does, until a time of `advance`."""
        self._last_kept_s, self._kept_pages = max(self._last_kept_s, until_s), None
        for node in _ancestry(handle.node):
            node.keep_until_s = max(node.keep_until_s, until_s)
        if self.tiers is not None:
            self.tiers.keeping(handle.node)

    @property
    def kept_pages(self) -> int:
        """Pages that are kept and unlocked."""
        if self._last_kept_s <= self._now_s:
            return 0
        if self._kept_pages is None:
            kept = (n for n in self.nodes() if n.locks == 0 and n.keep_until_s > self._now_s)
            self._kept_pages = sum(len(node.pages) for node in kept)
        return self._kept_pages

    @property
    def time(self) -> int:
        """The number of operations so far, which `last_access` of nodes is in."""
        return self._clock

    def evictable_since(self, time: int) -> int:
        """Returns the number of pages of unlocked nodes that were used after a `time`."""
        return sum(len(node.pages) for node in self.nodes() if node.locks == 0 and node.last_access > time)

    def evict(self, num_pages: int, until: int | None = None) -> list[int]:
        """Drops least recently used unlocked leaves, those that are kept last, until `num_pages` are freed
        or none is left.

        `until`: a `time`; what was used later or is kept stays. Whole nodes go, so a little more than asked
        may come back. The caller frees the pages.
        """
        kept_from_s = self._kept_from_s()
        heap = [
            (n.keep_until_s > kept_from_s, n.last_access, n.serial, n)
            for n in self.nodes()
            if not n.children and n.locks == 0
        ]
        heapq.heapify(heap)
        freed: list[int] = []
        while heap and len(freed) < num_pages and (until is None or heap[0][:2] <= (False, until)):
            node = heapq.heappop(heap)[-1]
            if self.tiers is not None:
                self.tiers.evicting(node)
            freed.extend(node.pages)
            parent = self._remove(node)
            if parent.parent is not None and not parent.children and parent.locks == 0:
                is_kept = parent.keep_until_s > kept_from_s
                heapq.heappush(heap, (is_kept, parent.last_access, parent.serial, parent))
        for namespace in [name for name, root in self._roots.items() if not root.children]:
            del self._roots[namespace]
        return freed

    def _kept_from_s(self) -> float:
        """Returns the time until which a node has to be kept at least; infinite if that is too many."""
        return self._now_s if self.kept_pages <= self._most_kept_pages else math.inf

    def evict_state(self) -> bool:
        """Gives up the least recently used state, one of a prefix that is kept last, also of a locked node;
        False: there is none.

        A locked node's pages stay, and so does whatever a request has read of its state.
        """
        nodes = [node for node in self.nodes() if node.state_slot]
        if not nodes:
            return False
        kept_from_s = self._kept_from_s()
        oldest = min(nodes, key=lambda n: (n.keep_until_s > kept_from_s, n.last_access, n.serial))
        if self.tiers is not None:
            self.tiers.evicting_state(oldest)
        self._forget_state(oldest)
        return True

    def _forget_state(self, node: Node) -> None:
        if node.state_slot:
            assert self._drop_state is not None
            self._drop_state(node.state_slot)
            node.state_slot = 0

    def nodes(self) -> Iterator[Node]:
        """Yields every node but the roots, parents first."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_integrity(self) -> None:
        """Raises AssertionError when counters, keys, locks or alignment contradict one another."""
        pages = evictable = 0
        for node in self.nodes():
            assert node.parent is not None
            assert len(node.pages) > 0, "empty node"
            assert len(node.tokens) == len(node.pages) * self.page_size, "node is not page-aligned"
            assert node.parent.children[self._key(node.tokens)] is node, "child key differs from its tokens"
            assert node.locks >= sum(child.locks for child in node.children.values()), "locks do not nest"
            pages += len(node.pages)
            evictable += len(node.pages) if node.locks == 0 else 0
        assert (pages, evictable) == (self.num_pages, self.evictable_pages), "page counters drifted"
        kept, self._kept_pages = self.kept_pages, None
        assert kept == self.kept_pages, "kept pages drifted"
        assert all(root.children for root in self._roots.values()), "a namespace without pages is kept"

    def _root(self, namespace: str) -> Node:
        """A new one is not kept before it has a page: clients choose namespaces, as many as they like."""
        return self._roots.get(namespace) or Node(np.empty(0, np.int64), [], None, -1)

    def _key(self, tokens: TokenArray) -> bytes:
        return tokens[: self.page_size].tobytes()

    def _walk(self, tokens: TokenArray, node: Node) -> tuple[Node, list[int]]:
        """Descends as far as whole pages agree; splits the last node when it agrees only in part."""
        self._clock += 1
        position, pages = 0, list[int]()
        while len(tokens) - position >= self.page_size:
            child = node.children.get(self._key(tokens[position:]))
            if child is None:
                break
            common = self._common_pages(child.tokens, tokens[position:])
            node = child if common == len(child.pages) else self._split(child, common)
            node.last_access = self._clock
            pages.extend(node.pages)
            position += common * self.page_size
            if node is not child:
                break
        return node, pages

    def _common_pages(self, left: TokenArray, right: TokenArray) -> int:
        length = min(len(left), len(right))
        different = np.flatnonzero(left[:length] != right[:length])
        common = int(different[0]) if different.size else length
        return common // self.page_size

    def _split(self, node: Node, num_pages: int) -> Node:
        """Puts the first pages of `node` into a new parent.

            before  parent ── node [a b c d]
            after   parent ── upper [a b] ── node [c d]

        `node` keeps its identity as the lower part, so handles that end in it stay right; the upper part
        inherits the locks because each of them also covers it.
        """
        cut = num_pages * self.page_size
        parent = node.parent
        assert parent is not None
        upper = self._new_node(node.tokens[:cut].copy(), node.pages[:num_pages], parent)
        upper.locks, upper.last_access, upper.keep_until_s = node.locks, node.last_access, node.keep_until_s
        parent.children[self._key(upper.tokens)] = upper
        upper.digests, node.digests = node.digests[:num_pages], node.digests[num_pages:]
        node.tokens, node.pages, node.parent = node.tokens[cut:].copy(), node.pages[num_pages:], upper
        upper.children[self._key(node.tokens)] = node
        if self.tiers is not None:
            self.tiers.kept(upper)
        return upper

    def _add_child(self, parent: Node, tokens: TokenArray, pages: list[int]) -> Node:
        node = self._new_node(tokens, pages, parent)
        node.last_access = self._clock
        parent.children[self._key(tokens)] = node
        self.num_pages += len(pages)
        self.evictable_pages += len(pages)
        return node

    def _new_node(self, tokens: TokenArray, pages: list[int], parent: Node) -> Node:
        self._serial += 1
        return Node(tokens, pages, parent, self._serial)

    def _remove(self, node: Node) -> Node:
        parent = node.parent
        assert parent is not None
        del parent.children[self._key(node.tokens)]
        self._forget_state(node)
        if self.events is not None:
            self.events.removed(node)
        self._kept_pages = None
        self.num_pages -= len(node.pages)
        self.evictable_pages -= len(node.pages)
        return parent


def _ancestry(node: Node) -> Iterator[Node]:
    """Yields the node and its parents, without the root."""
    current: Node | None = node
    while current is not None and current.parent is not None:
        yield current
        current = current.parent
