"""HTTP routes of the APIs other than OpenAI's chat and text completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from gateway.apis import ollama
from gateway.apis.messages import MessagesFormat
from gateway.apis.ollama import OllamaFormat
from gateway.apis.registry import Kind
from gateway.app.openapi import refuses, takes
from gateway.app.serving import answered, respond
from gateway.app.state import gateway_of
from gateway.schemas.messages import CountTokensRequest, MessagesRequest
from gateway.schemas.ollama import OllamaChatRequest, OllamaGenerateRequest, OllamaModelRequest

router = APIRouter()


@router.post("/v1/messages", **takes(MessagesRequest))
async def create_message(request: Request) -> Response:
    """Answers Anthropic's Messages with the next message, whole or as a stream of events."""
    gateway = gateway_of(request)
    prepared = await gateway.generation(request, "messages")
    form = MessagesFormat(request.state.request_id, prepared.reply)
    return await respond(request, prepared, form)


@router.post("/v1/messages/count_tokens", **takes(CountTokensRequest))
async def count_tokens(request: Request) -> Response:
    """Counts the tokens of a conversation with its tools; each image counts as one."""
    return await answered(request, "count_tokens")


async def _generated(request: Request, kind: Kind) -> Response:
    gateway = gateway_of(request)
    prepared = await gateway.prepare(request, kind)
    if isinstance(prepared, bytes):  # the request only checked that the model is there
        return Response(prepared, media_type="application/json")
    gateway.metrics.ignored(prepared.ignored)
    form = OllamaFormat(gateway.model().tokenizer, prepared.logprobs, prepared.reply)
    return await respond(request, prepared, form)


@router.post("/api/chat", **takes(OllamaChatRequest))
async def ollama_chat(request: Request) -> Response:
    """Answers Ollama's chat: lines of JSON, or one object with `stream` false."""
    return await _generated(request, "ollama_chat")


@router.post("/api/generate", **takes(OllamaGenerateRequest))
async def ollama_generate(request: Request) -> Response:
    """Answers Ollama's generate: lines of JSON, or one object with `stream` false."""
    return await _generated(request, "ollama_generate")


@router.post("/api/show", **takes(OllamaModelRequest))
async def ollama_show(request: Request) -> Response:
    """Returns the model's capabilities in Ollama's format."""
    return await answered(request, "ollama_show")


@router.post("/api/pull", **takes(OllamaModelRequest))
async def ollama_pull(request: Request) -> Response:
    """Reports success for the served model; other models cannot be pulled."""
    return await answered(request, "ollama_pull")


@router.get("/api/tags", **refuses(401, 503))
@router.head("/api/tags", include_in_schema=False)
async def ollama_tags(request: Request) -> dict[str, Any]:
    """Lists the served model."""
    return {"models": [ollama.card(gateway_of(request).model())]}


@router.get("/api/ps", **refuses(401, 503))
async def ollama_running(request: Request) -> dict[str, Any]:
    """Lists the served model, which is always loaded."""
    return {"models": [ollama.running_card(gateway_of(request).model())]}


@router.get("/api/version")
@router.head("/api/version", include_in_schema=False)
async def ollama_version() -> dict[str, str]:
    """Returns the Ollama version whose API this is."""
    return {"version": ollama.VERSION}
