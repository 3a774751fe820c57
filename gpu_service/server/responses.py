"""From the engine thread to the calls that wait for tokens, and the messages they answer with.

A call has a gRPC stream of its own (Engine.Generate) or is one of many over one stream (Engine.GenerateMany).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import structlog

from gpu_service.core.interface import Emission, OutputDelta, token_delta
from gpu_service.core.request import FinishReason, Request, TokenLogprobs
from moebius.network.outbox import Outbox
from protos import engine_pb2 as pb


class CallEnded(RuntimeError):
    """A call is to end before its outputs have; the message says why."""


class CallBuffer:
    """What one Generate call has not sent yet. A slow client finds several steps' tokens here at once."""

    def __init__(self) -> None:
        # Is given what ends no output, at once: waking a task for a token takes longer than all else that is
        # done with it. None: `take` returns that, too.
        self.send: Callable[[OutputDelta], None] | None = None
        # Is given a token that brings nothing else, and how many the output has with it. None: `put` is.
        self.send_token: Callable[[int, int], None] | None = None
        # `time.perf_counter()` at the first token of each output that has one.
        self.first_tokens: dict[int, float] = {}
        self._deltas: list[OutputDelta] = []
        self._arrived = asyncio.Event()
        self._ended_by = ""

    def put(self, delta: OutputDelta) -> None:
        """Called in the event loop."""
        if delta.token_ids and delta.num_output_tokens == len(delta.token_ids):
            self.first_tokens[delta.request.index] = time.perf_counter()
        if self.send is not None and delta.finish_reason is None:
            self.send(delta)
            return
        self._deltas.append(delta)
        self._arrived.set()

    def end(self, reason: str) -> None:
        """`take` raises from now on. Called in the event loop."""
        self._ended_by = reason
        self._arrived.set()

    async def take(self) -> dict[int, list[OutputDelta]]:
        """Returns everything so far, by output index; waits for at least one delta. Raises CallEnded."""
        await self._arrived.wait()
        self._arrived.clear()
        if self._ended_by:
            raise CallEnded(self._ended_by)
        deltas, self._deltas = self._deltas, []
        by_index: dict[int, list[OutputDelta]] = {}
        for delta in deltas:
            by_index.setdefault(delta.request.index, []).append(delta)
        return by_index


class OutputRouter:
    """The live calls by request id. All methods but `on_output` run in the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: dict[str, CallBuffer] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._calls

    def open(self, request_id: str) -> CallBuffer:
        """Registers a call; its id must not be live."""
        self._calls[request_id] = CallBuffer()
        return self._calls[request_id]

    def close(self, request_id: str) -> None:
        """Forgets a call; what still comes for it is dropped."""
        self._calls.pop(request_id, None)

    def end_all(self, reason: str) -> None:
        """Ends every live call with CallEnded."""
        for buffer in self._calls.values():
            buffer.end(reason)

    def on_output(self, emission: Emission) -> None:
        """Called by the engine thread; never blocks it. After the loop has closed nothing is delivered."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliver, emission)

    def _deliver(self, emission: Emission) -> None:
        calls = self._calls
        for request, token_id, count in emission.tokens():
            buffer = calls.get(request.request_id)
            if buffer is not None and buffer.send_token is not None:
                buffer.send_token(token_id, count)
            elif buffer is not None:
                buffer.put(token_delta(request, token_id, count))
        for delta in emission.deltas:
            buffer = calls.get(delta.request.request_id)
            if buffer is not None:
                buffer.put(delta)


def chunk(deltas: Sequence[OutputDelta]) -> pb.GenerateResponse:
    """Returns one message for all new tokens of one output, oldest delta first."""
    response = pb.GenerateResponse()
    fill_chunk(response.chunk, deltas)
    return response


