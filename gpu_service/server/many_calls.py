"""`Engine.GenerateMany`: many Generate calls over one gRPC stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import structlog

from moebius.outbox import Outbox
from protos import engine_pb2 as pb

_log = structlog.get_logger(__name__)


class _Refused(Exception):
    """What `abort` of a call's context raises."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(code, details)
        self.code, self.details = code, details


class CallContext:
    """Stands for the context of one call, with the methods of grpc.aio's that Generate uses."""

    def invocation_metadata(self) -> tuple[()]:
        """A call among others has none."""
        return ()

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """Ends the call with this status."""
        raise _Refused(code, details)


class ManyCalls:
    """The calls of one stream; lives as long as that does."""

    def __init__(
        self, generate: Callable[[pb.GenerateRequest, Any], AsyncIterator[pb.GenerateResponse]]
    ) -> None:
        """`generate` answers one call, as the servicer's Generate."""
        self._generate = generate
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._outbox: Outbox[pb.CallUpdate] = Outbox()
        self._finishing = False

    def finish(self) -> None:
        """The stream ends as soon as no call runs: the process is ending and refuses new ones."""
        self._finishing = True
        if not self._calls:
            self._outbox.close()

    async def serve(
        self, requests: AsyncIterator[pb.GenerateManyRequest]
    ) -> AsyncGenerator[pb.GenerateManyResponse, None]:
        """Runs until the client closes its side and all calls have ended, or the stream ends; then no call
        goes on."""
        reading = asyncio.create_task(self._read(requests))
        try:
            while updates := await self._outbox.take():
                yield pb.GenerateManyResponse(updates=updates)
        finally:
            tasks = [reading, *self._calls.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[pb.GenerateManyRequest]) -> None:
        try:
            async for message in requests:
                for request in message.requests:
                    self._take(request)
            await asyncio.gather(*self._calls.values(), return_exceptions=True)
        finally:
            self._outbox.close()

    def _take(self, request: pb.CallRequest) -> None:
        number = request.call
        if request.WhichOneof("kind") == "cancel":
            if task := self._calls.get(number):
                task.cancel()
        elif number in self._calls:
            self._end(
                number, grpc.StatusCode.ALREADY_EXISTS, f"call: {number} is the number of a running call"
            )
        else:
            self._calls[number] = asyncio.create_task(self._run(number, request.start))

    async def _run(self, number: int, request: pb.GenerateRequest) -> None:
        try:
            context = CallContext()
            async with aclosing(self._generate(request, context)) as responses:  # type: ignore[type-var]
                async for response in responses:
                    self._outbox.put(pb.CallUpdate(call=number, response=response))
            self._end(number, grpc.StatusCode.OK, "")
        except _Refused as error:
            self._end(number, error.code, error.details)
        except Exception as error:
            _log.error("unexpected error", exc_info=error)
            self._end(number, grpc.StatusCode.UNKNOWN, f"unexpected {type(error).__name__}: {error}")
        finally:
            self._calls.pop(number, None)
            if self._finishing and not self._calls:
                self._outbox.close()

    def _end(self, number: int, code: grpc.StatusCode, details: str) -> None:
        end = pb.CallEnd(code=code.value[0], details=details)
        self._outbox.put(pb.CallUpdate(call=number, end=end))
