"""HTTP routes of the APIs other than OpenAI's chat and text completions."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request, Response

from gateway.apis import ollama
from gateway.apis.cohere import CohereChatFormat
from gateway.apis.messages import MessagesFormat
from gateway.apis.ollama import OllamaFormat
from gateway.apis.registry import Kind
from gateway.app.openapi import refuses, takes
from gateway.app.serving import answered, respond
from gateway.app.state import Gateway, gateway_of
from gateway.schemas.cohere import CohereChatRequest
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


@router.post("/v2/chat", **takes(CohereChatRequest))
async def cohere_chat(request: Request) -> Response:
    """Answers Cohere's chat with the next message, whole or as a stream of events."""
    prepared = await gateway_of(request).generation(request, "cohere_chat")
    return await respond(request, prepared, CohereChatFormat())


async def _generated(request: Request, kind: Kind) -> Response:
    gateway = gateway_of(request)
    prepared = await gateway.prepare(request, kind)
    if isinstance(prepared, bytes):  # the request had no input
        await _kept(gateway, json.loads(prepared)["done_reason"])
        return Response(prepared, media_type="application/json")
    gateway.metrics.ignored(prepared.ignored)
    if prepared.reply.keep_alive_s is not None:
        for job in prepared.jobs:
            job.request.keep_alive_s = prepared.reply.keep_alive_s
    form = OllamaFormat(gateway.model().tokenizer, prepared.logprobs, prepared.reply)
    return await respond(request, prepared, form)


async def _kept(gateway: Gateway, wish: str) -> None:
    """Loads or unloads the model for a request without input, where the operator lets the engine sleep."""
    if not gateway.config.gpu.sleep_after_s:
        return
    if wish == "unload":
        await gateway.engine.put_to_sleep(force=False)
    elif gateway.config.gpu.wake_on_request and await gateway.engine.is_sleeping():
        await gateway.engine.wake_up()


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
    """Lists the served model while it is loaded."""
    gateway = gateway_of(request)
    model = gateway.model()
    return {"models": [] if await gateway.engine.is_sleeping() else [ollama.running_card(model)]}


@router.get("/api/version")
@router.head("/api/version", include_in_schema=False)
async def ollama_version() -> dict[str, str]:
    """Returns the Ollama version whose API this is."""
    return {"version": ollama.VERSION}
