"""What the prefix tree has and gives up, as events for routers that choose the engine with a prompt's prefix.

A block is a page. Its number is the beginning of its name, which stands for all tokens up to its end and for
who may share it (`cache.tiers.digests`). Pages with a part of an image, and those after them, are not
published: what stands for an image in the tree is no token.
"""

from __future__ import annotations

from typing import Any

from gpu_service.cache.radix_cache import Node, TokenArray
from gpu_service.cache.tiers.digests import page_digests, root_digest
from gpu_service.telemetry.kv_event_stream import KvEventStream

# vLLM's word for where an engine's own cache is.
_MEDIUM = "GPU"


class PrefixEvents:
    """Follows a tree; used by the engine's thread."""

    def __init__(self, stream: KvEventStream, page_size: int, identity: bytes) -> None:
        """`page_size`: tokens of a page. `identity`: of what computes the values, 32 bytes."""
        self._stream, self._page_size, self._identity = stream, page_size, identity
        self._published: set[bytes] = set()

    def digests(self, namespace: str, parent: Node, tokens: TokenArray) -> list[bytes]:
        """Returns the names of the whole pages of `tokens`, which follow a node."""
        if not parent.digests:
            parent.digests = [root_digest(self._identity, namespace)]
        return page_digests(parent.digests[-1], tokens, self._page_size)

    def stored(self, namespace: str, node: Node) -> None:
        """The tree has a new node."""
        parent = node.parent
        assert parent is not None
        is_first = parent.parent is None
        if not is_first and parent.digests[-1] not in self._published:
            return
        tokens, count = node.tokens.tolist(), len(node.digests)
        while count and min(tokens[: count * self._page_size]) < 0:
            count -= 1
        if not count:
            return
        self._published.update(node.digests[:count])
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": [_number(digest) for digest in node.digests[:count]],
            "parent_block_hash": None if is_first else _number(parent.digests[-1]),
            "token_ids": tokens[: count * self._page_size],
            "block_size": self._page_size,
            "lora_id": None,
            "medium": _MEDIUM,
            "lora_name": None,
        }
        if is_first and namespace:
            # As vLLM has a `cache_salt`: with the first block.
            event["extra_keys"] = [[namespace], *[None] * (count - 1)]
        self._stream.add(event)

    def removed(self, node: Node) -> None:
        """The tree has given a node up."""
        gone = [digest for digest in node.digests if digest in self._published]
        if gone:
            self._published.difference_update(gone)
            hashes = [_number(digest) for digest in gone]
            self._stream.add({"type": "BlockRemoved", "block_hashes": hashes, "medium": _MEDIUM})

    def cleared(self) -> None:
        """The tree is empty."""
        self._published.clear()
        self._stream.add({"type": "AllBlocksCleared"})

    def close(self) -> None:
        """Publishes what waits."""
        self._stream.close()


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")
