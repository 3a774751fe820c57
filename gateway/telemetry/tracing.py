"""The span of an HTTP request, the root of its trace, and what it says of a generation.

OpenTelemetry's instrumentation of ASGI costs a tenth of a millisecond per request and a call per event of a
stream, which is too much for a gateway that answers a thousand requests a second.
"""

from __future__ import annotations

from opentelemetry import context, propagate, trace
from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.schemas.common import GenerationFields
from moebius.telemetry import tracer
from protos import engine_pb2

# Probes and scrapes repeat every few seconds.
_UNTRACED = frozenset({"/health", "/ping", "/ready", "/metrics", "/v1/live"})


class _Headers(Getter[list[tuple[bytes, bytes]]]):
    """Reads the trace context from a scope's headers."""

    def get(self, carrier: list[tuple[bytes, bytes]], key: str) -> list[str] | None:
        wanted = key.lower().encode("latin-1")
        return [value.decode("latin-1") for name, value in carrier if name == wanted] or None

    def keys(self, carrier: list[tuple[bytes, bytes]]) -> list[str]:
        return [name.decode("latin-1") for name, _ in carrier]


_HEADERS = _Headers()


class TracingMiddleware:
    """Makes the request's span current, as a child of the caller's; names and values follow OpenTelemetry's
    HTTP conventions."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http" or scope["path"] in _UNTRACED:
            await self._app(scope, receive, send)
            return
        parent = propagate.extract(scope["headers"], getter=_HEADERS)
        method, path = scope["method"], scope["path"]
        span = tracer().start_span(f"{method} {path}", context=parent, kind=SpanKind.SERVER)
        if span.is_recording():
            span.set_attributes(_attributes(scope))
            send = _noting_status(send, span)
        token = context.attach(trace.set_span_in_context(span, parent))
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(Status(StatusCode.ERROR, str(error)))
            raise
        finally:
            context.detach(token)
            span.end()


def _attributes(scope: Scope) -> dict[str, str | int]:
    """Returns the attributes that are known before the request is answered."""
    values: dict[str, str | int] = {
        "http.request.method": scope["method"],
        "url.path": scope["path"],
        "url.scheme": scope["scheme"],
        "network.protocol.version": scope["http_version"],
    }
    if scope.get("server"):
        values["server.address"], values["server.port"] = scope["server"][0], scope["server"][1] or 0
    if scope.get("client"):
        values["client.address"] = scope["client"][0]
    agents = _HEADERS.get(scope["headers"], "user-agent")
    if agents:
        values["user_agent.original"] = agents[0][:200]
    return values


def _noting_status(send: Send, span: Span) -> Send:
    async def noting(message: Message) -> None:
        if message["type"] == "http.response.start":
            status = message["status"]
            span.set_attribute("http.response.status_code", status)
            if status >= 500:
                span.set_attribute("error.type", str(status))
                span.set_status(Status(StatusCode.ERROR))
        await send(message)

    return noting


def describe_request(
    span: Span, operation: str, body: GenerationFields, params: engine_pb2.SamplingParams, model: str
) -> None:
    """Names the span `{operation} {model}` and records the request's parameters, never the content.

    `model` is the served one, for requests that name none.
    """
    if not span.is_recording():
        return
    name = body.model or model
    span.update_name(f"{operation} {name}")
    span.set_attributes(
        {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "moebius",
            "gen_ai.request.model": name,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.presence_penalty": params.presence_penalty,
            "gen_ai.request.frequency_penalty": params.frequency_penalty,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.request.stream": bool(body.stream),
            "gen_ai.request.stop_sequences": list(body.stop_strings()),
        }
    )
    if body.seed is not None:
        span.set_attribute("gen_ai.request.seed", body.seed)
    if body.user is not None:
        span.set_attribute("enduser.id", body.user)


def describe_response(
    span: Span, response_id: str, model: str, reasons: list[str], usage: dict[str, int]
) -> None:
    """Records the result; `usage` has input, output and cache_read token counts."""
    span.set_attributes(
        {
            "gen_ai.response.id": response_id,
            "gen_ai.response.model": model,
            "gen_ai.response.finish_reasons": reasons,
            "gen_ai.usage.input_tokens": usage["input"],
            "gen_ai.usage.output_tokens": usage["output"],
            "gen_ai.usage.cache_read.input_tokens": usage["cache_read"],
        }
    )


def describe_first_token(span: Span, seconds: float) -> None:
    """Records the time to the first token."""
    span.set_attribute("gen_ai.response.time_to_first_chunk", seconds)


def describe_failure(span: Span, kind: str, message: str) -> None:
    """Marks the span failed; `kind` is the error's code."""
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, message))
