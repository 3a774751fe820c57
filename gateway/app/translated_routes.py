"""HTTP routes of the APIs other than OpenAI's chat and text completions."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from gateway.apis import ollama
from gateway.apis.messages import MessagesFormat
from gateway.apis.ollama import OllamaFormat
from gateway.apis.registry import Kind
from gateway.apis.responses_format import ResponsesFormat
from gateway.apis.stored_responses import StoredResponse, not_found
from gateway.app.openapi import refuses, takes
from gateway.app.serving import answered, respond
from gateway.app.state import gateway_of
from gateway.schemas.errors import bad_request
from gateway.schemas.messages import CountTokensRequest, MessagesRequest
from gateway.schemas.ollama import OllamaChatRequest, OllamaGenerateRequest, OllamaModelRequest
from gateway.schemas.responses import ResponsesRequest

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


@router.post("/v1/responses", **takes(ResponsesRequest))
async def create_response(request: Request) -> Response:
    """Answers OpenAI's Responses: generates items, whole or as a stream of events."""
    gateway = gateway_of(request)
    prepared = await gateway.generation(request, "responses")
    model = gateway.model()
    form = ResponsesFormat(model.name, model.tokenizer, prepared.logprobs, prepared.reply, gateway.responses)
    return await respond(request, prepared, form)


async def _stored(request: Request, response_id: str) -> StoredResponse:
    """Returns a stored response. Raises ApiError 404 when it is gone."""
    found = await asyncio.to_thread(gateway_of(request).responses.find, response_id)
    if found is None:
        raise not_found("response", response_id, "response_id", "response_not_found")
    return found


@router.get("/v1/responses/{response_id}", **refuses(400, 401, 404))
async def retrieve_response(request: Request, response_id: str) -> JSONResponse:
    """Returns a stored response as it was sent."""
    if request.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise bad_request("a stored response is not streamed again", "stream", "unsupported_parameter")
    return JSONResponse((await _stored(request, response_id)).response)


@router.delete("/v1/responses/{response_id}", **refuses(401, 404))
async def delete_response(request: Request, response_id: str) -> dict[str, Any]:
    """Deletes a stored response."""
    if not await asyncio.to_thread(gateway_of(request).responses.delete, response_id):
        raise not_found("response", response_id, "response_id", "response_not_found")
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/v1/responses/{response_id}/cancel", **refuses(400, 401, 404))
async def cancel_response(request: Request, response_id: str) -> Response:
    """Refuses: only background responses can be cancelled; others end with their connection."""
    await _stored(request, response_id)
    raise bad_request(
        "Cannot cancel a synchronous response. Close its connection to end it",
        "response_id",
        "unsupported_operation",
    )


@router.get("/v1/responses/{response_id}/input_items", **refuses(400, 401, 404))
async def list_input_items(
    request: Request,
    response_id: str,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> JSONResponse:
    """Lists the items before a stored response's output, earlier responses included, newest first."""
    items = (await _stored(request, response_id)).input
    if order == "desc":
        items.reverse()
    places = [number for number, item in enumerate(items, 1) if item["id"] == after]
    if after is not None and not places:
        raise bad_request(f"'after' names no item of the response: {after[:100]!r}", "after")
    start = places[0] if places else 0
    page = items[start : start + limit]
    return JSONResponse(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": start + limit < len(items),
        }
    )


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
