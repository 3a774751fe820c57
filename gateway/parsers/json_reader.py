"""Reads JSON from a growing text: values pass through as they arrive, parsed only as far as needed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from gateway.parsers.scanner import Scanner, Steps, run_of

_OUTSIDE = re.compile(r'["{}\[\]]')
_STRING_SYNTAX = re.compile(r'"|\\(?:.|\Z)', re.DOTALL)
_INSIDE = re.compile(r'["\\]')
_SCALAR = run_of(re.compile(r"[^\s,:\]}\"{\[]*"))
_CLOSING = {"{": "}", "[": "]"}
MAX_LABEL = 4096  # characters of a key or a name; longer ones are no call


class JsonStrings:
    """Tracks whether a growing JSON text ends within a string."""

    def __init__(self) -> None:
        self.is_open = False
        self._escaped = False

    def feed(self, piece: str) -> None:
        """Takes the next piece of the text."""
        if self._escaped and piece:
            self._escaped, piece = False, piece[1:]
        for found in _STRING_SYNTAX.finditer(piece):
            if found.group() == '"':
                self.is_open = not self.is_open
            elif len(found.group()) == 1:  # a backslash at the very end
                self._escaped = True


class _Value:
    """Finds the end of one JSON value; brackets have to match, everything else is unchecked."""

    def __init__(self) -> None:
        self.is_whole = False
        self._closing: list[str] = []
        self._in_string = False
        self._escaped = False
        self._began = False
        self._is_scalar = False

    def advance(self, text: str, start: int, limit: int) -> tuple[int, bool]:
        """Returns how far the value reaches in `text[start:limit]`, and whether it is over."""
        place = start
        if not self._began and place < limit:
            self._began, self._is_scalar = True, text[place] not in '"{['
        if self._is_scalar:
            return self._scalar(text, start, limit)
        while place < limit:
            if self._escaped:
                self._escaped, place = False, place + 1
                continue
            match = (_INSIDE if self._in_string else _OUTSIDE).search(text, place, limit)
            if match is None:
                return limit, False
            place = match.end()
            if not self._take(match.group()):
                return match.start(), True
            if not self._in_string and not self._closing:
                self.is_whole = True
                return place, True
        return place, False

    def _take(self, character: str) -> bool:
        """Takes a structural character; returns False for a bracket that closes another kind."""
        if character == '"':
            self._in_string = not self._in_string
        elif character == "\\":
            self._escaped = True
        elif character in _CLOSING:
            self._closing.append(_CLOSING[character])
        elif not self._closing or self._closing.pop() != character:
            return False
        return True

    def _scalar(self, text: str, start: int, limit: int) -> tuple[int, bool]:
        end, is_over = _SCALAR(text, start, limit)
        self.is_whole = self.is_whole or end > start
        return end, is_over


def pass_value(scan: Scanner, give: Callable[[str], None], tokens: Collection[str] = ()) -> Steps[bool]:
    """Passes one JSON value on as it arrives; returns whether it was complete.

    Args:
        scan: at the value's first character.
        give: called with each piece.
        tokens: the value ends at one of these, complete or not.
    """
    value = _Value()
    while True:
        piece, over = yield from scan.take_while(value.advance, tokens)
        if piece:
            give(piece)
        if over:
            return value.is_whole


def read_value(scan: Scanner, tokens: Collection[str] = (), most: int | None = None) -> Steps[str | None]:
    """Returns the text of one JSON value; None when it is incomplete or longer than `most` characters."""
    pieces: list[str] = []
    is_whole = yield from pass_value(scan, pieces.append, tokens)
    text = "".join(pieces)
    return text if is_whole and (most is None or len(text) <= most) else None


def read_label(scan: Scanner, tokens: Collection[str] = ()) -> Steps[str | None]:
    """Returns a JSON string, decoded: a key or a name; None when there is none here."""
    if (yield from scan.peek()) != '"':
        return None
    text = yield from read_value(scan, tokens, MAX_LABEL)
    value = None if text is None else loaded(text)
    return value if isinstance(value, str) else None


def loaded(text: str) -> object:
    """Returns the value of JSON from a model, line breaks in strings allowed; `...` when it is no JSON."""
    try:
        value: object = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return ...
    return value
