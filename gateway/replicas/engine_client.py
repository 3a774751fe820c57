"""The gateway's side of protos/engine.proto over grpc.aio."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from itertools import count
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from gateway.schemas.errors import is_lost
from moebius.network.grpc_channels import open_aio_channel, report_failed_handshake
from moebius.network.outbox import Arrival, Outbox
from moebius.network.tls import active_tls
from moebius.process.operations import NOT_READY_METADATA
from protos import engine_pb2, engine_pb2_grpc

SERVICE = "moebius.engine.v1.Engine"
# Long prompts and their log-probabilities must fit: the default limit is 4 MiB.
_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # An engine that restarts is found again within a second, not after the default back-off of minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Without this, pings of a silent stream become rarer after the second one.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_timeout_ms", 10_000),
]
# A stream may be silent through a long prefill: pings tell a slow engine from a lost host.
KEEPALIVE_MS = 30_000


# Larger requests have a call of their own: on the common stream they would delay the others.
_SHARED_BYTES = 2**18
_PIECE_BYTES = 2**18  # of an image, in one message
_UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
_CODES = {code.value[0]: code for code in grpc.StatusCode}


def call_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    """Returns the failure of one call of the shared stream, as gRPC would report it for a single call."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class _Unsupported(Exception):
    """The engine has no GenerateMany; nothing was sent to it."""


class _StreamedCall(Arrival):
    """One call on the shared stream, with the updates not read yet. Filled by `_ManyCalls`."""

    __slots__ = ("_latest", "ended", "updates")

    def __init__(self) -> None:
        super().__init__()
        self.updates: deque[engine_pb2.GenerateResponse] = deque()
        self.ended: Exception | bool = False  # True: without an error
        # The latest of the updates that was no token alone.
        self._latest = engine_pb2.GenerateResponse()

    def put(self, update: engine_pb2.CallUpdate) -> None:
        """Takes the next update."""
        if update.HasField("end"):
            self.end(call_error(_CODES[update.end.code], update.end.details) if update.end.code else True)
            return
        self._latest = update.response
        self.updates.append(self._latest)
        self.wake()

    def put_token(self, token_id: int, completion_tokens: int) -> None:
        """Takes the next token of the only output; else its chunk is like the one before it."""
        response, before = engine_pb2.GenerateResponse(), self._latest.chunk
        chunk = response.chunk
        chunk.token_ids.append(token_id)
        chunk.completion_tokens = completion_tokens
        chunk.prompt_tokens = before.prompt_tokens
        if before.cached_tokens:
            chunk.cached_tokens = before.cached_tokens
        self.updates.append(response)
        self.wake()

    def end(self, reason: Exception | bool) -> None:
        """Marks the call as ended: no more updates follow."""
        self.ended = reason
        self.wake()


class _ManyCalls:
    """Runs all small calls to one engine over a common stream, which is opened again after its end."""

    def __init__(self, engine: Any) -> None:
        """`engine` is the stub."""
        self._engine = engine
        self._calls: dict[int, _StreamedCall] = {}
        self._numbers = count(1)
        self._outbox: Outbox[engine_pb2.CallRequest] = Outbox()
        self._running: asyncio.Task[None] | None = None
        self.is_supported = True

    async def generate(
        self, request: engine_pb2.GenerateRequest
    ) -> AsyncGenerator[engine_pb2.GenerateResponse, None]:
        """Calls `Engine.Generate`. Raises AioRpcError, or _Unsupported before anything was sent."""
        if self._running is None:
            self._outbox = Outbox()
            self._running = asyncio.create_task(self._run(self._outbox))
        outbox, number, call = self._outbox, next(self._numbers), _StreamedCall()
        self._calls[number] = call
        outbox.put(engine_pb2.CallRequest(call=number, start=request))
        updates = call.updates
        try:
            while True:
                while updates:
                    yield updates.popleft()
                if isinstance(call.ended, Exception):
                    raise call.ended
                if call.ended:
                    return
                await call.wait()
        finally:
            if self._calls.pop(number, None) is not None and not call.ended:
                outbox.put(engine_pb2.CallRequest(call=number, cancel=True))

    async def _run(self, outbox: Outbox[engine_pb2.CallRequest]) -> None:
        """Runs one stream until it ends, and its calls with it."""
        end: Exception = call_error(grpc.StatusCode.UNAVAILABLE, "the engine closed the stream")
        stream = self._engine.GenerateMany()
        writing = asyncio.create_task(_write(stream, outbox))
        try:
            async for message in stream:
                for update in message.updates:
                    self._take(update)
        except grpc.aio.AioRpcError as error:
            end = error
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                self.is_supported = False
                end = _Unsupported()
        except asyncio.CancelledError:
            end = call_error(grpc.StatusCode.CANCELLED, "the gateway is closing")
        finally:
            self._running = None
            writing.cancel()
            outbox.close()
            calls, self._calls = self._calls, {}
            for call in calls.values():
                call.end(call.ended or end)

    def _take(self, update: engine_pb2.CallUpdate) -> None:
        if update.HasField("tokens"):
            columns = update.tokens.calls, update.tokens.token_ids, update.tokens.completion_tokens
            for number, token_id, count in zip(*columns, strict=True):
                if (call := self._calls.get(number)) is not None:
                    call.put_token(token_id, count)
        elif (call := self._calls.get(update.call)) is not None:
            call.put(update)

    async def close(self) -> None:
        """Ends the stream and its calls."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)


async def _write(stream: Any, outbox: Outbox[engine_pb2.CallRequest]) -> None:
    """Sends all that waits in one message, until the stream ends; the reader reports why it did."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while requests := await outbox.take():
            await stream.write(engine_pb2.GenerateManyRequest(requests=requests, takes_tokens=True))