def fill_chunk(message: pb.GenerateStreamChunk, deltas: Sequence[OutputDelta]) -> None:
    """`chunk` in place: messages that are given to another one's constructor are copied. Fields that are 0
    are left out.
    """
    last = deltas[-1]
    request = last.request
    for delta in deltas:
        message.token_ids.extend(delta.token_ids)
    message.prompt_tokens = request.prompt_len
    message.completion_tokens = last.num_output_tokens
    if last.cached_tokens:
        message.cached_tokens = last.cached_tokens
    if last.accepted_draft_tokens or last.rejected_draft_tokens:
        message.accepted_draft_tokens = last.accepted_draft_tokens
        message.rejected_draft_tokens = last.rejected_draft_tokens
    if request.index:
        message.index = request.index
    if last.finish_reason not in (None, FinishReason.ERROR):
        message.complete_follows = True
    if request.params.logprobs is not None:
        message.output_logprobs.CopyFrom(
            output_logprobs([record for delta in deltas for record in delta.logprobs])
        )
    if request.params.prompt_logprobs is not None:
        prompt = [record for delta in deltas for record in delta.prompt_logprobs]
        if prompt:
            message.input_logprobs.CopyFrom(input_logprobs(prompt))


def complete(delta: OutputDelta, stream: bool, first_token_s: float) -> pb.GenerateResponse:
    """Returns the last message of an output; carries log-probabilities only when nothing was streamed.

    `first_token_s` is how long its first token took, seconds; 0: there was none.
    """
    request = delta.request
    message = pb.GenerateComplete(
        output_ids=request.output_token_ids,
        finish_reason=(delta.finish_reason or FinishReason.ERROR).value,
        prompt_tokens=request.prompt_len,
        completion_tokens=len(request.output_token_ids),
        cached_tokens=delta.cached_tokens,
        accepted_draft_tokens=delta.accepted_draft_tokens,
        rejected_draft_tokens=delta.rejected_draft_tokens,
        index=request.index,
        error_message=delta.error_message,
        first_token_seconds=first_token_s,
        constraint_failed=bool(delta.error_message and request.constraint and request.constraint.error),
    )
    if delta.matched_stop_token is not None:
        message.matched_token_id = delta.matched_stop_token
    if (states := request.pooled_states) is not None:
        message.pooled_hidden_states.extend(states)
    if not stream:
        _whole_logprobs(request, message)
    return pb.GenerateResponse(complete=message)


def _whole_logprobs(request: Request, message: pb.GenerateComplete) -> None:
    if request.params.logprobs is not None:
        message.output_logprobs.CopyFrom(output_logprobs(request.output_logprobs))
    if request.params.prompt_logprobs is not None:
        message.input_logprobs.CopyFrom(input_logprobs(request.prompt_logprobs))


def output_logprobs(records: Sequence[TokenLogprobs]) -> pb.OutputLogProbs:
    """Returns one entry per sampled token."""
    return pb.OutputLogProbs(
        token_logprobs=[record.logprob or 0.0 for record in records],
        token_ids=[record.token_id for record in records],
        top_logprobs=[_top(record) for record in records],
    )


def input_logprobs(records: Sequence[TokenLogprobs]) -> pb.InputLogProbs:
    """Returns one entry per prompt token; the first has no value."""
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(value=record.logprob) for record in records],
        token_ids=[record.token_id for record in records],
        top_logprobs=[_top(record) for record in records],
    )


def _top(record: TokenLogprobs) -> pb.TopLogProbs:
    return pb.TopLogProbs(values=record.top_logprobs, token_ids=record.top_ids)


_log = structlog.get_logger(__name__)


class _Refused(Exception):
    """What `abort` of a call's context raises."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(code, details)
        self.code, self.details = code, details


class CallContext:
    """Stands for the context of one call, with the methods of grpc.aio's that Generate uses."""

    def __init__(
        self, send: Callable[[OutputDelta], None], send_token: Callable[[int, int], None] | None = None
    ) -> None:
        """`send` sends the tokens of a call that streams without waking its task; `send_token` the next one
        of its only output, where that brings nothing else, and how many there are with it.
        """
        self.send = send
        self.send_token = send_token

    def invocation_metadata(self) -> tuple[()]:
        """A call among others has none."""
        return ()

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """Ends the call with this status."""
        raise _Refused(code, details)


