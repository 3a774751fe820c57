"""Scans a growing text: parsers are written as if it were complete, and wait where it ends.

A parser is a generator that `yield`s where it needs more text. Each request costs the characters it takes
and the few that are held back because they may begin a marker, so an output is read in linear time.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # waits for text, returns T
# Called with a text, start and limit; returns the end of what it takes, and whether it is done.
Advance = Callable[[str, int, int], tuple[int, bool]]
END = ""  # instead of a marker: the text is over


def run_of(pattern: re.Pattern[str]) -> Advance:
    """Returns an `Advance` over the pattern, which matches any text; at the text's end it needs more."""

    def advance(text: str, start: int, limit: int) -> tuple[int, bool]:
        match = pattern.match(text, start, limit)
        end = start if match is None else match.end()
        return end, end < limit

    return advance


_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Mark:
    """The place of a parser's token in the text; filled by `OutputState`."""

    offset: int  # characters of text before it
    text: str


class Markers:
    """Texts to search for; those for which the tokenizer has tokens match only as tokens."""

    def __init__(self, texts: Collection[str], tokens: Collection[str] = ()) -> None:
        """`tokens`: the texts that match only at a `Mark`."""
        self.tokens = frozenset(texts) & frozenset(tokens)
        # Longest first: of two with the same beginning, the longer one matches.
        spelled = sorted(set(texts) - self.tokens, key=lambda text: (-len(text), text))
        self.pattern = re.compile("|".join(map(re.escape, spelled))) if spelled else None
        self._starts = frozenset(text[:end] for text in spelled for end in range(1, len(text)))
        self._longest = max((len(text) - 1 for text in spelled), default=0)
        firsts = {text[0] for text in spelled}
        self._first = firsts.pop() if len(firsts) == 1 else ""  # common to all markers

    def held(self, text: str, first: int) -> int:
        """Returns the length of the longest end of `text[first:]` that may begin a marker, or 0."""
        most = min(self._longest, len(text) - first)
        if self._first:
            place = text.find(self._first, len(text) - most) if most else -1
            most = 0 if place < 0 else len(text) - place
        for length in range(most, 0, -1):
            if text[-length:] in self._starts:
                return length
        return 0


class Scanner:
    """The text that has arrived, and the position up to which it was taken."""

    def __init__(self) -> None:
        self.ended = False
        self.piece_start = 0  # in the whole text: where the piece taken last begins
        self.work = 0  # characters scanned, for the test of linear time
        self._buffer = ""
        self._next = 0  # in the buffer: first character not taken
        self._base = 0  # in the whole text: where the buffer begins
        self._marks: deque[Mark] = deque()
        self._record: list[str] | None = None
        self.record_start = 0

    def add(self, text: str, marks: Collection[Mark] = ()) -> None:
        """Adds text; marks may be ahead of it."""
        self._base += self._next
        self._buffer = self._buffer[self._next :] + text
        self._next = 0
        self._marks.extend(marks)

    @property
    def offset(self) -> int:
        """The position of the next character in the whole text."""
        return self._base + self._next

    def record(self) -> None:
        """Records what is taken from now on, until `forget`."""
        self._record, self.record_start = [], self.offset

    def recorded(self, since: str = "") -> str:
        """Returns `since` and what was taken since `record`; ends the recording."""
        taken = since + "".join(self._record or ())
        self._record = None
        return taken

    def forget(self) -> None:
        """Ends the recording."""
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
        """Returns the next of these tokens whose whole text has arrived."""
        for mark in self._marks if tokens else ():
            if mark.offset + len(mark.text) > self._base + len(self._buffer):
                return None
            if mark.text in tokens:
                return mark
        return None

    def until(self, markers: Markers) -> Steps[tuple[str, str | None]]:
        """Returns the next piece of text, and the marker after it, which is taken too.

        The marker is None if more text follows, with a piece that is not empty, and `END` if none does.
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
        """Returns the text up to a marker, and the marker; None for it after more than `most` characters."""
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
        """Takes white space; returns the character after it, not taken."""
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
        """Takes `text` if it follows; returns whether it does."""
        while True:
            rest = self._buffer[self._next : self._next + len(text)]
            if rest == text:
                self._take(self._next + len(text))
                return True
            if self.ended or not text.startswith(rest):
                return False
            yield

    def collect_while(self, advance: Advance, most: int, tokens: Collection[str] = ()) -> Steps[str]:
        """Returns the text that `advance` goes over; empty when it is more than `most` characters."""
        pieces: list[str] = []
        size, over = 0, False
        while not over and size <= most:
            piece, over = yield from self.take_while(advance, tokens)
            pieces.append(piece)
            size += len(piece)
        return "".join(pieces) if over and size <= most else ""

    def take_while(self, advance: Advance, tokens: Collection[str] = ()) -> Steps[tuple[str, bool]]:
        """Returns the next piece that `advance` takes, and whether it ends there or at one of `tokens`."""
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
