"""Guards what clients may read of a failure: never where things are inside."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.schemas.errors import CONTEXT_LENGTH_EXCEEDED, ApiError

LEAKS = {
    "connect to unix:/run/user/0/moebius/gpu.sock failed": "connect to (internal) failed",
    "last error: ipv4:10.0.0.3:50051: refused": "last error: (internal) refused",
    "mailbox /dev/shm/moebius-8000-ab is gone": "mailbox (internal) is gone",
    "server at gpu-0.svc.local:50051 is gone": "server at (internal) is gone",
    "server at 10.1.2.3 is gone": "server at (internal) is gone",
    "server at [fe80::1]:80 is gone": "server at (internal) is gone",
    "file '/models/a/config.json': broken": "file '(internal)': broken",
}


@pytest.mark.parametrize("message", LEAKS)
def test_failures_name_no_place_inside(message: str) -> None:
    """Sockets, files and hosts are left out of every answer of the 5xx kind, in SSE events too."""
    assert ApiError(500, message).body()["error"]["message"] == LEAKS[message]


@pytest.mark.parametrize(
    "message", ["layer 3 of 48: NaN in 2/16 rows", "internal error: KeyError", "n/a: and/or 50% at 1.5e-3"]
)
def test_other_words_stay(message: str) -> None:
    """Numbers, fractions and names are no addresses."""
    assert ApiError(500, message).body()["error"]["message"] == message


def test_what_the_client_sent_is_repeated() -> None:
    """A 4xx speaks of the request: its paths and numbers stay."""
    assert ApiError(404, "unknown path: GET /v1/foo/bar").body()["error"]["message"].endswith("/v1/foo/bar")


def scope_of(path: str) -> dict[str, Any]:
    """Returns the scope of a request that has an id."""
    return {"type": "http", "path": path, "state": {"request_id": "r1"}}


@pytest.mark.parametrize(
    ("status", "sent", "kind"),
    [
        (400, 400, "invalid_request_error"),
        (401, 401, "authentication_error"),
        (404, 404, "not_found_error"),
        (413, 413, "request_too_large"),
        (415, 415, "invalid_request_error"),
        (429, 429, "rate_limit_error"),
        (500, 500, "api_error"),
        (502, 502, "api_error"),
        (503, 529, "overloaded_error"),
        (504, 504, "timeout_error"),
    ],
)
def test_anthropic_shape(status: int, sent: int, kind: str) -> None:
    """Paths of Anthropic's API fail in its envelope, with its statuses, and keep Retry-After."""
    response = ApiError(status, "why", retry_after_s=3).response(scope_of("/v1/messages/count_tokens"))
    assert (response.status_code, response.headers["Retry-After"]) == (sent, "3")
    assert json.loads(bytes(response.body)) == {
        "type": "error",
        "error": {"type": kind, "message": "why"},
        "request_id": "r1",
    }


def test_anthropic_prompt_too_long() -> None:
    """Claude Code shortens its conversation when an error says so in these words."""
    error = ApiError(400, "9 tokens", code=CONTEXT_LENGTH_EXCEEDED).response(scope_of("/v1/messages"))
    assert json.loads(bytes(error.body))["error"]["message"].startswith("prompt is too long: 9 tokens")


def test_ollama_shape() -> None:
    """Ollama's errors are one string, without places inside."""
    response = ApiError(500, "socket unix:/run/x.sock is gone").response(scope_of("/api/chat"))
    assert (response.status_code, json.loads(bytes(response.body))) == (
        500,
        {"error": "socket (internal) is gone"},
    )


def test_openai_shape_elsewhere() -> None:
    """All other paths, also ones that begin alike, have OpenAI's shape."""
    for path in ("/v1/chat/completions", "/v1/responses", "/apis", "/"):
        body = json.loads(bytes(ApiError(404, "no", param="p", code="c").response(scope_of(path)).body))
        assert body == {
            "error": {"message": "no", "type": "invalid_request_error", "param": "p", "code": "c"}
        }
