"""When an output ends."""

from __future__ import annotations

from gpu_service.request import FinishReason, Request
from gpu_service.scheduler.limits import SchedulerLimits


def ends_by_length(request: Request, length: int, limits: SchedulerLimits) -> bool:
    """Whether `length` tokens, prompt and output, are the last; needs no token's id."""
    return length - request.prompt_len >= request.params.max_tokens or length >= limits.context_limit


def stop_token_ids(request: Request, limits: SchedulerLimits) -> frozenset[int]:
    """Ids that end the output (and that are masked before `min_tokens`)."""
    if request.params.ignore_eos:
        return request.params.stop_token_ids
    return request.params.stop_token_ids | limits.eos_token_ids


def is_stop_token(request: Request, token_id: int, limits: SchedulerLimits) -> bool:
    """Whether the id is one of `stop_token_ids`, without building the set for every token."""
    params = request.params
    return token_id in params.stop_token_ids or (not params.ignore_eos and token_id in limits.eos_token_ids)


def mark_finish(request: Request, token_id: int, limits: SchedulerLimits) -> None:
    """Sets the finish reason if `token_id`, the last output token, ends the output."""
    long_enough = len(request.output_token_ids) > request.params.min_tokens
    if long_enough and is_stop_token(request, token_id, limits):
        request.finish_reason = FinishReason.STOP
        request.matched_stop_token = token_id
    elif ends_by_length(request, request.total_len, limits):
        request.finish_reason = FinishReason.LENGTH
