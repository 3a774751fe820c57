"""One admitted request from engine calls to the answer: the same for chat and text completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog
from opentelemetry import context as otel_context
from opentelemetry import trace
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway import telemetry
from gateway.errors import to_api_error
from gateway.formats import ResponseFormat, usage_object
from gateway.generation import merge
from gateway.model import ServedModel
from gateway.output import Delta
from gateway.parsers.events import Finish, TokenLogprob
from gateway.prompts.contract import Prepared
from gateway.schemas.common import StreamOptions
from gateway.state import Gateway
from gateway.streaming import DONE, EventStream, event, run_until_disconnect

logger = structlog.get_logger(__name__)


@dataclass
class Choice:
    """One output being collected for a non-streamed answer; filled by `RequestRun.whole`."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None


class RequestRun:
    """Everything one request needs while it runs; made by a route after validation."""

    def __init__(
        self,
        gateway: Gateway,
        model: ServedModel,
        prepared: Prepared,
        form: ResponseFormat,
    ) -> None:
        """Gives the engine's requests the response's id, and describes them on the current span."""
        body = prepared.fields
        self._gateway = gateway
        self._model = model
        self._jobs = prepared.jobs
        self._format = form
        self._options = body.stream_options or StreamOptions.model_validate({})
        self._stream = bool(body.stream)
        self._log = logger if body.user is None else logger.bind(user=body.user)
        self._started = time.perf_counter()
        self._last_token: dict[int, float] = {}
        self._span = trace.get_current_span()
        for number, job in enumerate(self._jobs):
            job.request.request_id = form.id if len(self._jobs) == 1 else f"{form.id}-{number}"
        telemetry.describe_request(
            self._span, form.operation, body, self._jobs[0].request.sampling_params, model.name
        )
        self._context = otel_context.get_current()
        self._admitted = False
        self._first: asyncio.Future[bytes] | None = None
        self._events_ahead: AsyncGenerator[bytes, None] | None = None

    async def respond(self, request: Request) -> Response:
        """The answer: JSON, or an event stream whose first event is ready.

        Failures before the first token get their HTTP status. A stream that is silent for as long as a
        keep-alive interval is opened without waiting longer, and fails in-band.

        Raises:
            ApiError, grpc.aio.AioRpcError: the request failed before the answer began.
            ClientGone: the client left.
        """
        self._gateway.admission.enter()
        self._gateway.metrics.in_flight(+1)
        self._admitted = True
        if not self._stream:
            try:
                return JSONResponse(await run_until_disconnect(request, self._guarded_whole()))
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
        keepalive_s = self._gateway.config.gateway.sse_keepalive_s
        return EventStream(self._in_band(self._first, self._events_ahead), keepalive_s, self._close)

    async def _close(self) -> None:
        """Cancels what still runs and gives the admission place back, once; also when nothing had begun."""
        if self._first is not None:
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        if self._events_ahead is not None:
            await self._events_ahead.aclose()
        if self._admitted:
            self._admitted = False
            self._gateway.metrics.in_flight(-1)
            self._gateway.admission.leave()

    @staticmethod
    async def _in_band(
        first: asyncio.Future[bytes], events: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes, None]:
        """The stream once its status line is sent: a failure becomes an error event."""
        try:
            yield await first
            async for data in events:
                yield data
        except Exception as error:
            yield event(to_api_error(error).body())
            yield DONE

    async def _wait_first(self, first: asyncio.Future[bytes]) -> None:
        """Waits for the first event, at most one keep-alive interval; raises its failure."""
        await asyncio.wait({first}, timeout=self._gateway.config.gateway.sse_keepalive_s)
        if first.done():
            first.result()

    def _deltas(self) -> AsyncGenerator[Delta, None]:
        """New content of all outputs of all prompts."""
        client, tokenizer = self._gateway.engine, self._model.tokenizer
        return merge([job.run(client, tokenizer, self._context) for job in self._jobs])

    async def _guarded_whole(self) -> dict[str, Any]:
        try:
            return await self._whole()
        except Exception as error:
            self._failed(error)
            raise

    async def _whole(self) -> dict[str, Any]:
        choices: dict[int, Choice] = {}
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                self._observe(delta)
                choice = choices.setdefault(delta.index, Choice())
                choice.text.append(delta.text)
                choice.logprobs.extend(delta.logprobs)
                choice.finish = delta.finish or choice.finish
        self._finished()
        listed = [
            self._format.full(index, "".join(choice.text), choice.logprobs, choice.finish or Finish("abort"))
            for index, choice in sorted(choices.items())
        ]
        return self._format.whole(listed, self._usage())

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """The stream's bytes; raises what goes wrong."""
        opened: set[int] = set()
        try:
            async with aclosing(self._deltas()) as deltas:
                async for delta in deltas:
                    self._observe(delta)
                    for choice in self._choices(delta, opened):
                        yield self._chunk(choice)
        except Exception as error:
            self._failed(error)
            raise
        self._finished()
        if self._options.include_usage:
            yield event({**self._format.chunk([]), "usage": self._usage()})
        yield DONE

    def _choices(self, delta: Delta, opened: set[int]) -> list[dict[str, Any]]:
        """The choices one delta gives, in the order clients rely on: opening, content, closing."""
        choices: list[dict[str, Any]] = []
        if delta.index not in opened:
            opened.add(delta.index)
            opening = self._format.opening(delta.index)
            choices += [opening] if opening is not None else []
        if delta.text or delta.logprobs:
            choices.append(self._format.delta_choice(delta))
        if delta.finish is not None:
            choices.append(self._format.closing(delta.index, delta.finish))
        return choices

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        payload = self._format.chunk([choice])
        if self._options.continuous_usage_stats:
            payload["usage"] = self._usage()
        elif self._options.include_usage:
            payload["usage"] = None
        return event(payload)

    def _totals(self) -> tuple[int, int, int]:
        """Prompt, completion and cached tokens over all prompts."""
        return (
            sum(job.prompt_tokens for job in self._jobs),
            sum(job.completion_tokens for job in self._jobs),
            sum(job.cached_tokens for job in self._jobs),
        )

    def _usage(self) -> dict[str, Any]:
        return usage_object(*self._totals())

    def _observe(self, delta: Delta) -> None:
        """Latencies of calls that stream from the engine: when each token came."""
        if not delta.new_tokens or not self._jobs[0].request.stream:
            return
        now = time.perf_counter()
        if not self._last_token:
            self._first_token(now - self._started)
        if delta.index in self._last_token:
            self._gateway.metrics.tokens(now - self._last_token[delta.index], delta.new_tokens)
        self._last_token[delta.index] = now

    def _first_token(self, seconds: float) -> None:
        self._gateway.metrics.first_token(seconds)
        telemetry.describe_first_token(self._span, seconds)

    def _finished(self) -> None:
        # Of an answer that came as a whole only the engine knows when it began.
        whole = [
            job.called_at - self._started + job.first_token_s
            for job in self._jobs
            if job.first_token_s is not None and job.completion_tokens and not job.request.stream
        ]
        if whole:
            self._first_token(min(whole))
        prompt, completion, cached = self._totals()
        reasons = [reason for job in self._jobs for reason in job.finish_reasons]
        seconds = time.perf_counter() - self._started
        self._gateway.metrics.finished(seconds, prompt, completion, reasons)
        usage = {"input": prompt, "output": completion, "cache_read": cached}
        telemetry.describe_response(self._span, self._format.id, self._model.name, reasons, usage)
        self._log.info("generation finished", response_id=self._format.id, seconds=round(seconds, 4), **usage)

    def _failed(self, error: Exception) -> None:
        failure = to_api_error(error)
        if failure.status == 429:
            self._gateway.metrics.rejected("engine_queue_full")
        self._gateway.metrics.failed(failure.status)
        telemetry.describe_failure(self._span, failure.code or type(error).__name__, failure.message)
        # gRPC's own words name sockets: for the log, not for the client.
        details = {"details": error.details()} if isinstance(error, grpc.aio.AioRpcError) else {}
        self._log.warning("generation failed", status=failure.status, error=failure.message, **details)
