"""From token deltas to protobuf messages."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_service.engine.interface import OutputDelta
from gpu_service.request import FinishReason, Request, TokenLogprobs
from protos import engine_pb2 as pb


def chunk(deltas: Sequence[OutputDelta]) -> pb.GenerateResponse:
    """One message for all new tokens of one output, oldest delta first."""
    last = deltas[-1]
    request = last.request
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    message = pb.GenerateStreamChunk(
        token_ids=token_ids,
        prompt_tokens=request.prompt_len,
        completion_tokens=last.num_output_tokens,
        cached_tokens=last.cached_tokens,
        index=request.index,
    )
    if request.params.logprobs is not None:
        message.output_logprobs.CopyFrom(
            output_logprobs([record for delta in deltas for record in delta.logprobs])
        )
    prompt = [record for delta in deltas for record in delta.prompt_logprobs]
    if prompt:
        message.input_logprobs.CopyFrom(input_logprobs(prompt))
    return pb.GenerateResponse(chunk=message)


def complete(delta: OutputDelta, stream: bool, first_token_s: float) -> pb.GenerateResponse:
    """The last message of an output; carries log-probabilities only when nothing was streamed.

    `first_token_s` is how long its first token took, seconds; 0: there was none.
    """
    request = delta.request
    message = pb.GenerateComplete(
        output_ids=request.output_token_ids,
        finish_reason=(delta.finish_reason or FinishReason.ERROR).value,
        prompt_tokens=request.prompt_len,
        completion_tokens=len(request.output_token_ids),
        cached_tokens=delta.cached_tokens,
        index=request.index,
        error_message=delta.error_message,
        first_token_seconds=first_token_s,
    )
    if delta.matched_stop_token is not None:
        message.matched_token_id = delta.matched_stop_token
    if not stream:
        _whole_logprobs(request, message)
    return pb.GenerateResponse(complete=message)


def _whole_logprobs(request: Request, message: pb.GenerateComplete) -> None:
    if request.params.logprobs is not None:
        message.output_logprobs.CopyFrom(output_logprobs(request.output_logprobs))
    if request.params.prompt_logprobs is not None:
        message.input_logprobs.CopyFrom(input_logprobs(request.prompt_logprobs))


def output_logprobs(records: Sequence[TokenLogprobs]) -> pb.OutputLogProbs:
    """One entry per sampled token."""
    return pb.OutputLogProbs(
        token_logprobs=[record.logprob or 0.0 for record in records],
        token_ids=[record.token_id for record in records],
        top_logprobs=[_top(record) for record in records],
    )


def input_logprobs(records: Sequence[TokenLogprobs]) -> pb.InputLogProbs:
    """One entry per prompt token; the first has no value."""
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(value=record.logprob) for record in records],
        token_ids=[record.token_id for record in records],
        top_logprobs=[_top(record) for record in records],
    )


def _top(record: TokenLogprobs) -> pb.TopLogProbs:
    return pb.TopLogProbs(values=record.top_logprobs, token_ids=record.top_ids)
