"""The gRPC face of the engine: validate, submit, stream, cancel.

Runs in the event loop; everything that could block is the engine thread's.
"""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from opentelemetry import propagate, trace
from opentelemetry.context import Context

from gpu_service.cache.tiers.prefix_tiers import PrefixTiers
from gpu_service.core.constraint import ConstraintCompiler
from gpu_service.core.request import EngineStopped, QueueFull, Request, RequestRefused, trace_fields
from gpu_service.engine.engine import Engine
from gpu_service.experts.recorder import START, STOP, ExpertRecorder, dumped, recorder_errors
from gpu_service.server import responses
from gpu_service.server.cache_tiers import cache_tiers
from gpu_service.server.image_pieces import GatheredRequest, PiecesRefused
from gpu_service.server.live import LiveExperts
from gpu_service.server.profiler import EngineProfiler, ProfileRunning, profile_seconds
from gpu_service.server.responses import CallBuffer, CallContext, CallEnded, ManyCalls, OutputRouter
from gpu_service.server.sleep import NO_PLACE, EngineSleep
from gpu_service.server.validation import Bounds, InvalidField, make_requests
from gpu_service.telemetry.metrics import EngineTelemetry
from gpu_service.vision.processor import ImagePreparer
from moebius import __version__
from moebius.errors import UserError
from moebius.process.operations import registry_text
from moebius.process.sleep_mark import ASLEEP
from protos import engine_pb2 as pb
from protos import engine_pb2_grpc

_log = structlog.get_logger(__name__)
_Context = grpc.aio.ServicerContext[Any, Any]
_GenerateContext = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]


@dataclass(frozen=True, slots=True)
class Service:
    """What the servicer needs once the model is loaded; filled by `main`."""

    engine: Engine
    router: OutputRouter
    telemetry: EngineTelemetry
    bounds: Bounds
    info: pb.GetModelInfoResponse
    page_size: int
    recorder: ExpertRecorder | None = None  # None: the model has no MoE layers.
    preparer: ImagePreparer | None = None  # None: the model is text-only.
    live: LiveExperts | None = None  # None: the model has no MoE layers.
    compiler: ConstraintCompiler | None = None  # None: the checkpoint has no tokenizer.
    profiler: EngineProfiler | None = None  # None: in tests that ask for no profile.
    model_identity: str = ""  # What requests bring that were made for this model; empty: all are taken.
    page_bytes: int = 0  # Of one page of the KV cache.
    tiers: PrefixTiers | None = None  # None: what the KV cache evicts is computed again.


