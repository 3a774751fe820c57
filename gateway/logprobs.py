"""Log-probabilities of tokens, between the engine's arrays and the two OpenAI formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.text.tokenizer import Tokenizer
from protos import engine_pb2

# A masked token has -inf, which JSON can not say; other servers send this number for it.
_LOWEST = -9999.0


def finite(logprob: float) -> float:
    """`logprob`, or the lowest number JSON clients are used to."""
    return max(logprob, _LOWEST)


@dataclass(frozen=True)
class TokenLogprob:
    """One token of prompt or output; filled by `output.py` from the engine's message."""

    token_id: int
    logprob: float | None  # natural log; None for the first prompt token
    top: tuple[tuple[int, float], ...]  # alternatives (token id, logprob), best first
    offset: int  # characters of text before this token


def alternatives(
    top_logprobs: Sequence[engine_pb2.TopLogProbs], position: int
) -> tuple[tuple[int, float], ...]:
    """The alternatives at one position, best first; empty when the engine sent none for it."""
    if position >= len(top_logprobs):
        return ()
    row = top_logprobs[position]
    return tuple((token_id, finite(value)) for token_id, value in zip(row.token_ids, row.values, strict=True))


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token alone, as text; incomplete characters show as U+FFFD (their bytes are given beside it)."""
    return tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode("utf-8", errors="replace"), "logprob": logprob, "bytes": list(raw)}


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprob], count: int) -> dict[str, Any]:
    """`choices[].logprobs` of chat: one content entry per token with up to `count` alternatives."""
    content = []
    for token in tokens:
        entry = _entry(tokenizer, token.token_id, token.logprob or 0.0)
        entry["top_logprobs"] = [_entry(tokenizer, token_id, value) for token_id, value in token.top[:count]]
        content.append(entry)
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprob], count: int) -> dict[str, Any]:
    """`choices[].logprobs` of completions: parallel lists; text_offset counts characters.

    Each `top_logprobs` entry holds up to `count` alternatives and always the token itself; two tokens of
    equal text keep the better value.
    """
    top: list[dict[str, float] | None] = []
    for token in tokens:
        if token.logprob is None:
            top.append(None)
            continue
        row: dict[str, float] = {}
        for token_id, value in (*token.top[:count], (token.token_id, token.logprob)):
            row.setdefault(token_text(tokenizer, token_id), value)
        top.append(row)
    return {
        "text_offset": [token.offset for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "tokens": [token_text(tokenizer, token.token_id) for token in tokens],
        "top_logprobs": top,
    }
