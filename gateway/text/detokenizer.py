"""Tokens to text, one token at a time, never splitting a UTF-8 character between two pieces."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import islice

from gateway.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# A character has at most 4 bytes; a longer run of undecodable tokens is broken text, not a part of one.
_MAX_HELD_TOKENS = 16
_CONTEXT_TOKENS = 6


class Detokenizer(ABC):
    """Text of a growing token sequence. The pieces of all steps and `flush` concatenate to the full text."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()

    def step(self, token_id: int) -> str:
        """The text that became certain with `token_id`; empty while a character is incomplete."""
        return "" if token_id in self._skipped else self._step(token_id)

    @abstractmethod
    def _step(self, token_id: int) -> str:
        """`step` for a token that is not skipped."""

    @abstractmethod
    def flush(self) -> str:
        """What is left at the end of the output, with U+FFFD for an incomplete character."""


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
    """For decoders with context (leading spaces, byte fallback): decodes a short window twice per token.

    The window starts at the last piece given out, so that both decodings treat its beginning alike and
    their difference is the new text.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, context_ids: Sequence[int] = ()
    ) -> None:
        super().__init__(tokenizer, skip_special_tokens)
        ordinary = (token for token in reversed(context_ids) if token not in tokenizer.special_ids)
        self._window = list(islice(ordinary, _CONTEXT_TOKENS))[::-1]
        self._given = len(self._window)  # tokens of the window whose text was given out

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
    """The detokeniser for this vocabulary; `context_ids` are the prompt's tokens before the output."""
    if tokenizer.is_byte_level:
        return ByteLevelDetokenizer(tokenizer, skip_special_tokens)
    return WindowDetokenizer(tokenizer, skip_special_tokens, context_ids)
