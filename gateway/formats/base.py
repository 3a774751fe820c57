"""The part of a response that differs between chat and text completions."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from gateway.logprobs import TokenLogprob
from gateway.output import Delta, Finish
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
    def news(self, delta: Delta) -> dict[str, Any]:
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
