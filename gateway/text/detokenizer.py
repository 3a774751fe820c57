"""Converts a growing sequence of token ids to text, and cuts it at stop strings."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice

from gateway.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# A character has at most 4 bytes; a longer run of undecodable tokens is invalid text, not an incomplete one.
_MAX_HELD_TOKENS = 16
_CONTEXT_TOKENS = 6


class Detokenizer(ABC):
    """Text of a growing token sequence. The pieces of all steps and `flush` concatenate to the full text."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()

    def keep(self, token_ids: Collection[int]) -> None:
        """Shows these tokens, also where special tokens are skipped: a parser needs them."""
        self._skipped = self._skipped - frozenset(token_ids)

    def step(self, token_id: int) -> str:
        """Returns the text that is certain after `token_id`; empty while a character is incomplete."""
        return "" if token_id in self._skipped else self._step(token_id)

    @abstractmethod
    def _step(self, token_id: int) -> str:
        """Returns `step`'s text for a token that is not skipped."""

    @abstractmethod
    def flush(self) -> str:
        """Returns the rest at the end of the output, with U+FFFD for an incomplete character."""


class ByteLevelDetokenizer(Detokenizer):
    """Exact and linear: byte-level vocabularies map tokens to bytes, and bytes are decoded as they come."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__(tokenizer, skip_special_tokens)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def _step(self, token_id: int) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer(Detokenizer):
    """Decodes a short window twice per token, for decoders with context (leading spaces, byte fallback).

    The window starts at the last released piece, so that both decodings treat its beginning alike and
    their difference is the new text.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, context_ids: Sequence[int] = ()
    ) -> None:
        super().__init__(tokenizer, skip_special_tokens)
        ordinary = (token for token in reversed(context_ids) if token not in tokenizer.special_ids)
        self._window = list(islice(ordinary, _CONTEXT_TOKENS))[::-1]
        self._given = len(self._window)  # tokens of the window whose text was released

    def _step(self, token_id: int) -> str:
        self._window.append(token_id)
        before = self._decode(self._window[: self._given])
        after = self._decode(self._window)
        held = len(self._window) - self._given
        if len(after) <= len(before) or (after.endswith(REPLACEMENT) and held < _MAX_HELD_TOKENS):
            return ""
        self._window = self._window[self._given :]
        self._given = len(self._window)
        return after[len(before) :]

    def flush(self) -> str:
        before = self._decode(self._window[: self._given])
        after = self._decode(self._window)
        self._given = len(self._window)
        return after[len(before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def make_detokenizer(
    tokenizer: Tokenizer, skip_special_tokens: bool, context_ids: Sequence[int] = ()
) -> Detokenizer:
    """Returns the detokeniser for this vocabulary; `context_ids` are the tokens before the output."""
    if tokenizer.is_byte_level:
        return ByteLevelDetokenizer(tokenizer, skip_special_tokens)
    return WindowDetokenizer(tokenizer, skip_special_tokens, context_ids)


@dataclass(frozen=True)
class StopResult:
    """The text that may be shown now, and the stop string found, if any; filled by `StopStrings.feed`."""

    text: str
    matched: str | None = None


class StopStrings:
    """Holds back the longest end of the text that may still become a stop string.

    The match that completes first wins (the longer one on a tie), so the result does not depend on how
    the text is split into pieces. Knuth, Morris and Pratt's automaton: the cost per character does not
    depend on the stop strings' length.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        # Longest first: of those that complete at the same character, the first wins.
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._falls = tuple(_borders(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)  # characters at the end of the text that begin each stop
        self._include = include_in_output
        self._held = ""

    def feed(self, text: str) -> StopResult:
        """Adds text; after a match nothing more may be fed."""
        if not self._stops:
            return StopResult(text)
        buffer = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            found = self._advance(character)
            if found is not None:
                self._held = ""
                return StopResult(buffer[: position if self._include else position - len(found)], found)
        shown = len(buffer) - max(self._matched)
        self._held = buffer[shown:]
        return StopResult(buffer[:shown])

    def flush(self) -> str:
        """Returns the held text at the end of the output."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> str | None:
        """Takes one character; returns the stop string that it completes."""
        for index, (stop, falls) in enumerate(zip(self._stops, self._falls, strict=True)):
            length = self._matched[index]
            while length and stop[length] != character:
                length = falls[length]
            length += stop[length] == character
            if length == len(stop):
                return stop
            self._matched[index] = length
        return None


def _borders(stop: str) -> list[int]:
    """Returns for each prefix of `stop` the length of its longest proper prefix that is also its suffix."""
    borders, length = [0, 0], 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = borders[length]
        length += stop[length] == character
        borders.append(length)
    return borders