class EngineServicer(engine_pb2_grpc.EngineServicer):
    """Until `service` is set, and once `draining`, calls are answered UNAVAILABLE."""

    def __init__(self, sleep: EngineSleep | None = None) -> None:
        """`sleep`: None for an engine that cannot."""
        self.sleep = sleep or EngineSleep()
        self.service: Service | None = None
        self.draining = False
        # Generate calls that have been accepted and have not ended.
        self.running = 0
        self._streams: set[ManyCalls] = set()
        # Why a request sent now would have to wait; empty: it would not. Set by who watches.
        self.problem: Callable[[], str] = lambda: ""

    async def Generate(
        self, request: pb.GenerateRequest, context: _GenerateContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Streams the outputs; a cancelled call aborts them within one step."""
        await self.sleep.until_awake(context)
        service = await self._ready(context)
        if self.draining:
            why = "falling asleep" if self.sleep.wanted.is_set() else "shutting down"
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the engine is {why}")
        if service.model_identity and request.model_identity not in ("", service.model_identity):
            reason = "model_identity: the request was made for other files of the model than are served"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        self.running += 1
        self.sleep.used(request.keep_alive_s if request.HasField("keep_alive_s") else None)
        try:
            async with aclosing(self._generate(request, context, service)) as responses:
                async for response in responses:
                    yield response
        finally:
            self.running -= 1
            self.sleep.used()

    async def GenerateMany(
        self, requests: AsyncIterator[pb.GenerateManyRequest], _context: _Context
    ) -> AsyncIterator[pb.GenerateManyResponse]:
        """Many such calls; those that still run end with the stream."""
        calls = ManyCalls(self.Generate)
        self._streams.add(calls)
        try:
            async with aclosing(calls.serve(requests)) as messages:
                async for message in messages:
                    yield message
        finally:
            self._streams.discard(calls)

    async def GenerateWithImages(
        self, messages: AsyncIterator[pb.GenerateWithImagesRequest], context: _GenerateContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Generate, once all pieces of its images have come."""
        gathered = GatheredRequest()
        try:
            async for message in messages:
                gathered.take(message)
            request = gathered.finish()
        except PiecesRefused as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError("abort returned") from error
        async with aclosing(self.Generate(request, context)) as responses:  # type: ignore[type-var]
            async for response in responses:
                yield response

    def end_streams(self) -> None:
        """Streams of many calls end once those calls have."""
        for calls in self._streams:
            calls.finish()

    async def _generate(
        self, request: pb.GenerateRequest, context: _GenerateContext, service: Service
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        arrived = time.perf_counter()
        outputs = await _validated(request, service, context)
        span = _start_span(request, outputs, context, service.info.served_model_name)
        buffer = service.router.open(request.request_id)
        if not request.stream:
            buffer.send = lambda delta: None  # the last message has all tokens
            buffer.send_token = lambda token_id, count: None
        elif isinstance(context, CallContext):
            buffer.send = context.send
            buffer.send_token = context.send_token if len(outputs) == 1 else None
        finished = False
        try:
            try:
                service.engine.submit(outputs)
            except QueueFull as error:
                finished = True
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
            except RequestRefused as error:
                finished = True
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            except EngineStopped as error:
                finished = True
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            async for message in _messages(buffer, len(outputs), request.stream, arrived):
                yield message
            finished = True
        except CallEnded as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        finally:
            service.router.close(request.request_id)
            if not finished:
                service.engine.abort(request.request_id)
            _end_span(span, outputs, cancelled=not finished)

    async def Abort(self, request: pb.AbortRequest, context: _Context) -> pb.AbortResponse:
        """Ends all outputs of each id."""
        service = await self._ready(context)
        for request_id in request.request_ids:
            # Of ids that no request has there may be any number, of any length.
            if request_id in service.router:
                _log.info("abort", request_id=request_id, reason=request.reason[:200])
            service.engine.abort(request_id)
        return pb.AbortResponse()

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: _Context
    ) -> pb.GetModelInfoResponse:
        """Returns static facts."""
        return self.sleep.info or (await self._ready(context)).info

    async def GetLoad(self, request: pb.GetLoadRequest, context: _Context) -> pb.GetLoadResponse:
        """The engine thread's last snapshot; none between the last call and the end of this program."""
        if self.sleep.quiet.is_set():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine is falling asleep")
        return _sleeping_load() if self.sleep.info is not None else _load(await self._ready(context))

    async def GetLive(self, request: pb.GetLiveRequest, context: _Context) -> pb.GetLiveResponse:
        """Returns the same, and what is known of experts and their servers."""
        if self.sleep.info is not None:
            return pb.GetLiveResponse(load=_sleeping_load())
        service = await self._ready(context)
        live = pb.GetLiveResponse(
            load=_load(service),
            prompt_throughput=service.telemetry.prompt_throughput(),
            steps=service.telemetry.steps,
            step_seconds=service.telemetry.step_seconds,
        )
        starts = service.telemetry.start_times()
        if starts is not None:
            live.first_token.CopyFrom(pb.LiveTimes(count=starts.count, p50=starts.p50, p95=starts.p95))
        live.tiers.extend(await asyncio.to_thread(_tiers, service))
        if service.live is not None:
            await service.live.describe(live)
        return live

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: _Context) -> pb.GetMetricsResponse:
        """Answers with the metrics that exist, also while the model loads."""
        answer = pb.GetMetricsResponse(text=await asyncio.to_thread(registry_text))
        if self.service is not None and self.service.live is not None:
            answer.servers.extend(await self.service.live.metrics())
        return answer

    async def Profile(self, request: pb.ProfileRequest, context: _Context) -> pb.ProfileResponse:
        """Answers when the time is over; ends early when the caller goes away."""
        service = await self._ready(context)
        assert service.profiler is not None, "main makes one"
        try:
            return await service.profiler.run(profile_seconds(request.seconds))
        except ProfileRunning as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except UserError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        raise AssertionError("abort returned")

    async def FlushCache(self, request: pb.FlushCacheRequest, context: _Context) -> pb.FlushCacheResponse:
        """Runs in the engine thread, between two steps."""
        service = await self._ready(context)
        pages = await asyncio.wrap_future(service.engine.flush())
        return pb.FlushCacheResponse(success=True, freed_tokens=pages * service.page_size)

    async def Sleep(self, request: pb.SleepRequest, context: _Context) -> pb.SleepResponse:
        """Answers when no call runs, right before the memory is given back."""
        sleep = self.sleep
        if sleep.info is not None and not sleep.waking.is_set():
            return pb.SleepResponse()
        await sleep.wake()
        service = await self._ready(context)
        if not sleep.mark.has_place:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, NO_PLACE)
        try:
            sleep.ask(service.info, request.force)
        except OSError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"sleep_file: {error}")
        await sleep.quiet.wait()
        return pb.SleepResponse()

    async def WakeUp(self, request: pb.WakeUpRequest, context: _Context) -> pb.WakeUpResponse:
        """Answers when the model is in memory."""
        if self.sleep.wanted.is_set():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine is falling asleep")
        await self.sleep.wake()
        await self._ready(context)
        return pb.WakeUpResponse()

    async def StartExpertRecorder(
        self, request: pb.StartExpertRecorderRequest, context: _Context
    ) -> pb.StartExpertRecorderResponse:
        """Counts from the next step on."""
        await self._recorder(context)
        async with recorder_errors(context, grpc.StatusCode.INVALID_ARGUMENT):
            await self._call(context, START, request.mode or "stat")
        return pb.StartExpertRecorderResponse()

    async def StopExpertRecorder(
        self, request: pb.StopExpertRecorderRequest, context: _Context
    ) -> pb.StopExpertRecorderResponse:
        """Later steps do not count."""
        await self._recorder(context)
        await self._call(context, STOP)
        return pb.StopExpertRecorderResponse()

    async def DumpExpertRecorder(
        self, request: pb.DumpExpertRecorderRequest, context: _Context
    ) -> pb.DumpExpertRecorderResponse:
        """Waits for the device, in a thread."""
        recorder = await self._recorder(context)
        async with recorder_errors(context, grpc.StatusCode.FAILED_PRECONDITION):
            return await asyncio.to_thread(dumped, recorder, request.file_format)
        raise AssertionError("abort returned")

    async def _call(self, context: _Context, operation: str, argument: str = "") -> None:
        """Runs an operation of the engine on all ranks; returns when it has ended here. Raises its error."""
        await asyncio.wrap_future((await self._ready(context)).engine.call(operation, argument))

    async def _recorder(self, context: _Context) -> ExpertRecorder:
        recorder = (await self._ready(context)).recorder
        if recorder is None:
            reason = "this model has no experts to record"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
            raise AssertionError("abort returned")
        return recorder

    async def _ready(self, context: _Context) -> Service:
        if self.service is None:
            reason = "the model is still loading" if self.sleep.info is None else ASLEEP
            await context.abort(grpc.StatusCode.UNAVAILABLE, reason)
            raise AssertionError("abort returned")
        return self.service