class ManyCalls:
    """The calls of one stream; lives as long as that does."""

    def __init__(
        self, generate: Callable[[pb.GenerateRequest, Any], AsyncIterator[pb.GenerateResponse]]
    ) -> None:
        """`generate` answers one call, as the servicer's Generate."""
        self._generate = generate
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._outbox: Outbox[pb.CallUpdate] = Outbox()
        # The latest update, as long as it has tokens of many calls and is not taken, and what it will have:
        # numbers of calls, tokens, and how many there are with each. None: it is another one.
        self._open: pb.CallUpdate | None = None
        self._tokens: list[tuple[int, int, int]] = []
        self._takes_tokens = False
        self._finishing = False

    def finish(self) -> None:
        """The stream ends as soon as no call runs: the process is ending and refuses new ones."""
        self._finishing = True
        if not self._calls:
            self._outbox.close()

    async def serve(
        self, requests: AsyncIterator[pb.GenerateManyRequest]
    ) -> AsyncGenerator[pb.GenerateManyResponse, None]:
        """Runs until the client closes its side and all calls have ended, or the stream ends; then no call
        goes on."""
        reading = asyncio.create_task(self._read(requests))
        try:
            while updates := await self._outbox.take():
                self._close_tokens()
                yield pb.GenerateManyResponse(updates=updates)
        finally:
            tasks = [reading, *self._calls.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[pb.GenerateManyRequest]) -> None:
        try:
            async for message in requests:
                self._takes_tokens |= message.takes_tokens
                for request in message.requests:
                    self._take(request)
            await asyncio.gather(*self._calls.values(), return_exceptions=True)
        finally:
            self._outbox.close()

    def _take(self, request: pb.CallRequest) -> None:
        number = request.call
        if request.WhichOneof("kind") == "cancel":
            if task := self._calls.get(number):
                task.cancel()
        elif number in self._calls:
            self._end(
                number, grpc.StatusCode.ALREADY_EXISTS, f"call: {number} is the number of a running call"
            )
        else:
            self._calls[number] = asyncio.create_task(self._run(number, request.start))

    async def _run(self, number: int, request: pb.GenerateRequest) -> None:
        def send(delta: OutputDelta) -> None:
            if delta.token_ids:
                update = pb.CallUpdate(call=number)
                fill_chunk(update.response.chunk, (delta,))
                self._put(update)

        def send_token(token_id: int, count: int) -> None:
            if self._open is None:
                self._open = pb.CallUpdate()
                self._outbox.put(self._open)
            self._tokens.append((number, token_id, count))

        try:
            context = CallContext(send, send_token if self._takes_tokens else None)
            async with aclosing(self._generate(request, context)) as responses:  # type: ignore[type-var]
                async for response in responses:
                    self._put(pb.CallUpdate(call=number, response=response))
            self._end(number, grpc.StatusCode.OK, "")
        except _Refused as error:
            self._end(number, error.code, error.details)
        except Exception as error:
            _log.error("unexpected error", exc_info=error)
            self._end(number, grpc.StatusCode.UNKNOWN, f"unexpected {type(error).__name__}: {error}")
        finally:
            self._calls.pop(number, None)
            if self._finishing and not self._calls:
                self._outbox.close()

    def _end(self, number: int, code: grpc.StatusCode, details: str) -> None:
        end = pb.CallEnd(code=code.value[0], details=details)
        self._put(pb.CallUpdate(call=number, end=end))

    def _put(self, update: pb.CallUpdate) -> None:
        self._close_tokens()
        self._outbox.put(update)

    def _close_tokens(self) -> None:
        if self._open is not None:
            columns = self._open.tokens
            calls, token_ids, counts = zip(*self._tokens, strict=True)
            columns.calls.extend(calls)
            columns.token_ids.extend(token_ids)
            columns.completion_tokens.extend(counts)
        self._open, self._tokens = None, []
