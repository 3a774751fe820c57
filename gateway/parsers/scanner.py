"""Reads a text that is still growing: parsers are written as if it were whole, and wait where it ends.

A parser is a generator that `yield`s where it needs more text. What it asks for costs the characters it takes
and the few that are held back because they may begin a marker, so a whole output is read in linear time.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # waits for text, returns T
# Called with a text and where to begin and end in it: the end of what it takes, and whether it needs no more.
Advance = Callable[[str, int, int], tuple[int, bool]]
END = ""  # in place of a marker: the text is over


def run_of(pattern: re.Pattern[str]) -> Advance:
    """Goes over what the pattern, which matches any text, matches there; more is needed at the text's end."""

    def advance(text: str, start: int, limit: int) -> tuple[int, bool]:
        match = pattern.match(text, start, limit)
        end = start if match is None else match.end()
        return end, end < limit

    return advance


_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Mark:
    """Where the text has a token of the parser's; filled by `OutputState`."""

    offset: int  # characters of text before it
    text: str


class Markers:
    """Texts to look for; those that the tokenizer has tokens for are found only as tokens."""

    def __init__(self, texts: Collection[str], tokens: Collection[str] = ()) -> None:
        """`tokens`: the texts that count only where a `Mark` says so."""
        self.tokens = frozenset(texts) & frozenset(tokens)
        # Longest first: of two that begin alike, the longer one is meant.
        spelled = sorted(set(texts) - self.tokens, key=lambda text: (-len(text), text))
        self.pattern = re.compile("|".join(map(re.escape, spelled))) if spelled else None
        self._starts = frozenset(text[:end] for text in spelled for end in range(1, len(text)))
        self._longest = max((len(text) - 1 for text in spelled), default=0)
        firsts = {text[0] for text in spelled}
        self._first = firsts.pop() if len(firsts) == 1 else ""  # with which every marker begins

    def held(self, text: str, first: int) -> int:
        """Returns how many characters at the end of `text[first:]` may begin a marker; the most, or 0."""
        most = min(self._longest, len(text) - first)
        if self._first:
            place = text.find(self._first, len(text) - most) if most else -1
            most = 0 if place < 0 else len(text) - place
        for length in range(most, 0, -1):
            if text[-length:] in self._starts:
                return length
        return 0


class Scanner:
    """The text, as far as it is there, and the place up to which it was taken."""

    def __init__(self) -> None:
        self.ended = False
        self.piece_start = 0  # where in the whole text the piece taken last begins
        self.work = 0  # characters looked at, for the test that this is linear
        self._buffer = ""
        self._next = 0  # in the buffer: first character not taken
        self._base = 0  # where in the whole text the buffer begins
        self._marks: deque[Mark] = deque()
        self._record: list[str] | None = None
        self.record_start = 0

    def add(self, text: str, marks: Collection[Mark] = ()) -> None:
        """More text; marks may be ahead of it."""
        self._base += self._next
        self._buffer = self._buffer[self._next :] + text
        self._next = 0
        self._marks.extend(marks)

    @property
    def offset(self) -> int:
        """Where in the whole text the next character is."""
        return self._base + self._next

    def record(self) -> None:
        """Keeps what is taken from now on, until `forget`."""
        self._record, self.record_start = [], self.offset

    def recorded(self, since: str = "") -> str:
        """Returns what was taken since `record`, after `since`; keeps no more."""
        taken = since + "".join(self._record or ())
        self._record = None
        return taken

    def forget(self) -> None:
        """Ends `record`."""
        self._record = None

    def _take(self, end: int) -> str:
        """Returns the text up to `end`, an index into the buffer."""
        piece = self._buffer[self._next : end]
        self.piece_start = self.offset
        self._next = end
        if self._record is not None:
            self._record.append(piece)
        marks, offset = self._marks, self.offset
        while marks and marks[0].offset < offset:
            marks.popleft()
        return piece

    def _token(self, tokens: Collection[str]) -> Mark | None:
        """Returns the next of these tokens whose text is there."""
        for mark in self._marks if tokens else ():
            if mark.offset + len(mark.text) > self._base + len(self._buffer):
                return None
            if mark.text in tokens:
                return mark
        return None

    def until(self, markers: Markers) -> Steps[tuple[str, str | None]]:
        """Returns the next piece of text, and the marker after it, which is taken too.

        None for the marker: more text follows; the piece is not empty then. `END`: nothing follows.
        """
        while True:
            token = self._token(markers.tokens)
            limit = len(self._buffer) if token is None else token.offset - self._base
            match = (
                None if markers.pattern is None else markers.pattern.search(self._buffer, self._next, limit)
            )
            self.work += (limit if match is None else match.end()) - self._next
            if match is not None:
                piece, start = self._take(match.start()), self.piece_start
                self._take(match.end())
                self.piece_start = start
                return piece, match.group()
            if token is not None:
                piece, start = self._take(limit), self.piece_start
                self._take(limit + len(token.text))
                self.piece_start = start
                return piece, token.text
            safe = limit if self.ended else limit - markers.held(self._buffer, self._next)
            if safe > self._next:
                return self._take(safe), None
            if self.ended:
                return "", END
            yield

    def collect(self, markers: Markers, most: int) -> Steps[tuple[str, str | None]]:
        """Returns all text up to a marker, and the marker; None for it after more than `most` characters."""
        pieces, size = [], 0
        while True:
            piece, marker = yield from self.until(markers)
            pieces.append(piece)
            size += len(piece)
            if marker is not None or size > most:
                return "".join(pieces), None if size > most else marker

    def peek(self) -> Steps[str]:
        """Returns the next character, not taken; `END` when nothing follows."""
        while self._next >= len(self._buffer):
            if self.ended:
                return END
            yield
        return self._buffer[self._next]

    def skip_space(self) -> Steps[str]:
        """Takes white space; the character after it, not taken."""
        while True:
            match = _SPACE.match(self._buffer, self._next)
            assert match is not None
            self._take(match.end())
            if self._next < len(self._buffer):
                return self._buffer[self._next]
            if self.ended:
                return END
            yield

    def accept(self, text: str) -> Steps[bool]:
        """Takes `text` if it is what follows."""
        while True:
            rest = self._buffer[self._next : self._next + len(text)]
            if rest == text:
                self._take(self._next + len(text))
                return True
            if self.ended or not text.startswith(rest):
                return False
            yield

    def collect_while(self, advance: Advance, most: int, tokens: Collection[str] = ()) -> Steps[str]:
        """Returns all that `advance` goes over; empty when it is more than `most` characters."""
        pieces: list[str] = []
        size, over = 0, False
        while not over and size <= most:
            piece, over = yield from self.take_while(advance, tokens)
            pieces.append(piece)
            size += len(piece)
        return "".join(pieces) if over and size <= most else ""

    def take_while(self, advance: Advance, tokens: Collection[str] = ()) -> Steps[tuple[str, bool]]:
        """The next piece that `advance` goes over; whether it is over then, or where one of `tokens` is."""
        while True:
            token = self._token(tokens)
            limit = len(self._buffer) if token is None else token.offset - self._base
            end, over = advance(self._buffer, self._next, limit)
            self.work += end - self._next
            over = over or (token is not None and end >= limit)
            if end > self._next or over:
                return self._take(end), over
            if self.ended:
                return "", True
            yield
