"""The line that a request's result becomes, in the shape of the batch's API."""

from __future__ import annotations

import secrets
from typing import Any, Literal, get_args

from pydantic_core import to_json

from gateway.batches.batch import Api
from gateway.transport.internal import InternalAnswer, TokenUsage

Counter = Literal["succeeded", "errored", "canceled", "expired"]
COUNTERS: tuple[Counter, ...] = get_args(Counter)
Reason = Literal["canceled", "expired"]
_REASONS: dict[Reason, tuple[str, str]] = {
    "canceled": ("batch_cancelled", "This request was not executed, as the batch was cancelled."),
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
}


def answered_line(api: Api, custom_id: str, answer: InternalAnswer) -> tuple[Counter, bytes]:
    """Returns how a request counts that was answered, and its line."""
    counter: Counter = "succeeded" if answer.status == 200 else "errored"
    # Joined as bytes: parsing and writing a long answer would stop the streams of others.
    head = b'{"custom_id":%b,' % to_json(custom_id)
    if api == "anthropic":
        kind, name = (b"succeeded", b"message") if counter == "succeeded" else (b"errored", b"error")
        return counter, b'%b"result":{"type":"%b","%b":%b}}\n' % (head, kind, name, answer.body)
    line = b'%b"id":%b,"response":{"status_code":%d,"request_id":%b,"body":%b},"error":null}\n'
    ids = (to_json(_request_id()), answer.status, to_json(answer.request_id), answer.body)
    return counter, line % (head, *ids)


def unanswered_line(api: Api, custom_id: str, reason: Reason) -> tuple[Counter, bytes]:
    """Returns how a request counts that was not run, and its line."""
    if api == "anthropic":
        value: dict[str, Any] = {"custom_id": custom_id, "result": {"type": reason}}
    else:
        code, message = _REASONS[reason]
        error = {"code": code, "message": message}
        value = {"custom_id": custom_id, "id": _request_id(), "response": None, "error": error}
    return reason, to_json(value) + b"\n"


def counter_of(value: dict[str, Any]) -> Counter:
    """Returns how the request of a line of the error file counts."""
    if "result" in value:
        counter: Counter = value["result"]["type"]
        return counter
    code = (value["error"] or {}).get("code")
    for name, (reason, _) in _REASONS.items():
        if reason == code:
            return name
    return "errored"


def usage_of(value: dict[str, Any]) -> TokenUsage:
    """Returns the tokens of a line of the output file; zeros in Anthropic's API, whose batches show none."""
    usage = ((value.get("response") or {}).get("body") or {}).get("usage") or {}
    prompt = usage.get("input_tokens_details") or usage.get("prompt_tokens_details") or {}
    output = usage.get("output_tokens_details") or usage.get("completion_tokens_details") or {}
    return TokenUsage(
        usage.get("input_tokens", usage.get("prompt_tokens", 0)),
        prompt.get("cached_tokens") or 0,
        usage.get("output_tokens", usage.get("completion_tokens", 0)),
        output.get("reasoning_tokens") or 0,
    )


def _request_id() -> str:
    return f"batch_req_{secrets.token_hex(16)}"
