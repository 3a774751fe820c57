"""Responses that clients do not wait for: generated here, their events and end stored for any process."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncGenerator
from typing import Any

import structlog
from starlette.requests import Request
from starlette.types import Message

from gateway.apis.response_events import ResponseEvents
from gateway.apis.responses_format import ResponsesFormat
from gateway.app.serving import RequestRun
from gateway.app.state import Gateway, responses_of
from gateway.generation.job import Prepared
from gateway.schemas.errors import ApiError, to_api_error
from gateway.transport.admission import RETRY_AFTER_S, shutting_down
from gateway.transport.streaming import ClientGone

logger = structlog.get_logger(__name__)
_FLUSH_S = 0.1  # between two writes of events
_POLL_S = 0.1  # between two looks for further events
_BEAT_S = 1.0  # longest time without a sign of life
_BUSY = frozenset({429, 503})
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


class BackgroundResponses:
    """The background responses that this process generates."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, request: Request, prepared: Prepared, form: ResponsesFormat) -> dict[str, Any]:
        """Begins to generate a response. Returns it as it is now: queued.

        Raises ApiError 429 where too many are queued, 503 when it cannot be stored.
        """
        most = self._gateway.config.gateway.max_queued_requests
        if len(self._tasks) >= most:
            message = f"{most} background responses are in progress: try again later"
            raise ApiError(429, message, code="queue_full", retry_after_s=RETRY_AFTER_S)
        response = form.begun("queued")
        events = ResponseEvents(responses_of(request))
        items = form.reply.input_items
        assert items is not None, "background responses are stored"
        if not await asyncio.to_thread(events.begin, response, items):
            message = "the response cannot be stored, which 'background' needs"
            raise ApiError(503, message, param="background", code="storage_unavailable", retry_after_s=2)
        run = _Run(self._gateway, _detached(request), prepared, form, events)
        task = asyncio.create_task(run.run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return response


def _detached(request: Request) -> Request:
    """Returns the request as one whose client never leaves."""
    scope = {**request.scope, "state": dict(request.scope["state"])}
    for name in ("client_watch", "direct_send", "stream_failure"):
        scope["state"].pop(name, None)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("nothing sets this event")

    return Request(scope, receive)


class _Run:
    """One response while it is generated."""

    def __init__(
        self,
        gateway: Gateway,
        request: Request,
        prepared: Prepared,
        form: ResponsesFormat,
        events: ResponseEvents,
    ) -> None:
        self._gateway = gateway
        self._request = request
        self._prepared = prepared
        self._form = form
        self._events = events
        self._new: list[bytes] = []  # events that are not yet stored
        self._stored = 0  # number of events that are
        self._is_cancelled = self._has_ended = False
        self._generating: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Generates the response; whatever happens, it has an end in the store."""
        task = asyncio.current_task()
        assert task is not None
        with self._gateway.drain.running(task):
            self._generating = asyncio.create_task(self._generate())
            writing = asyncio.create_task(self._write())
            try:
                await self._generating
            except asyncio.CancelledError:
                if not self._is_cancelled:  # the shutdown ends it
                    self._generating.cancel()
                    await asyncio.gather(self._generating, return_exceptions=True)
                    self._fail(shutting_down())
            except Exception as error:
                self._fail(to_api_error(error))
            self._has_ended = True
            await asyncio.gather(writing, return_exceptions=True)
            if self._is_cancelled:
                self._form.cancel()
            await self._end()

    def _fail(self, error: ApiError) -> None:
        self._take(self._form.stream_failure(error))

    async def _end(self) -> None:
        try:
            await self._store()
            await self._form.settle()
            await asyncio.to_thread(self._events.end, self._form.id)
        except (sqlite3.Error, OSError) as error:
            logger.error("a background response cannot be stored", reason=str(error))

    async def _generate(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            run = RequestRun(self._gateway, self._gateway.model(), self._prepared, self._form)
            try:
                response = await run.respond(self._request)
                break
            except Exception as error:
                if to_api_error(error).status not in _BUSY or self._gateway.drain.has_begun:
                    raise
            await asyncio.sleep(pause_s)  # it stays queued
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

        async def send(message: Message) -> None:
            self._take(message.get("body", b""))

        with contextlib.suppress(ClientGone):
            await response(self._request.scope, self._request.receive, send)

    def _take(self, data: bytes) -> None:
        """Takes bytes of the stream: whole events, or a comment during silence."""
        self._new += [one + b"\n\n" for one in data.split(b"\n\n") if one.startswith(b"event:")]

    async def _store(self) -> bool:
        """Stores new events. Returns whether the response is to be cancelled. Raises sqlite3.Error."""
        new, self._new = self._new, []
        first, self._stored = self._stored, self._stored + len(new)
        items = self._form.reply.input_items
        if new and not first and items is not None and not self._form.is_done:
            await asyncio.to_thread(self._events.store.put, self._form.begun("in_progress"), items)
        return await asyncio.to_thread(self._events.add, self._form.id, first, new)

    async def _write(self) -> None:
        """Stores events as they come, until the response is cancelled by a client."""
        loop = asyncio.get_running_loop()
        beat_at = 0.0
        while not self._has_ended:
            await asyncio.sleep(_FLUSH_S)
            if not self._new and loop.time() < beat_at + _BEAT_S:
                continue
            beat_at = loop.time()
            try:
                is_unwanted = await self._store()
            except (sqlite3.Error, OSError) as error:
                logger.warning("events of a background response cannot be stored", reason=str(error))
                continue
            if is_unwanted and self._generating is not None:
                self._is_cancelled = True
                self._generating.cancel()
                return


async def events_after(events: ResponseEvents, response_id: str, number: int) -> AsyncGenerator[bytes, None]:
    """Yields the events behind the one with this number, until the response has ended."""
    while True:
        found, may_continue = await asyncio.to_thread(events.after, response_id, number)
        for found_number, data in found:
            yield data
            number = found_number
        if not may_continue:
            return
        if not found:
            await asyncio.sleep(_POLL_S)
