"""Server-sent events, and answers that stop working as soon as the client is gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

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
        sending = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(wait_disconnect(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await _cancel(sending, gone)
            await self._on_close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(keep_alive(self._events, self._keepalive_s, self._comment)) as events:
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def keep_alive(
    events: AsyncGenerator[bytes, None], interval_s: float, comment: bytes = KEEP_ALIVE
) -> AsyncGenerator[bytes, None]:
    """`events`, with `comment` after each `interval_s` of silence: proxies close idle lines."""
    pending: asyncio.Future[bytes] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait({pending}, timeout=interval_s)
            if not done:
                yield comment
                continue
            try:
                data = pending.result()
            except StopAsyncIteration:
                return
            finally:
                pending = None
            yield data
    finally:
        if pending is not None:
            await _cancel(pending)
        await events.aclose()
