"""Runs the engine calls of one request and merges their outputs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gateway.generation.data_images import DecodedImage
from gateway.generation.output import OutputRules, OutputState
from gateway.parsers.events import ParsedDelta
from gateway.replicas.replica_set import ReplicaSet
from gateway.schemas.common import GenerationFields
from gateway.schemas.errors import ApiError
from gateway.schemas.requests import ImageUrl
from gateway.text.tokenizer import Tokenizer
from gateway.transport.streaming import INLINE_TOKENS
from protos import engine_pb2

T = TypeVar("T")


@dataclass
class PromptJob:
    """One prompt with its n outputs: one engine call. Filled by a route; `run` fills the counters."""

    request: engine_pb2.GenerateRequest
    rules: OutputRules
    first_index: int  # choice index of the first of the n outputs
    images: Sequence[bytes] = ()  # the files of `request.images`
    completion_tokens: int = 0
    reasoning_tokens: int = 0  # of completion_tokens
    cached_tokens: int = 0
    # By output: draft tokens that became its tokens, and those that did not.
    draft_tokens: dict[int, tuple[int, int]] = field(default_factory=dict)
    # Including image tokens, which were not sent; 0: the engine has not reported it yet.
    counted_prompt_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    stream_interval: int = 1  # tokens per delta, except for the first and last
    kept_outputs: int = 0  # how many of the n outputs, the likeliest, are returned; 0: all
    input_logprobs: engine_pb2.InputLogProbs | None = None  # None: the engine sent none
    pooled_states: Sequence[float] = ()  # of the prompt, where they were asked for
    called_at: float = 0.0  # time.perf_counter() when the engine was called
    # Seconds from then to the first token of the first output that has ended; unset: none has ended.
    first_token_s: float | None = None

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The token ids of the prompt."""
        return self.request.tokenized.input_ids

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt as the engine computes it."""
        return self.counted_prompt_tokens or len(self.prompt_ids)

    async def run(
        self, engine: ReplicaSet, tokenizer: Tokenizer, context: Any
    ) -> AsyncGenerator[ParsedDelta, None]:
        """Yields the outputs' new content as the engine sends it.

        Ends when all outputs have finished; cancels the call when one of them ended at a stop string,
        which the engine does not know of.

        Raises:
            ApiError: the engine reported an error or closed the stream early.
            grpc.aio.AioRpcError: the call failed.
        """
        prompt_ids = self.prompt_ids
        count = self.request.sampling_params.n or 1
        states = [
            OutputState(self.first_index + index, tokenizer, self.rules, prompt_ids) for index in range(count)
        ]
        # Reset for a second run: see `RequestRun`.
        self.completion_tokens = self.reasoning_tokens = self.cached_tokens = self.counted_prompt_tokens = 0
        self.finish_reasons, self.input_logprobs, self.first_token_s = [], None, None
        self.draft_tokens = {}
        completed = 0
        # Deltas of outputs whose end follows at once: clients get both together.
        held: dict[int, ParsedDelta] = {}
        self.called_at = time.perf_counter()
        is_never_large = (
            self.request.stream
            and self.stream_interval == 1
            and not self.request.sampling_params.HasField("prompt_logprobs")
        )
        async with aclosing(engine.generate(self.request, context, self.images)) as responses:
            every = responses if self.stream_interval == 1 else gathered(responses, self.stream_interval)
            async for response in every:
                is_complete = response.HasField("complete")
                if is_never_large or self._is_small(states, response, is_complete):
                    delta = self._take(states, response, is_complete)
                else:
                    delta = await asyncio.to_thread(self._take, states, response, is_complete)
                completed += is_complete
                if delta is not None and delta.finish is None and response.chunk.complete_follows:
                    held[delta.index] = delta
                elif delta is not None:
                    earlier = held.pop(delta.index, None) if is_complete else None
                    yield delta if earlier is None else delta.after(earlier)
                if len(self.finish_reasons) == count and completed < count:
                    return
        if len(self.finish_reasons) == count:
            return
        raise ApiError(
            502, "the engine closed the stream before the output was complete", code="engine_error"
        )

    def _is_small(
        self, states: list[OutputState], response: engine_pb2.GenerateResponse, is_complete: bool
    ) -> bool:
        """Returns whether a message is so small that reading it does not delay other streams."""
        if is_complete:
            tokens = len(response.complete.output_ids) - states[response.complete.index].token_count
            scored = response.complete.input_logprobs
        else:
            tokens, scored = len(response.chunk.token_ids), response.chunk.input_logprobs
        params = self.request.sampling_params
        size = tokens * (1 + params.logprobs) + len(scored.token_ids) * (1 + params.prompt_logprobs)
        return size <= INLINE_TOKENS

    def _take(
        self, states: list[OutputState], response: engine_pb2.GenerateResponse, is_complete: bool
    ) -> ParsedDelta | None:
        """Passes one message to its output; returns None if that output has ended at a stop string."""
        message = response.complete if is_complete else response.chunk
        if is_complete:
            self._note_first_token(response.complete.first_token_seconds)
            self.pooled_states = response.complete.pooled_hidden_states
        if message.HasField("input_logprobs"):
            self.input_logprobs = message.input_logprobs
        self.counted_prompt_tokens = message.prompt_tokens
        self.cached_tokens = max(self.cached_tokens, message.cached_tokens)
        self.draft_tokens[message.index] = (message.accepted_draft_tokens, message.rejected_draft_tokens)
        state = states[message.index]
        if state.finish is not None:
            return None
        delta = state.complete(response.complete) if is_complete else state.feed(response.chunk)
        if not self.request.sampling_params.pooling:  # else its one token is not part of the answer
            self.completion_tokens += delta.new_tokens
        self.reasoning_tokens += delta.reasoning_tokens
        if delta.finish is not None:
            self.finish_reasons.append(delta.finish.reason)
        return delta

    def _note_first_token(self, seconds: float) -> None:
        """Keeps the minimum over all outputs; 0 means that there was no token."""
        if seconds > 0:
            self.first_token_s = min(seconds, self.first_token_s or seconds)


@dataclass(frozen=True)
class Prepared:
    """A generation request, ready for the engine; filled by `gateway/prompts/prepare.py`."""

    fields: GenerationFields  # without prompts and messages
    jobs: list[PromptJob]  # without images and the response's id
    logprobs: int | None  # alternatives per output token; None: no log-probabilities
    images: list[tuple[str, ImageUrl | DecodedImage]]  # parameter name and each image, in prompt order
    reply: Any = None  # data for another API's format (gateway/apis/)
    speaks_functions: bool = False  # calls are answered as `function_call`, the predecessor of tools
    ignored: tuple[str, ...] = ()  # names of some of the fields that have no effect


async def gathered(
    responses: AsyncIterator[engine_pb2.GenerateResponse], interval: int
) -> AsyncGenerator[engine_pb2.GenerateResponse, None]:
    """Yields `responses` with `interval` tokens in each chunk of an output, except its first and last one."""
    held: dict[int, engine_pb2.GenerateResponse] = {}
    begun: set[int] = set()
    async for response in responses:
        if response.WhichOneof("response") == "complete":
            if response.complete.index in held:
                yield held.pop(response.complete.index)
            yield response
            continue
        index = response.chunk.index
        if index in held:
            held[index].chunk.MergeFrom(response.chunk)
        else:
            held[index] = response
        if index not in begun or len(held[index].chunk.token_ids) >= interval:
            begun.add(index)
            yield held.pop(index)


def merge(streams: Sequence[AsyncGenerator[T, None]], at_once: int = 0) -> AsyncGenerator[T, None]:
    """Yields the items of all streams as they arrive; the first failure ends it and closes the others.

    `at_once`: how many run at the same time; 0: all.
    """
    return streams[0] if len(streams) == 1 else _merged(streams, at_once or len(streams))


async def _merged(streams: Sequence[AsyncGenerator[T, None]], at_once: int) -> AsyncGenerator[T, None]:
    turns = asyncio.Semaphore(at_once)
    # One slot per stream: a slow reader delays the engine calls instead of filling memory.
    queue: asyncio.Queue[tuple[bool, Any]] = asyncio.Queue(len(streams))

    async def pump(stream: AsyncGenerator[T, None]) -> None:
        end: Exception | None = None
        try:
            async with turns, aclosing(stream) as items:
                async for item in items:
                    await queue.put((False, item))
        except Exception as error:
            end = error
        await queue.put((True, end))

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            is_end, value = await queue.get()
            if not is_end:
                yield value
            elif value is not None:
                raise value
            else:
                running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
