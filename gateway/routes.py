"""HTTP routes: thin; they validate, build engine requests and hand over to `serving.py`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from gateway.admission import shutting_down
from gateway.errors import ApiError
from gateway.formats import ChatFormat, CompletionFormat
from gateway.images import collect_images
from gateway.openapi import refuses, takes
from gateway.prompts.contract import Kind
from gateway.schemas.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from gateway.serving import RequestRun
from gateway.state import gateway_of
from moebius import __version__

router = APIRouter()


@router.post("/v1/chat/completions", **takes(ChatCompletionRequest))
async def create_chat_completion(request: Request) -> Response:
    """Answers a conversation, whole or as a stream of chunks."""
    gateway = gateway_of(request)
    prepared = await gateway.generation(request, "chat")
    model = gateway.model()
    images = await collect_images(prepared.images, gateway.config.images)
    prepared.jobs[0].request.images.extend(images)
    form = ChatFormat(model.name, model.tokenizer, prepared)
    return await RequestRun(gateway, model, prepared, form).respond(request)


@router.post("/v1/completions", **takes(CompletionRequest))
async def create_completion(request: Request) -> Response:
    """Continues one or more prompts, whole or as a stream of chunks."""
    gateway = gateway_of(request)
    prepared = await gateway.generation(request, "completions")
    model = gateway.model()
    form = CompletionFormat(model.name, model.tokenizer, prepared)
    return await RequestRun(gateway, model, prepared, form).respond(request)


@router.post("/tokenize", **takes(TokenizeRequest))
@router.post("/v1/tokenize", **takes(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of a conversation as the chat template renders it."""
    return await _answered(request, "tokenize")


@router.post("/detokenize", **takes(DetokenizeRequest))
@router.post("/v1/detokenize", **takes(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    return await _answered(request, "detokenize")


async def _answered(request: Request, kind: Kind) -> Response:
    answer = await gateway_of(request).prepare(request, kind)
    assert isinstance(answer, bytes)
    return Response(answer, media_type="application/json")


@router.get("/v1/models", **refuses(401, 503))
async def list_models(request: Request) -> dict[str, Any]:
    """The one served model."""
    return {"object": "list", "data": [gateway_of(request).model().card()]}


@router.get("/v1/models/{model_id:path}", **refuses(401, 404, 503))
async def retrieve_model(request: Request, model_id: str) -> dict[str, Any]:
    """The served model when it has this id; names may contain slashes."""
    return gateway_of(request).model_named(model_id).card()


@router.get("/health", response_class=Response)
async def health() -> Response:
    """200 with an empty body while this process answers; says nothing of the engine."""
    return Response(status_code=200)


@router.get("/ready", **refuses(503))
async def ready(request: Request) -> dict[str, Any]:
    """200 when a request sent now would be answered; 503 with the reason otherwise.

    That is: the model is known, this server is not shutting down, and the engine's health is SERVING, which
    it is not while it waits for lost expert servers.
    """
    gateway = gateway_of(request)
    if gateway.drain.has_begun:
        raise shutting_down()
    model = gateway.model()
    if not await gateway.engine.is_serving():
        raise ApiError(
            503,
            "the engine is not serving: it is starting, stopping, gone, or waiting for its expert servers",
            code="engine_unavailable",
            retry_after_s=2,
        )
    return {"status": "ready", "model": model.name, "in_flight": gateway.admission.in_flight}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    return Response(gateway_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of this software."""
    return {"version": __version__}
