"""The base class of parsers, and the sink for their events, without the white space around thoughts
and calls."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence

from gateway.parsers.events import (
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from gateway.parsers.scanner import Mark, Scanner, Steps


def new_call_id() -> str:
    """Returns a random id in OpenAI's format."""
    return f"call_{uuid.uuid4().hex[:24]}"


# The kind that a text becomes; a number: arguments of the call with this index.
_Text = type[ReasoningDelta] | type[ContentDelta] | int


class _Channel:
    """Text of one kind; its white space is held back at the end and, if wanted, dropped at the start."""

    def __init__(self) -> None:
        self.has_text = False  # more than dropped white space
        self._strip = False
        self._held: list[tuple[str, int]] = []

    def begin(self, strip: bool) -> None:
        """Begins a new text; `strip` drops white space at its beginning."""
        self._strip, self._held = strip, []

    def add(self, text: str, start: int) -> list[tuple[str, int]]:
        """Returns the pieces, with their positions, that may be emitted."""
        if self._strip:
            kept = text.lstrip()
            start += len(text) - len(kept)
            text, self._strip = kept, not kept
        shown = len(text.rstrip())
        if not shown:
            self._held += [(text, start)] if text else []
            return []
        self.has_text = True
        pieces = [*self._held, (text[:shown], start)]
        self._held = [(text[shown:], start + shown)] if shown < len(text) else []
        return pieces

    def rest(self) -> list[tuple[str, int]]:
        """Returns the white space that was held back."""
        held, self._held = self._held, []
        return held


class Sink:
    """Collects the events of one output; filled by its parser."""

    def __init__(self, max_calls: int | None, show_reasoning: bool) -> None:
        """`max_calls`: calls after which the output is over; None: any number. See `OutputPlan`."""
        self.calls = 0  # started
        self.is_full = False  # `max_calls` were read: all that follows is ignored
        self.in_reasoning = False
        self.content_ranges: list[tuple[int, int]] = []  # of content in the text; see `take_ranges`
        self._max_calls = max_calls
        self._show_reasoning = show_reasoning
        # Kind, and pieces of text not yet joined, or the event if there is no text: `take` joins them.
        self._texts: list[tuple[_Text, list[str]] | ToolCallStart] = []
        self._reasoning = _Channel()
        self._content = _Channel()

    @property
    def has_content(self) -> bool:
        """Returns whether content was emitted."""
        return self._content.has_text

    def take(self) -> list[OutputEvent]:
        """Returns the events since the last call."""
        if not self._texts:
            return []
        events: list[OutputEvent] = []
        for item in self._texts:
            if isinstance(item, ToolCallStart):
                events.append(item)
                continue
            kind, text = item[0], "".join(item[1])
            events.append(ToolCallArguments(kind, text) if isinstance(kind, int) else kind(text))
        self._texts = []
        return events

    def take_ranges(self) -> list[tuple[int, int]]:
        """Returns the ranges (from, to) of the text's characters that became content since the last call."""
        ranges, self.content_ranges = self.content_ranges, []
        return ranges

    def begin_reasoning(self) -> None:
        """Begins a thought."""
        self.in_reasoning = True
        self._reasoning.begin(strip=True)

    def end_reasoning(self) -> None:
        """Ends the thought; what follows is content, from its first visible character on."""
        self.in_reasoning = False
        self._content.begin(strip=True)

    def reasoning(self, text: str, start: int) -> None:
        """Adds text of the thought; `start` is its position in the whole text."""
        for piece, _ in self._reasoning.add(text, start):
            if self._show_reasoning:
                self._append(ReasoningDelta, piece)

    def content(self, text: str, start: int) -> None:
        """Adds text of the answer; `start` is its position in the whole text."""
        self._show(self._content.add(text, start))

    def finish(self) -> None:
        """Ends the output: white space at the end of an answer belongs to it."""
        if not self.calls:
            self._show(self._content.rest())

    def start_call(self, name: str, call_id: str) -> None:
        """Begins a call of `name`; white space around calls is no content."""
        self._content.begin(strip=True)
        self._texts.append(ToolCallStart(self.calls, call_id, name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Adds a piece of the arguments of the last call."""
        self._append(self.calls - 1, text)

    def end_call(self) -> None:
        """Ends the call."""
        self.is_full = self._max_calls is not None and self.calls >= self._max_calls

    def _show(self, pieces: list[tuple[str, int]]) -> None:
        ranges = self.content_ranges
        for text, start in pieces:
            self._append(ContentDelta, text)
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], start + len(text))
            else:
                ranges.append((start, start + len(text)))

    def _append(self, kind: _Text, text: str) -> None:
        last = self._texts[-1] if self._texts else None
        if isinstance(last, tuple) and last[0] == kind:
            last[1].append(text)
        elif text:
            self._texts.append((kind, [text]))


class OutputParser(ABC):
    """Parses one output as it grows, in linear time; never raises for any output."""

    def __init__(self, sink: Sink) -> None:
        self.scan, self.sink = Scanner(), sink
        self._steps = self._run()
        self._is_over = False

    def feed(self, text: str, marks: Sequence[Mark] = ()) -> None:
        """Reads a piece; what is certain after it is in the sink.

        Args:
            text: the next characters.
            marks: tokens of the format in it, or in later text; some texts match only as tokens.
        """
        if not self._is_over:
            self.scan.add(text, marks)
            self._go_on()

    def finish(self) -> None:
        """Emits what was held back, at the end of the output; nothing may be fed after it."""
        self.scan.ended = True
        if not self._is_over:
            self._go_on()
        self.sink.finish()

    def _go_on(self) -> None:
        try:
            next(self._steps)
        except StopIteration:
            self._is_over = True

    @abstractmethod
    def _run(self) -> Steps[None]:
        """Reads the whole output."""
