"""Drafts from the request's own text: what followed the last time that the same few tokens were there.

Also known as prompt lookup. Good where outputs repeat what is known: code that is edited, quotes, tables,
tool calls, an agent's files. It costs the device nothing until a draft is verified.
"""

from __future__ import annotations

from array import array
from weakref import WeakKeyDictionary

from gpu_service.core.request import Request

# Earlier places that are looked at, the latest first.
_MOST_PLACES = 16
# Of a longer text the end alone is indexed: about 100 bytes a token.
_MOST_INDEXED = 1 << 17
_NO_PLACE = -1


class NGramIndex:
    """Where each n-gram of a growing text has been; adding to it and asking it take no time with its length.

    A place is the number of tokens up to an n-gram's end.
    """

    def __init__(self, size: int) -> None:
        """`size`: tokens of an n-gram."""
        self.tokens: list[int] = []
        self._size = size
        # The latest place of each n-gram, by its hash; and of each place the one before it.
        self._latest: dict[int, int] = {}
        self._before = array("q", [_NO_PLACE])

    def extend(self, token_ids: list[int]) -> None:
        """Appends to the text."""
        size, begin = self._size, len(self.tokens)
        self.tokens += token_ids
        end, latest, before = len(self.tokens), self._latest, self._before
        first = max(begin + 1, size, end - _MOST_INDEXED)
        before.extend([_NO_PLACE] * (first - len(before)))
        window = self.tokens[first - size :]
        for place, gram in enumerate(zip(*(window[i:] for i in range(size)), strict=False), first):
            key = hash(gram)
            before.append(latest.get(key, _NO_PLACE))
            latest[key] = place

    def continuation(self, count: int, longest: int) -> list[int]:
        """`count` tokens from the place whose last tokens, at most `longest`, are most like the text's end.

        Of equally good places the latest. A continuation that reaches the text's end goes on with itself, as
        a text of that period would. Empty: the last n-gram is new.
        """
        tokens, end = self.tokens, len(self.tokens)
        place, best, best_length = self._before[end], _NO_PLACE, self._size - 1
        for _ in range(_MOST_PLACES):
            if place == _NO_PLACE:
                break
            length, most = 0, min(longest, place)
            while length < most and tokens[place - 1 - length] == tokens[end - 1 - length]:
                length += 1
            if length > best_length:  # never where two n-grams have one hash
                best, best_length = place, length
            place = self._before[place]
        period = end - best
        return [] if best == _NO_PLACE else [tokens[best + i % period] for i in range(count)]


class NGramDrafter:
    """A `HostDrafter`; keeps an index of each request's text for as long as the request lives."""

    def __init__(self, shortest: int, longest: int) -> None:
        """Tokens that must, and that can, be equal before a continuation counts as one."""
        self._shortest, self._longest = shortest, longest
        self._indexes: WeakKeyDictionary[Request, NGramIndex] = WeakKeyDictionary()

    def propose(self, request: Request, count: int) -> list[int]:
        """Returns the continuation of the known tokens."""
        index = self._indexes.get(request)
        if index is None:
            index = self._indexes[request] = NGramIndex(self._shortest)
        known = len(index.tokens)
        if known < request.total_len:
            index.extend(request.known_tokens(known, request.total_len))
        return index.continuation(count, self._longest)
