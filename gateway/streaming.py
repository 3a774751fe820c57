"""Server-sent events, and answers that stop working as soon as the client is gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the chunks
}


class ClientGone(Exception):
    """The client closed the connection; nobody is left to answer."""


def event(payload: dict[str, Any]) -> bytes:
    """One SSE event. JSON escapes line breaks, so a payload is always one `data:` line."""
    return b"data: " + json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def wait_disconnect(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises ClientGone when the client leaves first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(wait_disconnect(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _cancel(task, gone)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancels tasks and waits until they have cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Sends an iterator of bytes, with a comment during silence; closes the iterator on disconnect."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        keepalive_s: float,
        on_close: Callable[[], Awaitable[None]],
        media_type: str = "text/event-stream",
        comment: bytes = KEEP_ALIVE,
    ) -> None:
        """`on_close` runs once the stream has ended for any reason, even if no event was sent."""
        super().__init__(headers=HEADERS, media_type=media_type)
        del self.headers["content-length"]  # set by Response for its empty body
        self._events = events
        self._keepalive_s = keepalive_s
        self._on_close = on_close
        self._comment = comment

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs until the iterator ends or the client is gone."""
        sending = asyncio.create_task(self._send(scope, send))
        gone = asyncio.create_task(wait_disconnect(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await _cancel(sending, gone)
            await self._on_close()

    async def _send(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        # What a stream consists of passes no middleware: none looks at it, and it is sent once per token.
        direct: Send = scope.get("state", {}).get("direct_send", send)
        async with (
            aclosing(self._events) as events,
            filled_silence(direct, self._keepalive_s, self._comment) as sent,
        ):
            async for data in events:
                await direct({"type": "http.response.body", "body": data, "more_body": True})
                sent.at = sent.now()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class LastSent:
    """When something was sent last, in the event loop's time; set by whoever sends."""

    def __init__(self) -> None:
        self.now = asyncio.get_running_loop().time
        self.at = self.now()


@asynccontextmanager
async def filled_silence(send: Send, interval_s: float, comment: bytes) -> AsyncIterator[LastSent]:
    """Sends `comment` after each `interval_s` of silence while it is open: proxies close idle lines."""
    sent = LastSent()

    async def fill() -> None:
        while True:
            left_s = sent.at + interval_s - sent.now()
            if left_s > 0:
                await asyncio.sleep(left_s)
                continue
            await send({"type": "http.response.body", "body": comment, "more_body": True})
            sent.at = sent.now()

    filling = asyncio.create_task(fill())
    try:
        yield sent
    finally:
        await _cancel(filling)


class DirectSend:
    """The outermost layer: gives streams the server's own `send`, for what no middleware has to see."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection."""
        if scope["type"] == "http":
            scope.setdefault("state", {})["direct_send"] = send
        await self._app(scope, receive, send)
