"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from gateway.formats.completions import CompletionFormat
from gateway.model import ServedModel
from gateway.routes.jobs import JobPlan, build_jobs, encode
from gateway.schemas.completions import CompletionRequest
from gateway.serving import RequestRun
from gateway.state import gateway_of

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Continues one or more prompts, whole or as a stream of chunks."""
    gateway = gateway_of(request)
    model = gateway.model_named(body.model)
    prompts = [await _tokenised(model, prompt, body) for prompt in body.prompt]
    form = CompletionFormat(model.name, model.tokenizer, body.logprobs)
    limit_param, limit = body.token_limit()
    plan = JobPlan(
        operation="text_completion",
        request_id=form.id,
        prompt_param="prompt",
        limit_param=limit_param,
        limit=limit,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        echo=bool(body.echo),
    )
    jobs = build_jobs(body, model, plan, prompts)
    return await RequestRun(gateway, model, body, jobs, form).respond(request)


async def _tokenised(
    model: ServedModel, prompt: str | list[int], body: CompletionRequest
) -> tuple[str, list[int]]:
    """Text and ids of one prompt, whichever was sent; the text is only needed to echo it."""
    if isinstance(prompt, str):
        return prompt, await encode(model, prompt, body.add_special_tokens)
    model.check_token_ids(prompt, "prompt")
    text = model.tokenizer.decode(prompt, body.skip_special_tokens) if body.echo else ""
    return text, prompt
