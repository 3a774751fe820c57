"""Serves one admitted request, from engine calls to the answer; the same for chats and text completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc
import structlog
from opentelemetry import context as otel_context
from opentelemetry import trace
from starlette.requests import Request
from starlette.responses import Response

from gateway.apis.formats import Output, ResponseFormat, Usage
from gateway.apis.registry import Kind
from gateway.app.state import Gateway, gateway_of
from gateway.generation.images import add_images
from gateway.generation.job import Prepared, merge
from gateway.generation.model import ServedModel
from gateway.parsers.events import ParsedDelta
from gateway.schemas.errors import to_api_error
from gateway.telemetry import tracing
from gateway.transport.internal import CALLER, InternalCaller, TokenUsage
from gateway.transport.keys import KeyUse, client_of, private_salt
from gateway.transport.streaming import INLINE_TOKENS, EventStream, LastEvent, encoded, run_until_disconnect

logger = structlog.get_logger(__name__)
_LONGEST_DETAILS = 160
_MOST_PROMPTS = 256
# Headers for requests while the engine is gone or full.
_COMMON = frozenset({429, 503})
_LAST = 2**31 - 1  # the priority after all others


def prompts_at_once(max_waiting_outputs: int) -> int:
    """Returns how many prompts of one request for embeddings are in the engine at once: a quarter of what
    it queues (0: not known), so that other requests find room."""
    return max(1, min(_MOST_PROMPTS, max_waiting_outputs // 4)) if max_waiting_outputs else _MOST_PROMPTS


class RequestRun:
    """The state of one running request; made by a route after validation."""

    def __init__(
        self,
        gateway: Gateway,
        model: ServedModel,
        prepared: Prepared,
        form: ResponseFormat,
    ) -> None:
        """Sets the response's id in the engine's requests, and describes them on the current span."""
        body = prepared.fields
        self._gateway = gateway
        self._model = model
        self._jobs = prepared.jobs
        self._format = form
        self._stream = bool(body.stream)
        self._is_pooled = bool(self._jobs[0].request.sampling_params.pooling)
        self._engine_streams = self._jobs[0].request.stream
        self._rows_per_token = 1 + max(prepared.logprobs or 0, body.prompt_logprobs or 0)
        self._log = logger if body.user is None else logger.bind(user=body.user)
        self._started = time.perf_counter()
        self._first_token_s = 0.0  # seconds after `_started`; 0: none yet
        self._last_token: dict[int, float] = {}
        self._span = trace.get_current_span()
        for number, job in enumerate(self._jobs):
            engine_id = form.engine_id or form.id
            job.request.request_id = engine_id if len(self._jobs) == 1 else f"{engine_id}-{number}"
        gateway.metrics.described(self._jobs[0].request.sampling_params)
        tracing.describe_request(
            self._span, form.operation, body, self._jobs[0].request.sampling_params, model.name
        )
        self._context = otel_context.get_current()
        self._admitted = False
        self._caller: InternalCaller | None = None  # of a batch's request
        self._client = ""  # from `client_of`
        self._cache_salt: str = body.cache_salt or ""  # the client's
        self._key_use: KeyUse | None = None  # None: no keys are required
        self._first: asyncio.Future[bytes] | None = None
        self._events_ahead: AsyncGenerator[bytes, None] | None = None

    async def respond(self, request: Request) -> Response:
        """Returns the answer: JSON, or an event stream whose first event is ready.

        Failures before the first token have their HTTP status. A stream that is silent for a keep-alive
        interval is opened without further waiting, and fails in-band.

        Raises:
            ApiError, grpc.aio.AioRpcError: the request failed before the answer began.
            ClientGone: the client left.
        """
        self._key_use = getattr(request.state, "key_use", None)
        self._client = client_of(request.scope)
        salt = self._cache_salt
        if self._gateway.config.gateway.cache_isolation == "key":
            salt = private_salt(request.scope, salt)
        for job in self._jobs:
            job.request.fairness_id, job.request.cache_salt = self._client, salt
        self._caller = request.scope.get("state", {}).get(CALLER)
        if self._caller is not None:  # `gateway/batches/slots.py` limits these
            for job in self._jobs:
                job.request.priority = _LAST
        else:
            self._gateway.admission.enter(self._client)
        self._gateway.metrics.in_flight(+1)
        self._admitted = True
        if not self._stream:
            try:
                answer = await run_until_disconnect(request, self._guarded_whole())
                return Response(answer, media_type="application/json")
            finally:
                await self._close()
        self._events_ahead = self._events()
        self._first = asyncio.ensure_future(anext(self._events_ahead))
        opened = False
        try:
            await run_until_disconnect(request, self._wait_first(self._first))
            opened = True
        finally:
            if not opened:
                await self._close()
        request.state.stream_failure = self._format.stream_failure
        return EventStream(
            self._in_band(self._first, self._events_ahead),
            self._gateway.config.gateway.sse_keepalive_s,
            self._close,
            media_type=self._format.media_type,
            comment=self._format.keep_alive,
        )

    async def _close(self) -> None:
        """Cancels running work and releases the admission place, once; also if nothing had begun."""
        if self._first is not None:
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        if self._events_ahead is not None:
            await self._events_ahead.aclose()
        if self._admitted:
            self._admitted = False
            if self._key_use is not None:
                used = self._usage()
                self._key_use.took(used.prompt_tokens + used.completion_tokens)
            self._gateway.metrics.in_flight(-1)
            if self._caller is None:
                self._gateway.admission.leave(self._client)

    async def _in_band(
        self, first: asyncio.Future[bytes], events: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yields the stream after its status line is sent: a failure becomes an error event."""
        try:
            yield await first
            async for data in events:
                yield data
        except Exception as error:
            yield LastEvent(self._format.stream_failure(to_api_error(error)))

    async def _wait_first(self, first: asyncio.Future[bytes]) -> None:
        """Waits for the first event, at most one keep-alive interval; raises its failure."""
        await asyncio.wait({first}, timeout=self._gateway.config.gateway.sse_keepalive_s)
        if first.done():
            first.result()

    def _deltas(self) -> AsyncGenerator[ParsedDelta, None]:
        """Yields new content of all outputs of all prompts."""
        client, tokenizer = self._gateway.engine, self._model.tokenizer
        at_once = prompts_at_once(self._model.max_waiting_outputs) if self._is_pooled else 0
        return merge([job.run(client, tokenizer, self._context) for job in self._jobs], at_once)

    async def _guarded_whole(self) -> bytes:
        try:
            return await self._whole()
        except Exception as error:
            self._failed(error)
            raise

    async def _whole(self) -> bytes:
        outputs = await self._collected()
        usage = self._finished()

        def answer(in_pieces: bool) -> bytes:
            return encoded(self._format.whole(self._given(outputs), usage), in_pieces)

        size = (usage.completion_tokens + usage.prompt_tokens) * self._rows_per_token
        made = answer(False) if size <= INLINE_TOKENS else await asyncio.to_thread(answer, True)
        await self._format.settle()
        return made

    async def _collected(self) -> dict[int, Output]:
        """Collects all outputs. Nothing of them has been sent, so another replica can repeat a lost one's."""
        attempts = 0
        while True:
            outputs: dict[int, Output] = {}
            attempts += 1
            try:
                async with aclosing(self._deltas()) as deltas:
                    async for delta in deltas:
                        self._observe(delta)
                        outputs.setdefault(delta.index, Output()).add(delta)
                return outputs
            except grpc.aio.AioRpcError as error:
                # A call that had returned nothing was already retried elsewhere.
                if not outputs or not self._gateway.engine.may_try_again(error, attempts):
                    raise
                self._last_token.clear()

    def _given(self, outputs: dict[int, Output]) -> list[Output]:
        """Returns each prompt's outputs for the answer, in order; of surplus ones the likeliest per token."""
        given: list[Output] = []
        for job in self._jobs:
            made = range(job.first_index, job.first_index + job.request.sampling_params.n)
            own = [outputs[index] for index in made if index in outputs]
            if job.kept_outputs:
                echoed = len(job.prompt_ids) if job.rules.echoes_logprobs else 0
                own.sort(key=lambda output: -output.mean_logprob(echoed))
                own = own[: job.kept_outputs]
            given += own
        return given

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """Yields the stream's bytes; raises its failure."""
        try:
            async with aclosing(self._deltas()) as deltas:
                async for delta in deltas:
                    self._observe(delta)
                    data = self._format.stream_delta(delta, self._usage)
                    if data:
                        yield data
        except Exception as error:
            self._failed(error)
            raise
        end = self._format.stream_end(self._finished())
        await self._format.settle()
        yield LastEvent(end)

    def _usage(self) -> Usage:
        """Returns the counts so far."""
        jobs = self._jobs
        drafted = [counts for job in jobs for counts in job.draft_tokens.values()]
        return Usage(
            prompt_tokens=sum(job.prompt_tokens for job in jobs),
            completion_tokens=sum(job.completion_tokens for job in jobs),
            cached_tokens=sum(job.cached_tokens for job in jobs),
            reasoning_tokens=sum(job.reasoning_tokens for job in jobs),
            accepted_draft_tokens=sum(accepted for accepted, _ in drafted),
            rejected_draft_tokens=sum(rejected for _, rejected in drafted),
            prompt_s=self._first_token_s,
            total_s=time.perf_counter() - self._started,
        )

    def _observe(self, delta: ParsedDelta) -> None:
        """Observes latencies of streaming calls: the arrival times of tokens."""
        if not delta.new_tokens or not self._engine_streams:
            return
        now = time.perf_counter()
        if not self._last_token:
            self._first_token(now - self._started)
        last = self._last_token.get(delta.index)
        if last is not None:
            self._gateway.metrics.tokens(now - last, delta.new_tokens)
        self._last_token[delta.index] = now

    def _first_token(self, seconds: float) -> None:
        self._first_token_s = seconds
        self._gateway.metrics.first_token(seconds)
        tracing.describe_first_token(self._span, seconds)

    def _finished(self) -> Usage:
        # Only the engine knows when an answer that is not streamed began.
        whole = [
            (job, job.called_at - self._started + job.first_token_s)
            for job in self._jobs
            if job.first_token_s is not None and job.completion_tokens and not job.request.stream
        ]
        if whole:
            self._first_token(min(first_s for _, first_s in whole))
        total = self._usage()
        if self._caller is not None:
            tokens = (
                total.prompt_tokens,
                total.cached_tokens,
                total.completion_tokens,
                total.reasoning_tokens,
            )
            self._caller.usage = TokenUsage(*tokens)
        for job, first_s in whole:
            outputs = len(job.finish_reasons)
            further = job.completion_tokens - outputs
            self._gateway.metrics.tokens((total.total_s - first_s) * outputs, further)
        reasons = [reason for job in self._jobs for reason in job.finish_reasons]
        self._gateway.metrics.finished(
            total.total_s, total.prompt_tokens, total.completion_tokens, reasons, total.prompt_s
        )
        self._gateway.genai.finished(
            self._format.operation,
            self._model.name,
            total.total_s,
            total.prompt_s,
            (total.prompt_tokens, total.completion_tokens),
            len(reasons),
        )
        usage = {
            "input": total.prompt_tokens,
            "output": total.completion_tokens,
            "cache_read": total.cached_tokens,
        }
        tracing.describe_response(self._span, self._format.id, self._model.name, reasons, usage)
        self._log.info(
            "generation finished", response_id=self._format.id, seconds=round(total.total_s, 4), **usage
        )
        return total

    def _failed(self, error: Exception) -> None:
        failure = to_api_error(error)
        if failure.status == 429:
            self._gateway.metrics.rejected("engine_queue_full")
        self._gateway.metrics.failed(failure.status)
        seconds = time.perf_counter() - self._started
        kind = failure.code or str(failure.status)
        self._gateway.genai.failed(self._format.operation, self._model.name, seconds, kind)
        tracing.describe_failure(self._span, failure.code or type(error).__name__, failure.message)
        fields: dict[str, Any] = {"status": failure.status, "error": failure.message}
        if isinstance(error, grpc.aio.AioRpcError):  # gRPC's own message: for the log, not for the client
            fields["details"] = (error.details() or "")[:_LONGEST_DETAILS]
        if failure.status in _COMMON:
            reason = (failure.status, failure.code)
            self._gateway.warnings.warn(logger, "generation failed", reason, **fields)
        else:
            self._log.warning("generation failed", **fields)


async def respond(request: Request, prepared: Prepared, form: ResponseFormat) -> Response:
    """Answers a prepared request in the format of its API. Raises what `RequestRun.respond` raises, and
    ApiError 400 for an image that cannot be used."""
    gateway = gateway_of(request)
    if prepared.images:
        await add_images(prepared.jobs[0], prepared.images, gateway.config.images)
    return await RequestRun(gateway, gateway.model(), prepared, form).respond(request)


async def answered(request: Request, kind: Kind) -> Response:
    """Returns the JSON answer of a request that needs no engine."""
    answer = await gateway_of(request).prepare(request, kind)
    assert isinstance(answer, bytes)
    return Response(answer, media_type="application/json")
