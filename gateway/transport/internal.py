"""Requests of this process to its own application: those of batches take the way of all others."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message

# Where the state of a request's scope has its `InternalCaller`; that of a client's has none.
CALLER = "internal_caller"


@dataclass
class TokenUsage:
    """Tokens of one request or of many."""

    input_tokens: int = 0
    cached_tokens: int = 0  # of input_tokens
    output_tokens: int = 0
    reasoning_tokens: int = 0  # of output_tokens

    def add(self, other: TokenUsage) -> None:
        """Adds another one's tokens."""
        self.input_tokens += other.input_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens
        self.reasoning_tokens += other.reasoning_tokens


@dataclass
class InternalCaller:
    """For whom one request is made; only code of this process can put it into a request's scope."""

    key_name: str  # of the API key that asked for it; empty: none was required
    # Filled by the serving code: reading it in a long answer would stop the streams of others.
    usage: TokenUsage = field(default_factory=TokenUsage)


@dataclass(frozen=True)
class InternalAnswer:
    """The answer to such a request; filled by `InternalClient`."""

    status: int
    headers: dict[str, str]  # names in small letters
    body: bytes

    @property
    def request_id(self) -> str:
        """The request's id in the log."""
        return self.headers.get("x-request-id", "")


class InternalClient:
    """Sends requests to the application, without a connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def post(self, path: str, body: bytes, caller: InternalCaller) -> InternalAnswer:
        """Returns the answer to a body of JSON; cancelling it is like a client that leaves."""
        answered = asyncio.Event()
        received = False
        status, headers = 500, dict[str, str]()
        pieces: list[bytes] = []

        async def receive() -> Message:
            nonlocal received
            if not received:
                received = True
                return {"type": "http.request", "body": body, "more_body": False}
            await answered.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers.update({name.decode(): value.decode() for name, value in message["headers"]})
            elif message["type"] == "http.response.body":
                pieces.append(message.get("body", b""))

        try:
            await self._app(_scope(path, len(body), caller), receive, send)
        finally:
            answered.set()
        return InternalAnswer(status, headers, b"".join(pieces))


def _scope(path: str, size: int, caller: InternalCaller) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(size).encode())],
        "client": None,
        "server": None,
        "state": {CALLER: caller},
    }
