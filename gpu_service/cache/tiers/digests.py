"""Names of cached blocks below the device: a page by all tokens up to its end, a state by the page before it.

A name is a chain of hashes: BLAKE2b of the name of the page before it and of the page's own tokens. Equal
names mean equal prefixes, whichever process computed them, so tiers need no tree of their own. The chain
begins with the identity of what computed the values and with the namespace of the request, so that other
weights, and other values of `cache_salt`, never share a block. 32 bytes resist collisions.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

DIGEST_BYTES = 32
# What identities of one engine's ranks have in common.
ENGINE_BYTES = 16
# What follows the digest of a page in the key of the state after it.
_STATE = b"s"


def identity_digest(text: str) -> bytes:
    """32 bytes for everything that decides the values and the form of a block, given as text."""
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES, person=b"moebius-kv").digest()


def rank_identity(engine: str, rank: str) -> bytes:
    """Returns the identity of a rank's parts of blocks: `engine` decides its first half, both the rest."""
    return identity_digest(engine)[:ENGINE_BYTES] + identity_digest(f"{engine}\n{rank}")[ENGINE_BYTES:]


def root_digest(identity: bytes, namespace: str) -> bytes:
    """Returns where the chain of a namespace begins."""
    return hashlib.blake2b(identity + namespace.encode(), digest_size=DIGEST_BYTES, person=b"root").digest()


def page_digests(parent: bytes, tokens: npt.NDArray[np.int64], page_size: int) -> list[bytes]:
    """Returns the names of the whole pages of `tokens`, int64 `[n]`, which follow the page named `parent`."""
    digests, data, width = [], tokens.tobytes(), page_size * tokens.itemsize
    for begin in range(0, len(data) - width + 1, width):
        parent = hashlib.blake2b(parent + data[begin : begin + width], digest_size=DIGEST_BYTES).digest()
        digests.append(parent)
    return digests


def state_key(digest: bytes) -> bytes:
    """Returns the key of the state after a page; a page's key is its digest."""
    return digest + _STATE


def is_state(key: bytes) -> bool:
    """Returns whether a key is a state's."""
    return len(key) > DIGEST_BYTES
