"""The contract `vllm.grpc.engine.VllmEngine`, for routers that speak it: a translation to our own servicer.

Messages that both contracts have are equal on the wire, so most are passed on by their bytes. What ours has
no place for is done here: a prompt that is text, and stop strings, which need the model's tokenizer.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import time
import zipfile
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import Message
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from gpu_service.server.servicer import EngineServicer, Service
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.gguf.files import companion_directory
from moebius.checkpoint.tokenizer import read_backend
from moebius.config.request_limits import MAX_STOP_STRING_CHARACTERS, MAX_STOP_STRINGS
from moebius.models.identity import REMEDY, ROUTER_FILES, changes, identity_parts, model_parts
from protos import engine_pb2, smg_common_pb2, vllm_engine_pb2_grpc
from protos import vllm_engine_pb2 as pb

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
M = TypeVar("M", bound=Message)
_Context = grpc.aio.ServicerContext[Any, Any]
_CHUNK_BYTES = 1 << 20
_KINDS = {
    "json_schema": "json_schema",
    "regex": "regex",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}


class _Refused(Exception):
    """The request cannot be done; the message names the field."""


def _as(kind: type[M], message: Message) -> M:
    """Returns the message of the other contract that has the same bytes; fields that it lacks are
    left out.
    """
    made = kind.FromString(message.SerializeToString())
    made.DiscardUnknownFields()
    return made


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Answers as the engine's own servicer does; one per process."""

    def __init__(self, engine: EngineServicer) -> None:
        self._engine = engine
        self._started = time.monotonic()
        self._last_request = 0.0  # Unix seconds
        self._tokenizer: asyncio.Task[Tokenizer] | None = None

    async def Generate(
        self, request: pb.GenerateRequest, context: _Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Streams the outputs; a cancelled call aborts them within one step."""
        self._last_request = time.time()
        service = await self._service(context)
        try:
            converted = await self._converted(request, service)
            tokenizer = await self._tokenizer_of(service) if request.sampling_params.stop else None
        except _Refused as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError("abort returned") from error
        if tokenizer is not None:
            converted.stream = True  # texts are looked for while they grow
        generated = cast(
            AsyncGenerator[engine_pb2.GenerateResponse, None], self._engine.Generate(converted, context)
        )
        async with aclosing(generated) as responses:
            checked = _checked(responses, context)
            if tokenizer is None:
                async for response in checked:
                    yield _as(pb.GenerateResponse, response)
            else:
                async for stopped in _until_stop(checked, tokenizer, request):
                    yield stopped

    async def _converted(self, request: pb.GenerateRequest, service: Service) -> engine_pb2.GenerateRequest:
        """Returns the request in our contract; raises _Refused."""
        for name in ("mm_inputs", "media_refs", "kv_transfer_params_json", "extra_mm_inputs"):
            present = len(request.extra_mm_inputs) if name == "extra_mm_inputs" else request.HasField(name)
            if present:
                raise _Refused(f"{name}: not taken by this engine; leave it unset")
        if request.data_parallel_rank != 0:
            raise _Refused(f"data_parallel_rank: {request.data_parallel_rank} is not allowed; 0 or unset")
        converted = _as(engine_pb2.GenerateRequest, request)
        if request.WhichOneof("input") == "text":
            tokenizer = await self._tokenizer_of(service)
            encoded = await asyncio.to_thread(tokenizer.encode_batch_fast, [request.text])
            converted.tokenized.input_ids.extend(encoded[0].ids)
        params = request.sampling_params
        if params.HasField("truncate_prompt_tokens"):
            _truncate(
                converted.tokenized.input_ids, params.truncate_prompt_tokens, service.info.max_req_input_len
            )
        convert_constraint(params, converted)
        if len(params.stop) > MAX_STOP_STRINGS or not all(
            0 < len(text) <= MAX_STOP_STRING_CHARACTERS for text in params.stop
        ):
            allowed = f"at most {MAX_STOP_STRINGS} of 1 to {MAX_STOP_STRING_CHARACTERS} characters"
            raise _Refused(f"sampling_params.stop: {len(params.stop)} texts are not allowed; {allowed}")
        return converted

    async def _tokenizer_of(self, service: Service) -> Tokenizer:
        """The model's, read at first need; raises _Refused when there is none."""
        if self._tokenizer is None:
            self._tokenizer = asyncio.create_task(asyncio.to_thread(_read_tokenizer, service.info))
        try:
            return await asyncio.shield(self._tokenizer)
        except CheckpointError as error:
            self._tokenizer = None
            raise _Refused(f"text and stop strings need a tokenizer: {error}") from error

    async def Embed(self, request: pb.EmbedRequest, context: _Context) -> pb.EmbedResponse:
        """Refused."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this engine generates text; it has no embeddings")
        raise AssertionError("abort returned")

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: _Context) -> pb.HealthCheckResponse:
        """Answered also while the model is loading."""
        problem = self._problem()
        return pb.HealthCheckResponse(healthy=not problem, message=problem or "Health")

    def _problem(self) -> str:
        """Why a request sent now would not be answered; empty: it would be."""
        if self._engine.service is None:
            return "the model is still loading"
        return "the engine is shutting down" if self._engine.draining else self._engine.problem()

    async def FlushCache(
        self, request: smg_common_pb2.FlushCacheRequest, context: _Context
    ) -> smg_common_pb2.FlushCacheResponse:
        """Does not wait for idleness: what running requests hold stays."""
        answer = await self._engine.FlushCache(engine_pb2.FlushCacheRequest(), context)
        freed = f"{answer.freed_tokens} tokens freed"
        return smg_common_pb2.FlushCacheResponse(success=answer.success, message=freed)

    async def Abort(self, request: pb.AbortRequest, context: _Context) -> pb.AbortResponse:
        """Ends all outputs of each id."""
        await self._engine.Abort(_as(engine_pb2.AbortRequest, request), context)
        return pb.AbortResponse()

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: _Context
    ) -> pb.GetModelInfoResponse:
        """Returns static facts; of images this contract knows only what this engine does not take."""
        info = _as(pb.GetModelInfoResponse, (await self._service(context)).info)
        info.supports_vision = False
        return info

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: _Context
    ) -> pb.GetServerInfoResponse:
        """Returns what routers label an engine with."""
        service = await self._service(context)
        return pb.GetServerInfoResponse(
            active_requests=self._engine.running,
            is_paused=bool(self._problem()),
            last_receive_timestamp=self._last_request,
            uptime_seconds=time.monotonic() - self._started,
            server_type="vllm-grpc",
            data_parallel_size=1,
            block_size=service.page_size,
            max_num_seqs=service.engine.scheduler.limits.max_num_seqs,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: _Context) -> pb.GetLoadsResponse:
        """One rank's."""
        load = await self._engine.GetLoad(engine_pb2.GetLoadRequest(), context)
        answer = pb.GetLoadsResponse(timestamp=load.timestamp, version=load.version, dp_rank_count=1)
        if request.dp_rank == 0:
            shared = {field.name for field in pb.SchedulerLoad.DESCRIPTOR.fields} - {"dp_rank", "utilization"}
            answer.loads.add(
                **{name: getattr(load, name) for name in shared},
                utilization=load.num_running_reqs / max(1, load.max_running_requests),
            )
        return answer

    async def GetTokenizer(
        self, request: smg_common_pb2.GetTokenizerRequest, context: _Context
    ) -> AsyncIterator[smg_common_pb2.GetTokenizerChunk]:
        """Yields the archive in pieces, its hash with the last."""
        service = await self._service(context)
        try:
            archive = await asyncio.to_thread(_archive, service.info)
        except CheckpointError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            raise AssertionError("abort returned") from error
        if not archive:
            reason = f"{service.info.tokenizer_path} holds no tokenizer.json and no tiktoken.model"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        pieces = range(0, len(archive), _CHUNK_BYTES)
        for start in pieces:
            digest = hashlib.sha256(archive).hexdigest() if start == pieces[-1] else ""
            data = archive[start : start + _CHUNK_BYTES]
            yield smg_common_pb2.GetTokenizerChunk(data=data, sha256=digest)

    async def SubscribeKvEvents(
        self, request: smg_common_pb2.SubscribeKvEventsRequest, context: _Context
    ) -> AsyncIterator[smg_common_pb2.KvEventBatch]:
        """Refused: routers then go by their own record of prefixes."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "what the cache holds is not published")
        yield smg_common_pb2.KvEventBatch()

    async def _service(self, context: _Context) -> Service:
        if self._engine.service is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is still loading")
            raise AssertionError("abort returned")
        return self._engine.service


async def _checked(
    responses: AsyncIterator[engine_pb2.GenerateResponse], context: _Context
) -> AsyncIterator[engine_pb2.GenerateResponse]:
    """Yields the same, with an output that failed as the call's failure: this contract has no other place for
    it.
    """
    async for response in responses:
        if response.complete.finish_reason == "error":
            is_requests = response.complete.constraint_failed
            code = grpc.StatusCode.INVALID_ARGUMENT if is_requests else grpc.StatusCode.INTERNAL
            await context.abort(code, response.complete.error_message)
        yield response


def _truncate(input_ids: Any, most: int, longest: int) -> None:
    """Keeps the end of a prompt; raises _Refused."""
    if most < -1 or most == 0:
        raise _Refused(f"sampling_params.truncate_prompt_tokens: {most} is not allowed; -1 or more than 0")
    kept = longest if most == -1 else most
    del input_ids[: max(0, len(input_ids) - kept)]


def convert_constraint(params: pb.SamplingParams, converted: engine_pb2.GenerateRequest) -> None:
    """Writes what the output has to be into our request."""
    kind = params.WhichOneof("constraint")
    if kind == "choice":
        converted.constraint.choice.options.extend(params.choice.choices)
    elif kind == "json_object":
        if params.json_object:
            converted.constraint.json_object = True
    elif kind is not None:
        setattr(converted.constraint, _KINDS[kind], getattr(params, kind))


def _check_unchanged(info: engine_pb2.GetModelInfoResponse) -> None:
    """Raises CheckpointError naming files that were written since this engine has read them."""
    found = changes(identity_parts(info.identity), model_parts(info.tokenizer_path))
    if found:
        raise CheckpointError(f"{found} since the engine was started: {REMEDY}")


def _read_tokenizer(info: engine_pb2.GetModelInfoResponse) -> Tokenizer:
    """Returns the tokenizer of the served model; raises CheckpointError."""
    tokenizer = read_backend(Path(info.tokenizer_path))
    _check_unchanged(info)
    return tokenizer


def _archive(info: engine_pb2.GetModelInfoResponse) -> bytes:
    """Returns a zip of the tokenizer's files, the same bytes every time; empty: there is no tokenizer among
    them.

    Raises CheckpointError naming files that are not those that this engine serves.
    """
    directory = companion_directory(info.tokenizer_path)
    # What a router needs to read the tokenizer, render conversations and know the model's defaults.
    files = [directory / name for name in ROUTER_FILES if (directory / name).is_file()]
    if not {"tokenizer.json", "tiktoken.model"} & {file.name for file in files}:
        return b""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            archive.writestr(zipfile.ZipInfo(file.name), file.read_bytes(), zipfile.ZIP_DEFLATED)
    _check_unchanged(info)
    return buffer.getvalue()


class _StoppingOutput:
    """One output, whose text is looked through for stop strings."""

    def __init__(self, tokenizer: Tokenizer, params: pb.SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._stops = list(params.stop)
        self._min_tokens = params.min_tokens
        self._stream = DecodeStream(skip_special_tokens=False)
        self._tail = ""  # as much of the text as an incomplete stop string can have in it
        self._longest_tail = max(map(len, self._stops)) - 1
        self._count = 0
        self.matched = ""  # the stop string that ended the output
        self.chunks = engine_pb2.GenerateStreamChunk()  # all so far, joined

    def take(self, chunk: engine_pb2.GenerateStreamChunk) -> None:
        """Cuts the chunk after the token that completes a stop string, if one does."""
        for position, token_id in enumerate(chunk.token_ids, start=1):
            self._count += 1
            text = self._tail + (self._stream.step(self._tokenizer, token_id) or "")
            self._tail = text[max(0, len(text) - self._longest_tail) :]
            found = [(text.find(stop), stop) for stop in self._stops if stop in text]
            if found and self._count >= self._min_tokens:
                self.matched = min(found)[1]
                _cut(chunk, position)
                break
        self.chunks.MergeFrom(chunk)

    def completed(self, whole: bool, last: engine_pb2.GenerateComplete | None = None) -> pb.GenerateResponse:
        """Returns the last message: the engine's, or that of a stop string.

        `whole`: nothing else was sent.
        """
        made = engine_pb2.GenerateComplete(
            output_ids=self.chunks.token_ids,
            finish_reason="stop",
            prompt_tokens=self.chunks.prompt_tokens,
            completion_tokens=len(self.chunks.token_ids),
            cached_tokens=self.chunks.cached_tokens,
            index=self.chunks.index,
        )
        if last is not None:
            made = last
        for name in ("output_logprobs", "input_logprobs") if whole else ():
            if self.chunks.HasField(name):
                getattr(made, name).CopyFrom(getattr(self.chunks, name))
        answer = _as(pb.GenerateResponse, engine_pb2.GenerateResponse(complete=made))
        if last is None:
            answer.complete.matched_stop_str = self.matched
        return answer


def _cut(chunk: engine_pb2.GenerateStreamChunk, count: int) -> None:
    """Leaves the first `count` tokens."""
    chunk.completion_tokens -= len(chunk.token_ids) - count
    del chunk.token_ids[count:]
    if chunk.HasField("output_logprobs"):
        scored = chunk.output_logprobs
        for values in (scored.token_logprobs, scored.token_ids, scored.top_logprobs):
            del values[count:]


async def _until_stop(
    responses: AsyncIterator[engine_pb2.GenerateResponse], tokenizer: Tokenizer, request: pb.GenerateRequest
) -> AsyncIterator[pb.GenerateResponse]:
    """Yields the messages of a call whose outputs end at stop strings; ends when all have."""
    params = request.sampling_params
    outputs: dict[int, _StoppingOutput] = {}
    running = params.n or 1
    async for response in responses:
        is_last = response.WhichOneof("response") == "complete"
        index = response.complete.index if is_last else response.chunk.index
        output = outputs.setdefault(index, _StoppingOutput(tokenizer, params))
        if output.matched:
            continue
        if is_last:
            yield output.completed(not request.stream, response.complete)
            running -= 1
        else:
            output.take(response.chunk)
            if request.stream:
                yield _as(pb.GenerateResponse, response)
            if output.matched:
                yield output.completed(not request.stream)
                running -= 1
        if not running:
            return
