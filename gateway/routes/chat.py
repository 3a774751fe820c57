"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from gateway.formats.chat import ChatFormat
from gateway.images import collect_images
from gateway.openapi import takes
from gateway.schemas.chat import ChatCompletionRequest
from gateway.serving import RequestRun
from gateway.state import gateway_of

router = APIRouter()


@router.post("/v1/chat/completions", **takes(ChatCompletionRequest))
async def create_chat_completion(request: Request) -> Response:
    """Answers a conversation, whole or as a stream of chunks."""
    gateway = gateway_of(request)
    prepared = await gateway.generation(request, "chat")
    model = gateway.model()
    images = await collect_images(prepared.images, gateway.config.images)
    prepared.jobs[0].request.images.extend(images)
    form = ChatFormat(model.name, model.tokenizer, prepared.logprobs)
    return await RequestRun(gateway, model, prepared, form).respond(request)
