"""The gateway's side of protos/engine.proto over grpc.aio."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from protos import engine_pb2, engine_pb2_grpc

SERVICE = "moebius.engine.v1.Engine"
# Prompts of any length and log-probabilities of long ones must pass: the default limit is 4 MiB.
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


class EngineClient:
    """One channel to one engine. Raises `grpc.aio.AioRpcError`; `errors.from_grpc` gives its HTTP meaning."""

    def __init__(self, address: str, keepalive_ms: int = KEEPALIVE_MS) -> None:
        """`address` is host:port or unix:path; the channel connects on first use, on the running loop."""
        self.address = address
        options = [*_CHANNEL_OPTIONS, ("grpc.keepalive_time_ms", keepalive_ms)]
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self._engine: Any = cast(Any, engine_pb2_grpc.EngineStub)(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        self._tracer = trace.get_tracer("moebius")

    async def model_info(self, timeout_s: float = 5.0) -> engine_pb2.GetModelInfoResponse:
        """Static facts of the served model."""
        answer = await self._engine.GetModelInfo(engine_pb2.GetModelInfoRequest(), timeout=timeout_s)
        return cast(engine_pb2.GetModelInfoResponse, answer)

    async def live(self, timeout_s: float = 5.0) -> engine_pb2.GetLiveResponse:
        """Load, and who computes the experts of each layer."""
        answer = await self._engine.GetLive(engine_pb2.GetLiveRequest(), timeout=timeout_s)
        return cast(engine_pb2.GetLiveResponse, answer)

    async def is_serving(self, timeout_s: float = 2.0) -> bool:
        """Whether the engine's health service reports SERVING; False when it can not be reached."""
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        try:
            answer = await self._health.Check(request, timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def generate(
        self, request: engine_pb2.GenerateRequest, context: Any = None
    ) -> AsyncIterator[engine_pb2.GenerateResponse]:
        """The engine's messages. Closing the iterator, or cancelling its task, cancels the call at once.

        No deadline: a long answer is not an error, and a client that gives up closes the iterator.

        Args:
            request: the prompt and sampling parameters.
            context: OpenTelemetry context that is the parent of the call's span; None: the current one.
        """
        # The span is not made current: an async generator may be closed from another context.
        span = self._tracer.start_span(f"{SERVICE}/Generate", context=context, kind=SpanKind.CLIENT)
        span.set_attributes({"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": "Generate"})
        carrier: dict[str, str] = {}
        propagate.inject(carrier, context=trace.set_span_in_context(span, context))
        call = self._engine.Generate(request, metadata=tuple(carrier.items()))
        try:
            async for response in call:
                yield response
            span.set_attribute("rpc.grpc.status_code", 0)
        except grpc.aio.AioRpcError as error:
            span.set_attribute("rpc.grpc.status_code", error.code().value[0])
            span.set_status(Status(StatusCode.ERROR, error.details()))
            raise
        finally:
            if not call.done():
                span.add_event("cancelled by the gateway")
                call.cancel()
            span.end()

    async def close(self) -> None:
        """Closes the channel; running calls end with CANCELLED."""
        await self._channel.close()