def _tiers(service: Service) -> list[pb.CacheTier]:
    return list(cache_tiers(service.engine.load, service.page_size, service.page_bytes, service.tiers))


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat()


def _sleeping_load() -> pb.GetLoadResponse:
    return pb.GetLoadResponse(timestamp=_now(), version=__version__, is_sleeping=True)


def _load(service: Service) -> pb.GetLoadResponse:
    load, page_size = service.engine.load, service.page_size
    return pb.GetLoadResponse(
        timestamp=_now(),
        version=__version__,
        num_running_reqs=load.num_running,
        num_waiting_reqs=load.num_waiting,
        num_total_reqs=load.num_running + load.num_waiting,
        num_used_tokens=load.used_pages * page_size,
        max_total_num_tokens=load.usable_pages * page_size,
        token_usage=load.used_pages / load.usable_pages,
        gen_throughput=service.telemetry.throughput(),
        cache_hit_rate=load.hit_tokens / max(1, load.query_tokens),
        max_running_requests=service.engine.scheduler.limits.max_num_seqs,
        num_preemptions=load.num_preemptions,
        num_cached_tokens=load.cached_pages * page_size,
        draft_tokens=load.draft_tokens,
        accepted_tokens=load.accepted_tokens,
    )


async def _validated(
    message: pb.GenerateRequest, service: Service, context: _GenerateContext
) -> list[Request]:
    try:
        if message.images or message.HasField("constraint"):
            # Decoding, resizing and compiling take as long as a step: other calls go on meanwhile.
            made = await asyncio.to_thread(
                make_requests, message, service.bounds, service.preparer, service.compiler
            )
        else:
            made = make_requests(message, service.bounds)
        if message.request_id in service.router:
            raise InvalidField("request_id", message.request_id, "ids of live requests are unique")
        return made
    except InvalidField as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        raise AssertionError("abort returned") from error


