"""Objects of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.formats.base import ResponseFormat
from gateway.logprobs import TokenLogprob, completion_logprobs
from gateway.output import Delta, Finish


class CompletionFormat(ResponseFormat):
    """Text chunks, then an empty text with the finish reason."""

    operation = "text_completion"
    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, index: int) -> dict[str, Any] | None:
        """Text completions open with their first text."""
        return None

    def news(self, delta: Delta) -> dict[str, Any]:
        """New text."""
        return self._choice(delta.index, delta.text, delta.logprobs, None)

    def closing(self, index: int, finish: Finish) -> dict[str, Any]:
        """Empty text with the finish reason."""
        choice = self._choice(index, "", (), finish)
        choice["logprobs"] = None
        return choice

    def full(self, index: int, text: str, logprobs: Sequence[TokenLogprob], finish: Finish) -> dict[str, Any]:
        """A whole text."""
        return self._choice(index, text, logprobs, finish)

    def _choice(
        self, index: int, text: str, tokens: Sequence[TokenLogprob], finish: Finish | None
    ) -> dict[str, Any]:
        logprobs = (
            None if self._logprobs is None else completion_logprobs(self._tokenizer, tokens, self._logprobs)
        )
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
        if finish is not None:
            choice.update(finish_reason=finish.reason, stop_reason=finish.stop_reason)
        return choice
