"""Estimates which prompts each replica has in its cache, from the prompts that this gateway sent there."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

BLOCK = 64  # tokens
# Blocks of a prompt that are compared: conversations differ earlier, and longer prompts cost no more.
_MAX_BLOCKS = 256
_KEPT_BLOCKS = 2**16  # by replica: 4 million tokens, more than most KV pools hold


def block_digests(token_ids: Sequence[int], salt: str = "") -> list[bytes]:
    """Returns one digest per whole block of the prompt's beginning, each of all tokens up to the block's end.

    Digests are equal in every process. Prompts of different `salt` share no cache, so they share no digest.
    """
    digest = hashlib.blake2b(salt.encode(), digest_size=8)
    digests = []
    for start in range(0, min(len(token_ids) // BLOCK, _MAX_BLOCKS) * BLOCK, BLOCK):
        digest.update(array("I", token_ids[start : start + BLOCK]).tobytes())
        digests.append(digest.copy().digest())
    return digests


class SentPrefixes:
    """The prompts that one replica was sent recently."""

    def __init__(self, most: int = _KEPT_BLOCKS) -> None:
        """`most`: blocks that are kept; the least recently used are dropped first."""
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._most = most

    def match(self, digests: Sequence[bytes]) -> int:
        """Returns the number of the prompt's first blocks that were sent before."""
        # A cached block is of use only together with all blocks before it.
        for number, digest in enumerate(digests):
            if digest not in self._blocks:
                return number
        return len(digests)

    def note(self, digests: Sequence[bytes]) -> None:
        """Notes that the prompt was sent. Its first blocks are dropped last: others are useless alone."""
        for digest in reversed(digests):
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Forgets all prompts: the replica has restarted with an empty cache."""
        self._blocks.clear()


def preferred_replica(digests: Sequence[bytes], names: Sequence[str]) -> str:
    """Returns the replica for a prompt that is cached nowhere: the same in every gateway process without
    communication (rendezvous hashing), and for all prompts with the same beginning."""
    key = digests[0] if digests else b""
    return max(names, key=lambda name: hashlib.blake2b(key + name.encode(), digest_size=8).digest())
