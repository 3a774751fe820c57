"""Objects of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.formats.base import ResponseFormat
from gateway.logprobs import TokenLogprob, chat_logprobs
from gateway.output import Delta, Finish


class ChatFormat(ResponseFormat):
    """A role chunk, content chunks, then an empty delta with the finish reason."""

    operation = "chat"
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any] | None:
        """The role, before the first content."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def news(self, delta: Delta) -> dict[str, Any]:
        """New content."""
        return {
            "index": delta.index,
            "delta": {"content": delta.text},
            "logprobs": self._logprobs_of(delta.logprobs),
            "finish_reason": None,
        }

    def closing(self, index: int, finish: Finish) -> dict[str, Any]:
        """An empty delta with the finish reason."""
        return {
            "index": index,
            "delta": {},
            "logprobs": None,
            "finish_reason": finish.reason,
            "stop_reason": finish.stop_reason,
        }

    def full(self, index: int, text: str, logprobs: Sequence[TokenLogprob], finish: Finish) -> dict[str, Any]:
        """A whole message."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs_of(logprobs),
            "finish_reason": finish.reason,
            "stop_reason": finish.stop_reason,
        }

    def _logprobs_of(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return None if self._logprobs is None else chat_logprobs(self._tokenizer, tokens, self._logprobs)
