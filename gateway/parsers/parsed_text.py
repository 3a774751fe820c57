"""Feeds one output's text and tokens to its parser, and counts markers, reasoning and content."""

from __future__ import annotations

from gateway.parsers.events import OutputEvent, OutputPlan, TokenLogprob
from gateway.parsers.registry import kept_tokens, make_parser
from gateway.parsers.scanner import Mark
from gateway.parsers.sink import OutputParser
from gateway.text.tokenizer import Tokenizer


class ParsedText:
    """One output in its parser; used by `OutputState`."""

    def __init__(self, parser: OutputParser, marked: dict[int, str]) -> None:
        """`marked`: tokens that belong to the formats, with their texts."""
        self.marked = marked
        self._parser = parser
        self._length = 0  # characters detokenised, those held back by stop strings included
        self._reasoning_tokens = 0
        self._offset: int | None = None  # of the output's first character, as log-probabilities count
        self._content_end = -1  # offset after the last character of content

    @classmethod
    def of(cls, plan: OutputPlan, tokenizer: Tokenizer) -> ParsedText | None:
        """Returns None when the plan has no parser."""
        added = tokenizer.added_tokens
        parser = make_parser(plan, added)
        if parser is None:
            return None
        return cls(parser, {added[text]: text for text in kept_tokens(plan) if text in added})

    @property
    def calls(self) -> int:
        """The number of tool calls so far."""
        return self._parser.sink.calls

    @property
    def is_full(self) -> bool:
        """Returns whether all that follows is ignored."""
        return self._parser.sink.is_full

    def feed(self, text: str, token_id: int | None = None, piece: str = "") -> None:
        """Takes more text.

        Args:
            text: what may be shown now; stop strings hold text back.
            token_id: the token that it comes from; None: the output's end.
            piece: its text, shown or not.
        """
        sink = self._parser.sink
        marks: tuple[Mark, ...] = ()
        mark = None if token_id is None else self.marked.get(token_id)
        self._length += len(piece)
        if mark is not None and piece.endswith(mark):
            marks = (Mark(self._length - len(mark), mark),)
        was_reasoning = sink.in_reasoning
        if text or marks:
            self._parser.feed(text, marks)
        self._reasoning_tokens += token_id is not None and (was_reasoning or sink.in_reasoning)

    def finish(self) -> None:
        """Ends the output."""
        self._parser.finish()

    def take(self) -> tuple[tuple[OutputEvent, ...], int]:
        """Returns the events since the last call, and the number of reasoning tokens fed since then."""
        count, self._reasoning_tokens = self._reasoning_tokens, 0
        return tuple(self._parser.sink.take()), count

    def content_logprobs(
        self, pending: list[TokenLogprob], end: int, is_over: bool
    ) -> tuple[TokenLogprob, ...]:
        """Removes from `pending` the tokens whose text has become content, and drops those before them.

        Args:
            pending: tokens in order, with offsets.
            end: offset after the last of them.
            is_over: the output is over: a last token without text, which ended the content, belongs to it.
        """
        if self._offset is None and pending:
            self._offset = pending[0].offset
        released: list[TokenLogprob] = []
        place = 0
        for range_start, range_end in self._parser.sink.take_ranges():
            first = range_start + (self._offset or 0)
            self._content_end = range_end + (self._offset or 0)
            while place < len(pending) and pending[place].offset < self._content_end:
                token = pending[place]
                after = pending[place + 1].offset if place + 1 < len(pending) else end
                if token.offset >= first or after > first:
                    released.append(token)
                place += 1
        if is_over and self._content_end == end:
            released += pending[place:]
        del pending[:place]
        return tuple(released)