async def _write_with_images(call: Any, request: engine_pb2.GenerateRequest, images: Sequence[bytes]) -> None:
    """Sends request and files in pieces, so that others are served in between; the call's reader reports a
    failure."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(engine_pb2.GenerateWithImagesRequest(request=request))
        for number, data in enumerate(images):
            for start in range(0, len(data), _PIECE_BYTES):
                piece = engine_pb2.ImagePiece(image=number, data=data[start : start + _PIECE_BYTES])
                await call.write(engine_pb2.GenerateWithImagesRequest(piece=piece))
        await call.done_writing()


class EngineClient:
    """One channel to one engine. Methods raise `grpc.aio.AioRpcError`; `errors.from_grpc` maps it to HTTP."""

    def __init__(self, address: str, keepalive_ms: int = KEEPALIVE_MS, server_name: str = "") -> None:
        """`address` is host:port or unix:path; the channel connects on first use, on the running loop.

        `server_name`: the name that its certificate must have, if not the address's host.
        """
        self.address = address
        # The engine's reason for not serving, as of the last `is_serving`; empty: none.
        self.not_ready = ""
        options = [*_CHANNEL_OPTIONS, ("grpc.keepalive_time_ms", keepalive_ms)]
        self._channel = open_aio_channel(address, options, server_name)
        self._engine: Any = cast(Any, engine_pb2_grpc.EngineStub)(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        self._many = _ManyCalls(self._engine)
        self._tracer = trace.get_tracer("moebius")

    async def model_info(self, timeout_s: float = 5.0) -> engine_pb2.GetModelInfoResponse:
        """Returns the static facts of the served model."""
        answer = await self._engine.GetModelInfo(engine_pb2.GetModelInfoRequest(), timeout=timeout_s)
        return cast(engine_pb2.GetModelInfoResponse, answer)

    async def live(self, timeout_s: float = 5.0) -> engine_pb2.GetLiveResponse:
        """Returns the load, and where the experts of each layer are computed."""
        answer = await self._engine.GetLive(engine_pb2.GetLiveRequest(), timeout=timeout_s)
        return cast(engine_pb2.GetLiveResponse, answer)

    async def metrics(self, timeout_s: float = 2.0) -> engine_pb2.GetMetricsResponse:
        """Returns the counters of the engine and its expert servers."""
        answer = await self._engine.GetMetrics(engine_pb2.GetMetricsRequest(), timeout=timeout_s)
        return cast(engine_pb2.GetMetricsResponse, answer)

    async def abort(self, request_ids: Sequence[str], timeout_s: float = 2.0) -> None:
        """Ends requests by their ids; unknown ones are ignored."""
        await self._engine.Abort(engine_pb2.AbortRequest(request_ids=request_ids), timeout=timeout_s)

    async def flush_cache(self, timeout_s: float = 30.0) -> int:
        """Drops cached prefixes that no request holds; returns how many tokens they had."""
        answer = await self._engine.FlushCache(engine_pb2.FlushCacheRequest(), timeout=timeout_s)
        return int(answer.freed_tokens)

    async def put_to_sleep(self, force: bool) -> None:
        """Returns when no request runs and the engine gives back its memory, however long they take."""
        await self._engine.Sleep(engine_pb2.SleepRequest(force=force))

    async def wake_up(self) -> None:
        """Returns when the model is in memory again, however long that takes."""
        await self._engine.WakeUp(engine_pb2.WakeUpRequest())

    async def load(self, timeout_s: float = 2.0) -> engine_pb2.GetLoadResponse:
        """Returns current queues and cache occupancy."""
        answer = await self._engine.GetLoad(engine_pb2.GetLoadRequest(), timeout=timeout_s)
        return cast(engine_pb2.GetLoadResponse, answer)

    async def is_serving(self, timeout_s: float = 2.0) -> bool:
        """Returns whether the engine's health service reports SERVING; False when it cannot be reached."""
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        try:
            call = self._health.Check(request, timeout=timeout_s)
            answer = await call
            reason = dict(await call.trailing_metadata() or ()).get(NOT_READY_METADATA, b"")
        except grpc.aio.AioRpcError:
            self.not_ready = ""
            if active_tls() is None:  # with TLS the channel reports handshake errors
                report_failed_handshake(self.address, None)
            return False
        self.not_ready = bytes(reason).decode(errors="replace")
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def generate(
        self, request: engine_pb2.GenerateRequest, context: Any = None, images: Sequence[bytes] = ()
    ) -> AsyncGenerator[engine_pb2.GenerateResponse, None]:
        """Yields the engine's messages. Closing the iterator, or cancelling its task, cancels the call.

        There is no deadline: a long answer is not an error, and a client that gives up closes the iterator.

        Args:
            request: the prompt and sampling parameters.
            context: OpenTelemetry context that is the parent of the call's span; None: the current one.
            images: the files of `request.images`, which then have no data.
        """
        span = self._span(context)
        carrier: dict[str, str] = {}
        propagate.inject(carrier, context=trace.set_span_in_context(span, context))
        request.trace_context.update(carrier)
        ended = False
        try:
            for way in self._ways(request, carrier, images):
                with contextlib.suppress(_Unsupported):
                    async with aclosing(way) as responses:
                        async for response in responses:
                            yield response
                    break
            ended = True
            span.set_attribute("rpc.grpc.status_code", 0)
        except grpc.aio.AioRpcError as error:
            ended = True
            span.set_attribute("rpc.grpc.status_code", error.code().value[0])
            span.set_status(Status(StatusCode.ERROR, error.details()))
            if is_lost(error) and error.code() not in (_UNAVAILABLE, grpc.StatusCode.CANCELLED):
                # A call lost in the middle of a stream has other codes, on which no other engine is tried.
                raise call_error(_UNAVAILABLE, error.details() or "") from error
            raise
        finally:
            if not ended:
                span.add_event("cancelled by the gateway")
            span.end()

    def _span(self, context: Any) -> Span:
        """Returns the call's span, not made current: an async generator may be closed from another context.

        A parent that is not sampled is returned itself, since its child would not be sampled either.
        """
        parent = trace.get_current_span(context)
        if parent.get_span_context().is_valid and not parent.get_span_context().trace_flags.sampled:
            return parent
        span = self._tracer.start_span(f"{SERVICE}/Generate", context=context, kind=SpanKind.CLIENT)
        span.set_attributes({"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": "Generate"})
        return span

    def _ways(
        self, request: engine_pb2.GenerateRequest, metadata: dict[str, str], images: Sequence[bytes]
    ) -> Iterator[AsyncGenerator[engine_pb2.GenerateResponse, None]]:
        """Yields the ways to make the call: the common stream for a small request, then an own call."""
        if not images and self._many.is_supported and request.ByteSize() <= _SHARED_BYTES:
            yield self._many.generate(request)
        yield self._own_call(request, metadata, images)

    async def _own_call(
        self, request: engine_pb2.GenerateRequest, metadata: dict[str, str], images: Sequence[bytes]
    ) -> AsyncGenerator[engine_pb2.GenerateResponse, None]:
        headers = tuple(metadata.items())
        if images:
            call = self._engine.GenerateWithImages(metadata=headers)
        else:
            call = self._engine.Generate(request, metadata=headers)
        try:
            if images:
                await _write_with_images(call, request, images)
            async for response in call:
                yield response
        finally:
            if not call.done():
                call.cancel()

    async def close(self) -> None:
        """Closes the channel; running calls end with CANCELLED."""
        await self._many.close()
        await self._channel.close()
