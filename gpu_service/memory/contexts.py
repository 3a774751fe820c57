"""How many tokens of KV cache experts on a GPU leave room for, where no setting says it."""

from __future__ import annotations

import math

# Requests of the longest kind, and the most tokens that such a one is counted with.
ROOM_REQUESTS, ROOM_TOKENS = 4, 8192
# Tokens of one request that a GPU full of experts still has room for, the best first, and which part of the
# memory for experts and cache such a request may take.
LONG_CONTEXTS, _LONG_CONTEXT_PART = (131072, 98304, 65536, 49152), 4


def kept_tokens(longest: int, free_bytes: int, token_bytes: float) -> int:
    """Returns the tokens that are kept: a long context if it is cheap.

    That is one of at most a quarter of `free_bytes`, what experts and cache could have together. `longest`:
    tokens of the longest request; `token_bytes`: of a token in the cache.
    """
    least = ROOM_REQUESTS * min(longest, ROOM_TOKENS)
    most = free_bytes / token_bytes if token_bytes else math.inf
    for tokens in LONG_CONTEXTS:
        if least < tokens <= longest and tokens * _LONG_CONTEXT_PART <= most:
            return tokens
    return least
