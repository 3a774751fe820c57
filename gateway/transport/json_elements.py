"""The elements of a JSON array that is too long for memory, read while it arrives."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

from gateway.schemas.errors import ApiError, bad_request

_END = re.compile(r"\s*\}\s*\Z")
_SPACES = re.compile(r"[ \t\n\r]*")
_LONGEST_HEAD = 1024  # characters before the first element
_decoder = json.JSONDecoder()


class ElementReader:
    """Reads `{"FIELD": [{…}, {…}, …]}` piece by piece, where FIELD is the only one.

    Elements are found by the standard library's decoder, which is lax: their text has to be checked.
    """

    def __init__(self, name: str, most: int) -> None:
        """`name` of the field; `most` characters of an element."""
        self._name, self._most = name, most
        self._head = re.compile(rf'\s*\{{\s*"{re.escape(name)}"\s*:\s*\[')
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._waiting = ""
        self._has_begun = self._has_ended = False
        self.count = 0  # of elements
        # An element that is incomplete is looked at again once twice as much of it is there.
        self._look_at = 0

    def feed(self, piece: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the text and the value of each element that `piece` completes. Raises ApiError 400, 413."""
        try:
            self._waiting += self._decode(piece)
        except UnicodeDecodeError:
            raise self._wrong("is no UTF-8") from None
        if len(self._waiting) < self._look_at:
            return
        at = self._begin()
        while self._has_begun and not self._has_ended:
            found = self._next(at)
            if found is None:
                break
            at, element = found
            if element is not None:
                yield element
        self._waiting = self._waiting[at:]
        self._look_at = 2 * len(self._waiting) if self._has_begun and not self._has_ended else 0
        if len(self._waiting) > self._most:
            message = f"a request in '{self._name}' is larger than {self._most / 2**20:g} MiB (max_body_mib)"
            raise ApiError(413, message, param=self._name, code="request_too_large")

    def finish(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the elements that `feed` has left. Raises ApiError 400 unless the whole body was there."""
        self._look_at = 0
        yield from self.feed(b"")
        if not self._has_ended or not _END.match(self._waiting):
            raise self._wrong("is not complete, or goes on after the array")

    def _begin(self) -> int:
        """Returns where elements go on in what waits."""
        if self._has_begun:
            return 0
        found = self._head.match(self._waiting)
        if found is None:
            if len(self._waiting) > _LONGEST_HEAD:
                raise self._wrong("has to begin with this array, and to have nothing else")
            return 0
        self._has_begun = True
        return found.end()

    def _next(self, at: int) -> tuple[int, tuple[str, dict[str, Any]] | None] | None:
        """Returns where the next element ends, and its text and value; no element: the array ends there.

        None: it is incomplete.
        """
        begin = self._skip(at)
        if self._waiting.startswith("]", begin):
            self._has_ended = True
            return begin + 1, None
        if self.count and begin < len(self._waiting):
            if self._waiting[begin] != ",":
                raise self._wrong("has elements without a comma between them")
            begin = self._skip(begin + 1)
        if begin == len(self._waiting):
            return None
        if self._waiting[begin] != "{":
            raise self._wrong("has an element that is no object")
        try:
            value, end = _decoder.raw_decode(self._waiting, begin)
        except json.JSONDecodeError:
            return None
        except (ValueError, RecursionError):
            raise self._wrong("has an element with too long numbers or too deep nesting") from None
        self.count += 1
        return end, (self._waiting[begin:end], value)

    def _skip(self, at: int) -> int:
        found = _SPACES.match(self._waiting, at)
        return at if found is None else found.end()

    def _wrong(self, what: str) -> ApiError:
        message = f'a body above max_body_mib is {{"{self._name}": [...]}}; this one {what}'
        return bad_request(message, self._name, "invalid_json")
