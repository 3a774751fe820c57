"""From a validated body to the engine's SamplingParams, with the model's defaults filled in."""

from __future__ import annotations

from typing import Any

from gateway.errors import ApiError
from gateway.model import CONTEXT_LENGTH_EXCEEDED, ServedModel
from gateway.schemas.common import GenerationFields
from protos import engine_pb2


def check_prompt(model: ServedModel, prompt_ids: list[int], param: str) -> None:
    """Raises ApiError 400 for an empty prompt, one that is too long, or ids outside the vocabulary."""
    if not prompt_ids:
        raise ApiError(400, f"'{param}' gives no tokens", param=param, code="invalid_value")
    model.check_length(len(prompt_ids), param)
    model.check_token_ids(prompt_ids, param)


def output_limit(model: ServedModel, prompt_length: int, param: str, requested: int | None) -> int:
    """Most output tokens of this request, >= 1.

    Raises:
        ApiError: 400 when the prompt and the tokens asked for exceed the context.
    """
    room = model.max_context_length - prompt_length
    if requested is None:
        default = model.defaults.get("max_new_tokens")
        return max(1, min(room, int(default))) if default else max(1, room)
    if requested > room:
        raise ApiError(
            400,
            f"This model's maximum context length is {model.max_context_length} tokens. However, you "
            f"requested {prompt_length + requested} tokens ({prompt_length} in the prompt, {requested} for "
            "the completion).",
            param=param,
            code=CONTEXT_LENGTH_EXCEEDED,
        )
    return max(1, requested)  # the engine always makes one; 0 (echo only) drops it again


def build_sampling_params(
    body: GenerationFields,
    model: ServedModel,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> engine_pb2.SamplingParams:
    """The engine's parameters; ApiError 400 for token ids outside the vocabulary or an impossible minimum.

    Args:
        body: the validated request.
        model: gives vocabulary size and generation defaults.
        max_tokens: from `output_limit`; None: as many as fit.
        logprobs: alternatives per output token; None: no logprobs.
        prompt_logprobs: alternatives per prompt token; None: none.
    """
    bias = body.token_bias()
    model.check_token_ids(sorted(bias), "logit_bias")
    model.check_token_ids(body.stop_token_ids or [], "stop_token_ids")
    if max_tokens is not None and body.min_tokens > max_tokens:
        raise ApiError(
            400,
            f"'min_tokens' is {body.min_tokens}, but at most {max_tokens} tokens are generated",
            param="min_tokens",
            code="invalid_value",
        )
    top_k = int(_value(body.top_k, model, "top_k", 0))
    return engine_pb2.SamplingParams(
        temperature=float(_value(body.temperature, model, "temperature", 1.0)),
        top_p=float(_value(body.top_p, model, "top_p", 1.0)),
        top_k=max(top_k, 0),
        min_p=float(_value(body.min_p, model, "min_p", 0.0)),
        repetition_penalty=float(_value(body.repetition_penalty, model, "repetition_penalty", 1.0)),
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        stop_token_ids=body.stop_token_ids or [],
        ignore_eos=body.ignore_eos,
        n=body.n or 1,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        seed=body.seed,
        logit_bias=bias,
    )


def _value(requested: float | None, model: ServedModel, name: str, fallback: float) -> Any:
    """What the client sent, else the model's generation default, else the API's default."""
    if requested is not None:
        return requested
    default = model.defaults.get(name)
    return fallback if default is None else default
