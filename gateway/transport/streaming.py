"""Server-sent events; work for a request is cancelled as soon as its client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # else nginx buffers the chunks
}


class ClientGone(Exception):
    """The client closed the connection; no answer can be sent."""


def event(payload: dict[str, Any], name: str = "") -> bytes:
    """Returns one SSE event. JSON escapes line breaks, so a payload is always one `data:` line."""
    named = f"event: {name}\n".encode() if name else b""
    return b"%bdata: %b\n\n" % (named, to_json(payload))


def typed_event(name: str, payload: dict[str, Any]) -> bytes:
    """Returns a named event, whose data repeats the name as `type`."""
    return event({"type": name, **payload}, name)


# Work done on the event loop, while other streams wait: a number of tokens, with their alternatives. More
# goes to a thread, which yields to them every few milliseconds.
INLINE_TOKENS = 2048
_DEEPEST, _MAX_PARTS, _GROUP = 6, 256, 32


def encoded(value: Any, in_pieces: bool) -> bytes:
    """Returns `value` as JSON in UTF-8.

    `in_pieces`: encodes piece by piece, so that a thread that does this lets others run. The library's
    encoder blocks them until its end: 100 ms for the log-probabilities of 2000 tokens.
    """
    return b"".join(_pieces(value, 0)) if in_pieces else to_json(value)


def _pieces(value: Any, depth: int) -> Iterator[bytes]:
    if depth < _DEEPEST and isinstance(value, dict) and value:
        for number, (key, part) in enumerate(value.items()):
            yield b"%b%b:" % (b"," if number else b"{", to_json(str(key)))
            yield from _pieces(part, depth + 1)
        yield b"}"
    elif depth < _DEEPEST and isinstance(value, list) and value:
        size = 1 if len(value) <= _MAX_PARTS else _GROUP
        for start in range(0, len(value), size):
            yield b"," if start else b"["
            group = value[start : start + size]
            yield from _pieces(group[0], depth + 1) if size == 1 else (to_json(group)[1:-1],)
        yield b"]"
    else:
        yield to_json(value)


class LastEvent(bytes):
    """The last bytes of a stream, sent in one message with its end."""


class ClientWatch:
    """Notices when the client of one request disconnects: one task serves everything done for the request."""

    def __init__(self, receive: Receive) -> None:
        self._gone = asyncio.create_task(_wait_disconnect(receive))

    @staticmethod
    def of(scope: Scope, receive: Receive) -> ClientWatch:
        """Returns the request's watch, started at the first call; its body must have been read.

        It ends with the answer, since servers then report the client as gone.
        """
        state = scope.setdefault("state", {})
        if "client_watch" not in state:
            state["client_watch"] = ClientWatch(receive)
        watch = state["client_watch"]
        assert isinstance(watch, ClientWatch)
        return watch

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Cancels the current task's work in the context when the client leaves, and raises ClientGone."""
        task = asyncio.current_task()
        assert task is not None
        if self._gone.done():
            raise ClientGone
        inside, left = True, False

        def leave(_gone: asyncio.Task[None]) -> None:
            nonlocal left
            if inside:  # a scheduled callback runs even after its removal
                left = True
                task.cancel()

        self._gone.add_done_callback(leave)
        try:
            yield
        except asyncio.CancelledError:
            if left and task.uncancel() == 0:
                raise ClientGone from None
            raise
        finally:
            inside = False
            self._gone.remove_done_callback(leave)


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`; cancels it and raises ClientGone when the client leaves first."""
    try:
        with ClientWatch.of(request.scope, request.receive).guard():
            return await work
    finally:
        work.close()  # if it never started


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
        try:
            with contextlib.suppress(ClientGone), ClientWatch.of(scope, receive).guard():
                # In a task of its own: else its wake-up per token would pass through all middleware.
                await asyncio.create_task(self._send(scope, send))
        finally:
            await self._on_close()

    async def _send(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        # Bytes of a stream bypass the middleware: none looks at them, and they are sent once per token.
        direct: Send = scope["state"].get("direct_send", send)
        last = b""
        async with (
            aclosing(self._events) as events,
            filled_silence(direct, self._keepalive_s, self._comment) as sent,
        ):
            async for data in events:
                if isinstance(data, LastEvent):
                    last = data
                    break
                await direct({"type": "http.response.body", "body": data, "more_body": True})
                sent.at = sent.now()
        await send({"type": "http.response.body", "body": last, "more_body": False})


class LastSent:
    """The time of the last message, in the event loop's time; set by the sender."""

    def __init__(self) -> None:
        self.now = asyncio.get_running_loop().time
        self.at = self.now()


@asynccontextmanager
async def filled_silence(send: Send, interval_s: float, comment: bytes) -> AsyncIterator[LastSent]:
    """Sends `comment` after each `interval_s` of silence while it is open: proxies close idle lines."""
    sent = LastSent()
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None
    filling: asyncio.Task[None] | None = None  # only set while a comment is sent

    async def fill() -> None:
        await send({"type": "http.response.body", "body": comment, "more_body": True})
        sent.at = sent.now()
        look()

    def look() -> None:
        nonlocal timer, filling
        left_s = sent.at + interval_s - sent.now()
        if left_s > 0:
            timer = loop.call_later(left_s, look)
        else:
            filling = asyncio.create_task(fill())

    look()
    try:
        yield sent
    finally:
        if filling is not None:
            filling.cancel()
            await asyncio.gather(filling, return_exceptions=True)
        if timer is not None:
            timer.cancel()


class DirectSend:
    """The outermost layer: gives streams the server's own `send`, bypassing the middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection."""
        if scope["type"] == "http":
            scope.setdefault("state", {})["direct_send"] = send
        await self._app(scope, receive, send)
