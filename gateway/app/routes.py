"""HTTP routes of chat and text completions, of models and tokens, and of this server's own state."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse
from google.protobuf.json_format import MessageToDict
from prometheus_client import CONTENT_TYPE_LATEST

from gateway.apis.formats import ChatFormat, CompletionFormat
from gateway.apis.registry import Kind
from gateway.app.openapi import refuses, takes
from gateway.app.serving import answered, respond
from gateway.app.state import Gateway, gateway_of, num_replicas
from gateway.generation.model import ServedModel
from gateway.schemas.errors import ApiError, is_anthropic
from gateway.schemas.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from gateway.web.live import LiveFigures
from moebius import __version__

router = APIRouter()
live_router = APIRouter()  # of the live view, which a setting leaves out


@router.post("/chat/completions", **takes(ChatCompletionRequest))
@router.post("/v1/chat/completions", **takes(ChatCompletionRequest))
async def create_chat_completion(request: Request) -> Response:
    """Answers a conversation, whole or as a stream of chunks."""
    return await _generated(request, "chat")


@router.post("/v1/completions", **takes(CompletionRequest))
async def create_completion(request: Request) -> Response:
    """Continues one or more prompts, whole or as a stream of chunks."""
    return await _generated(request, "completions")


@router.post("/invocations", **takes(ChatCompletionRequest, CompletionRequest))
async def invoke(request: Request) -> Response:
    """Answers a chat or a completion on the path that SageMaker calls for all models."""
    return await _generated(request, "invocations")


async def _generated(request: Request, kind: Kind) -> Response:
    """Answers in the format of the body's kind; completions have no images."""
    gateway = gateway_of(request)
    prepared = await gateway.generation(request, kind)
    model = gateway.model()
    is_chat = isinstance(prepared.fields, ChatCompletionRequest)
    form = (ChatFormat if is_chat else CompletionFormat)(
        model.name, model.tokenizer, prepared, model.fingerprint
    )
    return await respond(request, prepared, form)


@router.get("/tokenizer_info", **refuses(401, 503))
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """Returns tokenizer_config.json with the chat template in use, as lm-eval requests it."""
    return gateway_of(request).model().tokenizer.info


@router.post("/tokenize", **takes(TokenizeRequest))
@router.post("/v1/tokenize", **takes(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """Returns the token ids of a text, or of a conversation in the chat template."""
    return await answered(request, "tokenize")


@router.post("/detokenize", **takes(DetokenizeRequest))
@router.post("/v1/detokenize", **takes(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """Returns the text of token ids, special tokens included."""
    return await answered(request, "detokenize")


@router.post("/apply-template", **takes(ChatCompletionRequest))
async def apply_template(request: Request) -> Response:
    """Returns the text of a conversation in the chat template, as llama-server does."""
    return await answered(request, "apply_template")


@router.get("/models", **refuses(401, 503))
@router.get("/v1/models", **refuses(401, 503))
async def list_models(request: Request) -> dict[str, Any]:
    """Lists the served model.

    Codex sends its version and reads only `models`: OpenAI's own facts about its models, instructions
    included. For a model that is not listed there it uses its defaults, so that the list is empty.
    Anthropic's clients, by their header, get its shape.
    """
    model = gateway_of(request).model()
    if is_anthropic(request.scope):
        card = model.anthropic_card()
        return {"data": [card], "has_more": False, "first_id": card["id"], "last_id": card["id"]}
    listed = {"object": "list", "data": [await _card(gateway_of(request), model)]}
    return {**listed, "models": []} if "client_version" in request.query_params else listed


@router.get("/v1/models/{model_id:path}", **refuses(401, 404, 503))
async def retrieve_model(request: Request, model_id: str) -> dict[str, Any]:
    """Returns the served model if it has this id; names may contain slashes."""
    gateway = gateway_of(request)
    model = gateway.model_named(model_id)
    return model.anthropic_card() if is_anthropic(request.scope) else await _card(gateway, model)


async def _card(gateway: Gateway, model: ServedModel) -> dict[str, Any]:
    """Returns the model's entry, and in llama-server's shape whether it is in memory."""
    state = "sleeping" if await gateway.engine.is_sleeping() else "loaded"
    return {**model.card(), "status": {"value": state}}


@router.get("/health", response_class=Response)
@router.get("/v1/health", response_class=Response)
async def health() -> Response:
    """Answers 200 with an empty body while this process runs; says nothing of the engine."""
    return Response(status_code=200)


@router.get("/ping", response_class=Response)
@router.post("/ping", response_class=Response)
async def ping() -> Response:
    """Answers like `/health`, on SageMaker's path."""
    return Response(status_code=200)


@router.get("/load", **refuses(401))
async def server_load(request: Request) -> dict[str, int]:
    """Returns the number of requests in this process, in vLLM's shape."""
    return {"server_load": gateway_of(request).admission.in_flight}


@router.get("/v1/load", **refuses(401, 500, 503))
async def engine_load(request: Request) -> dict[str, Any]:
    """Returns the number of requests in this process, and the engine's queues, cache and throughput now."""
    gateway = gateway_of(request)
    engine = await gateway.engine.load()
    described = MessageToDict(
        engine, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return {"server_load": gateway.admission.in_flight, "engine": described}


@router.get("/ready", **refuses(503))
async def ready(request: Request) -> dict[str, Any]:
    """Answers 200 when a request sent now would be answered, else 503 with the reason.

    This requires that the model is known, this server is not shutting down, and the engine's health is
    SERVING, which it is not while it waits for lost expert servers.
    """
    gateway = gateway_of(request)
    model = await gateway.ready_model()
    is_sleeping = await gateway.engine.is_sleeping()
    found = {"status": "ready", "model": model.name, "in_flight": gateway.admission.in_flight}
    return {**found, "is_sleeping": is_sleeping}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Returns Prometheus text, unless metrics have a port of their own."""
    gateway = gateway_of(request)
    if gateway.config.gateway.gateway_metrics_port:
        raise ApiError(
            404, "metrics have a port of their own here (gateway_metrics_port)", code="unknown_url"
        )
    return Response(await gateway.render_metrics(), media_type=CONTENT_TYPE_LATEST)


@router.get("/version")
async def version() -> dict[str, str]:
    """Returns the version of this software."""
    return {"version": __version__}


@live_router.get("/v1/live", **refuses(400, 401, 503))
async def live(
    request: Request, layers: bool = True, replica: Annotated[int, Query(ge=0)] = 0
) -> dict[str, Any]:
    """Returns figures of an engine, its expert servers and, unless `layers` is false, each layer's experts.

    `replica`: which of several engines, from 0.
    """
    gateway = gateway_of(request)
    model = gateway.model()  # 503 until one is known
    count = num_replicas(gateway, replica)
    figures: LiveFigures = request.app.state.live_figures
    found = {**await figures.get(replica), "model": model.name, "replica": replica, "replicas": count}
    found["requests"] = {**found["requests"], "gateway_in_flight": gateway.admission.in_flight}
    if found["experts"] is not None and not layers:
        found["experts"] = {**found["experts"], "layers": None}
    return found
