"""What bounds a step and a request, when an output ends, and the errors of requests beyond the bounds."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_service.core.request import FinishReason, Request


class RequestRefused(ValueError):
    """The request can never be served here; the message names the field and what is allowed."""


class QueueFull(RuntimeError):
    """Too many requests wait already; try again later."""


class EngineStopped(RuntimeError):
    """Nothing is computed any more, or soon will not be."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Filled once from the configuration and the KV pool's size; lengths in tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int
    # Longest prompt + output: what the model allows and the whole KV pool can hold.
    context_limit: int
    # Pages left free when a request is admitted, so that running ones can grow before anyone is preempted.
    watermark_pages: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    # What a prompt token whose log-probability is asked for takes of the budget of tokens.
    scored_token_cost: int = 1
    # Most tokens of a step that streams its experts: the prefill lane's, or one in which no request decodes.
    prefill_chunk_max: int = 0
    # Most rows of a step with drafts, those of its requests included; 0: no step has any.
    max_rows: int = 0


def refuse_impossible(prompt_len: int, max_tokens: int, limits: SchedulerLimits) -> None:
    """Raises RequestRefused when prompt and output can not fit, alone in the pool, ever."""
    limit = limits.context_limit
    if prompt_len < 1:
        raise RequestRefused("tokenized.input_ids: at least one token is needed, got none")
    if prompt_len > limit - 1:
        raise RequestRefused(
            f"tokenized.input_ids: {prompt_len} prompt tokens leave no room for output; at most "
            f"{limit - 1} are allowed (context length {limit})"
        )
    if prompt_len + max_tokens > limit:
        raise RequestRefused(
            f"sampling_params.max_tokens: {prompt_len} prompt tokens + {max_tokens} exceed the context "
            f"length {limit}; at most {limit - prompt_len} are allowed"
        )


def ends_by_length(request: Request, length: int, limits: SchedulerLimits) -> bool:
    """Returns whether `length` tokens, prompt and output, are the last; needs no token's id."""
    return length - request.prompt_len >= request.params.max_tokens or length >= limits.context_limit


def stop_token_ids(request: Request, limits: SchedulerLimits) -> frozenset[int]:
    """Returns the ids that end the output (and that are masked before `min_tokens`)."""
    if request.params.ignore_eos:
        return request.params.stop_token_ids
    return request.params.stop_token_ids | limits.eos_token_ids


def is_stop_token(request: Request, token_id: int, limits: SchedulerLimits) -> bool:
    """Returns whether the id is one of `stop_token_ids`, without building the set for every token."""
    params = request.params
    return token_id in params.stop_token_ids or (not params.ignore_eos and token_id in limits.eos_token_ids)


def mark_finish(request: Request, token_id: int, limits: SchedulerLimits) -> None:
    """Sets the finish reason if `token_id`, the last output token, ends the output."""
    long_enough = len(request.output_token_ids) > request.params.min_tokens
    if long_enough and is_stop_token(request, token_id, limits):
        request.finish_reason = FinishReason.STOP
        request.matched_stop_token = token_id
    elif request.constraint is not None and request.constraint.is_complete:
        request.finish_reason = FinishReason.STOP
    elif ends_by_length(request, request.total_len, limits):
        request.finish_reason = FinishReason.LENGTH
