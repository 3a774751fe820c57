"""Limits the requests in flight and the bytes of their bodies, which bounds latency and memory.

Beyond a limit clients get 429 and retry later. A client that has less than an equal share of the places is
admitted all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.processes.shared import Places
from gateway.schemas.errors import ApiError
from gateway.telemetry.metrics import GatewayMetrics
from gateway.transport.streaming import ClientGone
from moebius.fair_shares import is_below_share

RETRY_AFTER_S = 1


class Admission:
    """Counts requests between `enter` and `leave`. Used on the event loop only, so it needs no lock."""

    def __init__(self, limit: int, metrics: GatewayMetrics, places: Places | None = None) -> None:
        """`limit` applies to all processes that share `places`; to this one alone when that is None."""
        self._limit = limit
        self._metrics = metrics
        self._places = places or Places()
        self._taken: Counter[str] = Counter()  # by client, in this process

    @property
    def in_flight(self) -> int:
        """The number of requests that have a place, those of other processes included."""
        return self._places.total

    def enter(self, client: str = "") -> None:
        """Takes a place. Raises ApiError 429 when all are taken and the client has its share."""
        own_limit = self._limit // self._places.count
        if self.in_flight >= self._limit and not is_below_share(self._taken, client, own_limit):
            self._metrics.rejected("gateway_queue_full")
            raise ApiError(
                429,
                f"the gateway already serves its limit of {self._limit} requests: try again later",
                code="queue_full",
                retry_after_s=RETRY_AFTER_S,
            )
        self._taken[client] += 1
        self._places.add(+1)

    def leave(self, client: str = "") -> None:
        """Frees this request's place for the next one in the queue."""
        self._taken[client] -= 1
        if not self._taken[client]:
            del self._taken[client]
        self._places.add(-1)


logger = structlog.get_logger(__name__)
# Probes and metrics are answered until the process ends.
_PROBES = frozenset({"/health", "/v1/health", "/ready", "/metrics", "/version"})
_RETRY_AFTER_S = 2
# Bounds how long a client that does not read its answer delays the shutdown.
_SEND_TIMEOUT_S = 1.0


def shutting_down() -> ApiError:
    """Returns the error of a request that came too late or could not be finished."""
    return ApiError(
        503,
        "the server is shutting down: send the request again",
        code="shutting_down",
        retry_after_s=_RETRY_AFTER_S,
    )


class Drain:
    """Tracks running requests and the state of the shutdown. Used in the event loop only."""

    def __init__(self) -> None:
        self.has_begun = False
        self.is_cut = False
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def in_flight(self) -> int:
        """The number of requests whose last byte has not been sent, probes left out."""
        return len(self._tasks)

    def begin(self) -> None:
        """Refuses new requests from now on."""
        self.has_begun = True

    def cut(self) -> None:
        """Ends the requests that still run, each with an error in the shape of its API."""
        self.is_cut = True
        for task in self._tasks:
            task.cancel()

    @contextlib.contextmanager
    def running(self, task: asyncio.Task[Any]) -> Iterator[None]:
        """Counts the request that `task` serves while the context is open."""
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)


class DrainMiddleware:
    """Applies a `Drain` to every request but probes; `failed` gets the status of each one that is cut."""

    def __init__(self, app: ASGIApp, drain: Drain, failed: Callable[[int], None]) -> None:
        self._app = app
        self._drain = drain
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http" or scope["path"] in _PROBES:
            await self._app(scope, receive, send)
            return
        if self._drain.has_begun:
            await _refuse(scope, receive, send)
            return
        task = asyncio.current_task()
        assert task is not None
        answer = _Answer(send)
        with self._drain.running(task):
            try:
                await self._app(scope, receive, answer.send)
            except asyncio.CancelledError:
                if not self._drain.is_cut:
                    raise
                task.uncancel()
                logger.warning("request ended by the shutdown", path=scope["path"], streamed=is_stream(scope))
                self._failed(503)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(answer.end(scope, receive), _SEND_TIMEOUT_S)


def is_stream(scope: Scope) -> bool:
    """Returns whether a stream answers the request; `RequestRun` notes how such a stream fails."""
    return "stream_failure" in scope.get("state", {})


class _Answer:
    """Tracks what has been sent of one answer."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_begun = False
        self._has_ended = False

    async def send(self, message: Message) -> None:
        """Passes a message on and notes it."""
        if message["type"] == "http.response.start":
            self._has_begun = True
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._has_ended = True

    async def end(self, scope: Scope, receive: Receive) -> None:
        """Sends the error in the form that fits what the client has received."""
        if not self._has_begun:
            await _refuse(scope, receive, self._send)
        elif is_stream(scope) and not self._has_ended:
            body = scope["state"]["stream_failure"](shutting_down())
            await self._send({"type": "http.response.body", "body": body, "more_body": False})


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    response = shutting_down().response(scope)
    # The client's next request is to reach another server, or this server's successor.
    response.headers["Connection"] = "close"
    await response(scope, receive, send)


_COMPRESSED = frozenset({"gzip", "x-gzip", "deflate", "compress", "x-compress", "br", "zstd"})
# The number of bodies of the largest size that may be in memory at once.
_LARGEST_AT_ONCE = 16


def too_large(most: int, what: str = "the body") -> ApiError:
    """Returns a 413 with the limit, bytes."""
    message = f"{what} is larger than {most / 2**20:g} MiB (max_body_mib)"
    return ApiError(413, message, code="request_too_large")


class BodyReceiver:
    """Counts the bytes of all bodies between their receipt and the end of their preparation."""

    def __init__(self, most: int) -> None:
        """`most`: bytes of a body without images."""
        self._most = most
        self.held = 0  # bytes

    @contextlib.asynccontextmanager
    async def receive(self, request: Request, extra: int = 0) -> AsyncIterator[list[bytes]]:
        """Yields the body's pieces, which count as long as the context is open.

        Args:
            request: whose body has not been read.
            extra: bytes allowed for images.
        Raises:
            ApiError: 413 as soon as it is known that the body is too large, 415 when it is compressed; 429
                when too much is held.
            ClientGone: the client disconnected before it was complete.
        """
        most = self._most + extra
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > most:
            raise too_large(most)
        encoding = request.headers.get("content-encoding", "")
        # Compared by name: some clients add a character set.
        if _COMPRESSED.intersection(part.strip() for part in encoding.lower().split(",")):
            raise ApiError(
                415,
                f"the body has Content-Encoding {encoding[:40]!r}: send it uncompressed, without this header",
                code="unsupported_content_encoding",
            )
        pieces: list[bytes] = []
        size = 0
        try:
            async for piece in request.stream():
                size += len(piece)
                self.held += len(piece)
                if size > most:
                    raise too_large(most)
                if self.held > _LARGEST_AT_ONCE * most:
                    raise ApiError(
                        429,
                        "too many large requests at once: try again later",
                        code="queue_full",
                        retry_after_s=RETRY_AFTER_S,
                    )
                pieces.append(piece)
            yield pieces
        except ClientDisconnect:
            raise ClientGone from None
        finally:
            self.held -= size
