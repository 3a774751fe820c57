"""Attributes of the HTTP span, named by OpenTelemetry's GenAI semantic conventions."""

from __future__ import annotations

from opentelemetry.trace import Span, Status, StatusCode

from gateway.schemas.common import GenerationFields
from protos import engine_pb2


def describe_request(
    span: Span, operation: str, body: GenerationFields, params: engine_pb2.SamplingParams
) -> None:
    """Names the span `{operation} {model}` and records what was asked for; never the content."""
    if not span.is_recording():
        return
    span.update_name(f"{operation} {body.model}")
    span.set_attributes(
        {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "moebius",
            "gen_ai.request.model": body.model,
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
    """Records what came out; `usage` has input, output and cache_read token counts."""
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
    """Records how long the first token took."""
    span.set_attribute("gen_ai.response.time_to_first_chunk", seconds)


def describe_failure(span: Span, kind: str, message: str) -> None:
    """Marks the span failed; `kind` is the error's code."""
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, message))
