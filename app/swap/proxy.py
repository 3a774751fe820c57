"""Passes a request on to its model's own server, and the answer back as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import httpx
import structlog
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from app.swap.pool import CannotLoad, ModelPool
from gateway.schemas.errors import ApiError
from gateway.transport.streaming import run_until_disconnect

_log = structlog.get_logger(__name__)
# Of one connection, RFC 9110 section 7.6.1; and what our port has judged already.
_OWN_HEADERS = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
        *("transfer-encoding", "upgrade", "host", "content-length", "expect"),
        *("origin", "sec-fetch-site", "x-forwarded-host", "x-forwarded-for", "x-request-id"),
    }
)
_MODEL = re.compile(rb'"model"\s*:\s*"((?:[^"\\]|\\.)*)"')
# Streams whose comments clients skip.
_COMMENTED = frozenset({"/v1/chat/completions", "/v1/completions", "/chat/completions", "/completions"})
_STREAMED = re.compile(rb'"stream"\s*:\s*true')


def model_in(body: bytes) -> str | None:
    """Returns the model that a body of JSON names; None: none, or it is no JSON object.

    Reading all of a large body would stop the streams of others: where a single text is a model's name, the
    search for it is enough.
    """
    named = set(_MODEL.findall(body))
    if not named:
        return None
    try:
        found = json.loads(b'"%b"' % named.pop() if len(named) == 1 else body)
    except ValueError:
        return None
    if isinstance(found, dict):
        found = found.get("model")
    return found if isinstance(found, str) else None


class Proxy:
    """Sends requests to models, once they are loaded."""

    def __init__(
        self, pool: ModelPool, urls: Mapping[str, str], progress: Callable[[str], str], keepalive_s: float
    ) -> None:
        """`progress`: what a model's start is at; `keepalive_s`: from one comment about it to the next."""
        self._pool, self._urls, self._progress = pool, urls, progress
        self._keepalive_s = keepalive_s
        # A long answer is not an error, and the number of connections is limited at our port.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(trust_env=False, timeout=None, limits=limits)

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def answer(self, request: Request, name: str, body: Sequence[bytes]) -> Response:
        """Returns the model's answer. A stream that waits for its model says so in comments.

        Raises:
            ApiError: 503, the model cannot be loaded, or has ended.
            ClientGone: the client left.
        """
        whole = b"".join(body)
        if request.url.path in _COMMENTED and _STREAMED.search(whole):
            return await self._commented(request, name, whole)
        stack, answer = await run_until_disconnect(request, self._asked(request, name, whole))
        return _response(stack, answer)

    async def _asked(self, request: Request, name: str, body: bytes) -> tuple[AsyncExitStack, httpx.Response]:
        """Returns the beginning of the answer, and what ends the request.

        A model that has ended unseen is loaded again for it, once.
        """
        try:
            try:
                return await self._sent(request, name, body)
            except httpx.ConnectError:
                self._pool.lost(name)
                return await self._sent(request, name, body)
        except CannotLoad as error:
            raise ApiError(503, str(error), code="model_not_loaded", retry_after_s=5) from None
        except httpx.HTTPError as error:
            _log.warning("model is lost", model=name, reason=f"{type(error).__name__}: {error}")
            raise ApiError(503, f"{name} was lost", code="engine_unavailable", retry_after_s=2) from None

    async def _sent(self, request: Request, name: str, body: bytes) -> tuple[AsyncExitStack, httpx.Response]:
        """Sends the request once its model is loaded. Raises CannotLoad, httpx.HTTPError."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._pool.lease(name))
            url = f"{self._urls[name]}{_target(request)}"
            headers = _passed_on(request)
            sent = self._http.build_request(request.method, url, headers=headers, content=body)
            answer = await self._http.send(sent, stream=True)
            stack.push_async_callback(answer.aclose)
            return stack.pop_all(), answer
        raise AssertionError("it returns or raises")

    async def _commented(self, request: Request, name: str, body: bytes) -> Response:
        """Returns a stream's answer, which begins with comments where its model has to be loaded first."""
        asked = asyncio.ensure_future(self._asked(request, name, body))
        opened = False
        try:
            await run_until_disconnect(request, _within(asked, self._keepalive_s))
            opened = True
        finally:
            if not opened:
                await _given_up(asked)
        if asked.done():
            stack, answer = asked.result()
            return _response(stack, answer)
        headers = {"X-Accel-Buffering": "no", "Cache-Control": "no-cache"}
        return _Ending(
            self._events(asked, name),
            partial(_given_up, asked),
            media_type="text/event-stream",
            headers=headers,
        )

    async def _events(
        self, asked: asyncio.Future[tuple[AsyncExitStack, httpx.Response]], name: str
    ) -> AsyncIterator[bytes]:
        while not asked.done():
            yield f": {name}: {self._progress(name) or 'waits for its turn'}\n\n".encode()
            await asyncio.wait({asked}, timeout=self._keepalive_s)
        try:
            _, answer = asked.result()
        except ApiError as error:
            yield _event(error.body())
            return
        if answer.status_code != httpx.codes.OK:
            yield _event(json.loads(await answer.aread()))
            return
        async for piece in answer.aiter_raw():
            yield piece


async def _within(asked: asyncio.Future[Any], seconds: float) -> None:
    """Waits for the answer's beginning, for a time; raises its failure."""
    await asyncio.wait({asked}, timeout=seconds)
    if asked.done():
        asked.result()


async def _given_up(asked: asyncio.Future[tuple[AsyncExitStack, httpx.Response]]) -> None:
    """Ends what is still going on; what has begun is closed."""
    asked.cancel()
    with contextlib.suppress(asyncio.CancelledError, ApiError):
        stack, _ = await asked
        await stack.aclose()


def _event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n".encode()


def _target(request: Request) -> str:
    """Returns path and query as the client has sent them."""
    path, query = request.scope["raw_path"].decode("latin-1"), request.url.query
    return f"{path}?{query}" if query else path


def _passed_on(request: Request) -> list[tuple[str, str]]:
    """Returns the client's headers, and its address for equal shares."""
    kept = [(name, value) for name, value in request.headers.items() if name not in _OWN_HEADERS]
    client = request.client.host if request.client is not None else ""
    return [*kept, ("x-forwarded-for", client), ("x-request-id", request.state.request_id)]


class _Ending(StreamingResponse):
    """A stream that ends what it is made from, also if none of it could be sent."""

    def __init__(
        self, pieces: AsyncIterator[bytes], end: Callable[[], Awaitable[None]], **given: Any
    ) -> None:
        super().__init__(pieces, **given)
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._end()


def _response(stack: AsyncExitStack, answer: httpx.Response) -> Response:
    response = _Ending(answer.aiter_raw(), stack.aclose, status_code=answer.status_code)
    headers = [(name.lower(), value) for name, value in answer.headers.raw]
    response.raw_headers = [(name, value) for name, value in headers if name not in _ENDED_HERE]
    return response


_ENDED_HERE = frozenset({b"connection", b"transfer-encoding", b"x-request-id", b"date", b"server"})
