"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from gateway.formats.chat import ChatFormat
from gateway.images import check_placeholders, collect_images
from gateway.routes.jobs import JobPlan, build_jobs, encode
from gateway.schemas.chat import ChatCompletionRequest
from gateway.serving import RequestRun
from gateway.state import gateway_of

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
    """Answers a conversation, whole or as a stream of chunks."""
    gateway = gateway_of(request)
    model = gateway.model_named(body.model)
    images = await collect_images(body.messages, model, gateway.config.images)
    text = model.render_chat(
        [message.for_template() for message in body.messages],
        body.opens_turn(),
        body.continue_final_message,
        body.chat_template_kwargs,
    )
    prompt_ids = await encode(model, text, add_special_tokens=False)  # templates write BOS themselves
    if images:
        check_placeholders(model, prompt_ids, len(images))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    form = ChatFormat(model.name, model.tokenizer, logprobs)
    limit_param, limit = body.token_limit()
    plan = JobPlan(
        operation="chat",
        request_id=form.id,
        prompt_param="messages",
        limit_param=limit_param,
        limit=limit,
        logprobs=logprobs,
        prompt_logprobs=None,
        images=images,
    )
    jobs = build_jobs(body, model, plan, [(text, prompt_ids)])
    return await RequestRun(gateway, model, body, jobs, form).respond(request)
