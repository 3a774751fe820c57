"""HTTP routes that clients of llama-server and of SGLang call besides OpenAI's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import APIRouter, Request, Response

from gateway.apis.native import LlamaFormat, SglangFormat
from gateway.apis.registry import Kind
from gateway.apis.saved_slots import SlotFormat
from gateway.app.openapi import refuses, takes
from gateway.app.serving import respond
from gateway.app.slot_routes import num_slots, saved_slots
from gateway.app.state import gateway_of
from gateway.schemas.errors import ApiError, bad_request
from gateway.schemas.native import AbortRequest, InfillRequest, LlamaCompletionRequest, SglangGenerateRequest
from gateway.transport.keys import client_of
from moebius import __version__
from protos import engine_pb2

router = APIRouter()
_PROBE_S = 20.0  # a probe's token has to come within this time
_FIRST = -(2**31)  # the priority before all others


async def _completed(request: Request, kind: Kind) -> Response:
    gateway = gateway_of(request)
    prepared = await gateway.generation(request, kind)
    model, kept = gateway.model(), saved_slots(gateway, request)
    parts = model.name, model.tokenizer, prepared.logprobs, prepared.reply
    if kept is None or prepared.reply.is_list:
        return await respond(request, prepared, LlamaFormat(*parts))
    count = await num_slots(gateway)
    if prepared.reply.slot >= count:
        raise bad_request(f"'id_slot' is not allowed; allowed: 0 to {count - 1}, and -1 for any", "id_slot")
    form = SlotFormat(*parts)
    form.keep_in(kept, prepared.reply.slot, prepared.jobs[0].prompt_ids)
    return await respond(request, prepared, form)


@router.post("/completions", **takes(LlamaCompletionRequest))
@router.post("/completion", **takes(LlamaCompletionRequest))
async def llama_completion(request: Request) -> Response:
    """Answers llama-server's own completion, whole or as a stream of events."""
    return await _completed(request, "llama_completion")


@router.post("/infill", **takes(InfillRequest))
async def llama_infill(request: Request) -> Response:
    """Answers llama-server's completion between two texts."""
    return await _completed(request, "llama_infill")


@router.get("/props", **refuses(401, 503))
async def props(request: Request) -> dict[str, Any]:
    """Returns facts of the server and the model in llama-server's shape."""
    gateway = gateway_of(request)
    model = gateway.model()
    load = await gateway.engine.load()
    template = model.tokenizer.chat_template
    return {
        "default_generation_settings": {"n_ctx": model.max_context_length, "params": model.defaults},
        "total_slots": load.max_running_requests,
        "model_alias": model.name,
        "model_path": model.name,
        "modalities": {"vision": model.supports_vision, "audio": False},
        "chat_template": "" if template is None else template.source,
        "build_info": f"moebius {__version__}",
    }


@router.get("/lora-adapters", **refuses(401))
async def lora_adapters() -> list[dict[str, Any]]:
    """Lists no adapters: none are served."""
    return []


def _engine_id(request: Request, rid: str) -> str:
    """Returns the engine's id for a client's: no client can name, or end, another's requests."""
    return f"{client_of(request.scope)}:{rid}"


@router.post("/generate", **takes(SglangGenerateRequest))
async def sglang_generate(request: Request) -> Response:
    """Answers SGLang's own generation, whole or as a stream of events with all text so far."""
    gateway = gateway_of(request)
    prepared = await gateway.generation(request, "sglang_generate")
    engine_id = _engine_id(request, prepared.reply.rid)
    form = SglangFormat(gateway.model().tokenizer, prepared.reply, engine_id, prepared.jobs)
    return await respond(request, prepared, form)


@router.post("/abort_request", **refuses(400, 401, 503))
async def abort_request(request: Request, body: AbortRequest) -> dict[str, Any]:
    """Ends one of the client's own generations by its `rid`, of one prompt; unknown ones are ignored."""
    await gateway_of(request).engine.abort([_engine_id(request, body.rid)])
    return {}


@router.get("/get_model_info", **refuses(401, 503))
@router.get("/model_info", **refuses(401, 503))
async def model_info(request: Request) -> dict[str, Any]:
    """Returns facts of the model in SGLang's shape."""
    model = gateway_of(request).model()
    return {
        "model_path": model.root,
        "tokenizer_path": model.root,
        "is_generation": True,
        "preferred_sampling_params": json.dumps(model.defaults) if model.defaults else None,
        "weight_version": model.fingerprint or "default",
        "has_image_understanding": model.supports_vision,
        "has_audio_understanding": False,
        "model_type": model.model_type,
    }


@router.get("/get_server_info", **refuses(401, 503))
@router.get("/server_info", **refuses(401, 503))
async def server_info(request: Request) -> dict[str, Any]:
    """Returns facts of the server in SGLang's shape: sizes, and the engine's throughput now."""
    gateway = gateway_of(request)
    model = gateway.model()
    load = await gateway.engine.load()
    return {
        "model_path": model.root,
        "tokenizer_path": model.root,
        "served_model_name": model.name,
        "status": "sleeping" if load.is_sleeping else "ready",
        "context_length": model.max_context_length,
        "max_req_input_len": model.max_prompt_length,
        "max_total_num_tokens": load.max_total_num_tokens,
        "max_running_requests": load.max_running_requests,
        "version": __version__,
        "internal_states": [
            {
                "last_gen_throughput": load.gen_throughput,
                "effective_max_running_requests_per_dp": load.max_running_requests,
            }
        ],
    }


@router.get("/get_load", **refuses(401, 503))
async def get_load(request: Request) -> list[dict[str, int]]:
    """Returns the engine's requests and tokens in SGLang's shape: an entry for all replicas."""
    load = await gateway_of(request).engine.load()
    return [
        {
            "dp_rank": 0,
            "num_reqs": load.num_total_reqs,
            "num_waiting_reqs": load.num_waiting_reqs,
            "num_tokens": load.num_used_tokens,
        }
    ]


@router.get("/health_generate", response_class=Response, **refuses(401, 503))
async def health_generate(request: Request) -> Response:
    """Answers 200 once the engine has generated a token before all waiting requests, else 503."""
    gateway = gateway_of(request)
    await gateway.ready_model()
    probe = engine_pb2.GenerateRequest(
        request_id=f"probe-{request.state.request_id}",
        tokenized=engine_pb2.TokenizedInput(input_ids=[0]),
        sampling_params=engine_pb2.SamplingParams(max_tokens=1, temperature=0, ignore_eos=True),
        priority=_FIRST,
    )
    try:
        async with asyncio.timeout(_PROBE_S):
            async for response in gateway.engine.generate(probe, None):
                if response.complete.finish_reason not in ("stop", "length"):
                    raise ApiError(503, "the engine's probe failed", code="engine_unavailable")
    except TimeoutError:
        reason = f"the engine made no token within {_PROBE_S:g} s"
        raise ApiError(503, reason, code="engine_unavailable", retry_after_s=2) from None
    return Response(status_code=200)
