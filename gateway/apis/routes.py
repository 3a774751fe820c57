"""HTTP routes of the APIs other than OpenAI's chat and text completions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from gateway.apis.messages import MessagesFormat
from gateway.apis.messages_schema import CountTokensRequest, MessagesRequest
from gateway.errors import ApiError
from gateway.formats import ResponseFormat
from gateway.images import collect_images
from gateway.openapi import takes
from gateway.prompts.contract import Prepared
from gateway.serving import RequestRun
from gateway.state import gateway_of

router = APIRouter()


async def _respond(request: Request, prepared: Prepared, form: ResponseFormat) -> Response:
    """Answers a prepared request in the form of its API."""
    gateway = gateway_of(request)
    images = await collect_images(prepared.images, gateway.config.images)
    prepared.jobs[0].request.images.extend(images)
    return await RequestRun(gateway, gateway.model(), prepared, form).respond(request)


@router.post("/v1/messages", **takes(MessagesRequest))
async def create_message(request: Request) -> Response:
    """Anthropic's Messages: the next message of a conversation, whole or as a stream of events."""
    gateway = gateway_of(request)
    prepared = await gateway.generation(request, "messages")
    form = MessagesFormat(gateway.model().name, request.state.request_id, prepared.reply)
    return await _respond(request, prepared, form)


@router.post("/v1/messages/count_tokens", **takes(CountTokensRequest))
async def count_tokens(request: Request) -> Response:
    """How many tokens a conversation with its tools takes; each image counts as one."""
    answer = await gateway_of(request).prepare(request, "count_tokens")
    assert isinstance(answer, bytes)
    return Response(answer, media_type="application/json")


@router.post("/v1/embeddings")
async def create_embedding() -> Response:
    """Refused: the model writes text and has no embeddings to give."""
    raise ApiError(
        400,
        "this server's model generates text: it has no embeddings; ask a server of an embedding model",
        code="unsupported_operation",
    )
