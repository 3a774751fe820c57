"""How outputs look in JSON: chat completions and text completions."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from gateway.output import Delta, chat_logprobs, completion_logprobs
from gateway.parsers.events import Finish, TokenLogprob
from gateway.text.tokenizer import Tokenizer


class ResponseFormat(ABC):
    """Builds the JSON objects of one response; all objects of a stream share id and creation time."""

    operation: str  # gen_ai.operation.name
    id_prefix: str
    whole_object: str  # `object` of a non-streamed answer
    chunk_object: str  # `object` of a stream's chunks

    def __init__(self, model: str, tokenizer: Tokenizer, logprobs: int | None) -> None:
        """`logprobs` is the number of alternatives asked for; None: no log-probabilities."""
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._model = model
        self._tokenizer = tokenizer
        self._logprobs = logprobs

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """One object of a stream."""
        return self._envelope(self.chunk_object, choices)

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """A non-streamed answer."""
        return {**self._envelope(self.whole_object, choices), "usage": usage}

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self._model,
            "choices": choices,
        }

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice that opens output `index` in a stream; None when the API has no such thing."""

    @abstractmethod
    def delta_choice(self, delta: Delta) -> dict[str, Any]:
        """The choice for new text and log-probabilities; says nothing of the end."""

    @abstractmethod
    def closing(self, index: int, finish: Finish) -> dict[str, Any]:
        """The choice that ends output `index` in a stream."""

    @abstractmethod
    def full(self, index: int, text: str, logprobs: Sequence[TokenLogprob], finish: Finish) -> dict[str, Any]:
        """The choice of a non-streamed answer."""


def usage_object(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Token counts as OpenAI gives them."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


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

    def delta_choice(self, delta: Delta) -> dict[str, Any]:
        """The delta of a chunk: what was decoded since the last one."""
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


class CompletionFormat(ResponseFormat):
    """Text chunks, then an empty text with the finish reason."""

    operation = "text_completion"
    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, index: int) -> dict[str, Any] | None:
        """Text completions open with their first text."""
        return None

    def delta_choice(self, delta: Delta) -> dict[str, Any]:
        """The text of a chunk: what was decoded since the last one."""
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