async def _messages(
    buffer: CallBuffer, outputs: int, stream: bool, arrived: float
) -> AsyncIterator[pb.GenerateResponse]:
    """Yields all messages of a call: chunks of whatever has gathered, then one complete per output.

    `arrived` is `time.perf_counter()` at the call's arrival.
    """
    while outputs > 0:
        for index, deltas in (await buffer.take()).items():
            if stream and any(delta.token_ids for delta in deltas):
                yield responses.chunk(deltas)
            if deltas[-1].finish_reason is not None:
                first_token_s = buffer.first_tokens.get(index, arrived) - arrived
                yield responses.complete(deltas[-1], stream, first_token_s)
                outputs -= 1


def _start_span(
    message: pb.GenerateRequest, outputs: list[Request], context: _GenerateContext, model: str
) -> trace.Span:
    """Returns the request's span, under the caller's; its context travels with the engine's requests."""
    carrier = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
    if "traceparent" not in carrier:
        carrier = dict(message.trace_context)
    parent: Context = propagate.extract(carrier)
    span = trace.get_tracer("moebius").start_span(
        "engine.generate", context=parent, kind=trace.SpanKind.SERVER
    )
    span.set_attribute("gen_ai.provider.name", "moebius")
    span.set_attribute("gen_ai.request.model", model)
    span.set_attribute("gen_ai.request.id", message.request_id)
    span.set_attribute("gen_ai.usage.input_tokens", outputs[0].prompt_len)
    span.set_attribute("gen_ai.request.choice.count", len(outputs))
    ids = span.get_span_context()
    if ids.is_valid:
        structlog.contextvars.bind_contextvars(
            trace_id=trace.format_trace_id(ids.trace_id), request_id=message.request_id
        )
    for output in outputs:
        output.trace_id = trace.format_trace_id(ids.trace_id) if ids.is_valid else ""
        if span.is_recording():
            propagate.inject(output.trace_context, context=trace.set_span_in_context(span))
    return span


def _end_span(span: trace.Span, outputs: list[Request], cancelled: bool) -> None:
    reasons = [output.finish_reason.value if output.finish_reason else "abort" for output in outputs]
    span.set_attribute("gen_ai.response.finish_reasons", reasons)
    span.set_attribute("gen_ai.usage.output_tokens", sum(len(o.output_token_ids) for o in outputs))
    span.set_attribute("gen_ai.usage.cache_read.input_tokens", max(o.cached_len for o in outputs))
    failed = next((output.error_message for output in outputs if output.error_message), "")
    fields = {**trace_fields(outputs), **({"error": failed} if failed else {})}
    log = _log.info if cancelled or failed else _log.debug
    log("outputs ended", request_id=outputs[0].request_id, reasons=reasons, cancelled=cancelled, **fields)
    if cancelled:
        span.set_attribute("moebius.cancelled", True)
    if "error" in reasons:
        span.set_status(trace.StatusCode.ERROR, outputs[reasons.index("error")].error_message)
    span.end()
