"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from gateway.formats.completions import CompletionFormat
from gateway.openapi import takes
from gateway.schemas.completions import CompletionRequest
from gateway.serving import RequestRun
from gateway.state import gateway_of

router = APIRouter()


@router.post("/v1/completions", **takes(CompletionRequest))
async def create_completion(request: Request) -> Response:
    """Continues one or more prompts, whole or as a stream of chunks."""
    gateway = gateway_of(request)
    prepared = await gateway.generation(request, "completions")
    model = gateway.model()
    form = CompletionFormat(model.name, model.tokenizer, prepared.logprobs)
    return await RequestRun(gateway, model, prepared, form).respond(request)
