"""An engine that speaks the real gRPC contract and makes tokens from a script instead of a model."""

from __future__ import annotations

import contextlib
import math
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from tokenizers import Tokenizer

from gpu_service.server.image_pieces import GatheredRequest
from moebius.network.grpc_channels import listen
from moebius.process.operations import NOT_READY_METADATA
from protos import engine_pb2 as pb
from protos import engine_pb2_grpc

SERVICE = "moebius.engine.v1.Engine"
MODEL = "tiny-model"
CONTEXT = 256
FIRST_TOKEN_S = 3.0  # what it says of the first output's first token
HIDDEN = 8  # values of its hidden states
WAITING = 120  # outputs it says it queues
WORDS = ["fox", "dog", "hill", "lazy", "brown", "runs", "über", "東京", "😀", "quick", "over", "the"]


def pooled_states(prompt: Sequence[int], pooling: int) -> list[float]:
    """Returns the states that it returns for a prompt: sines of its last id, or the mean of those
    of all ids.
    """
    chosen = prompt if pooling == pb.POOLING_MEAN else prompt[-1:]
    return [sum(math.sin(token * (at + 1)) for token in chosen) / len(chosen) for at in range(HIDDEN)]


@dataclass
class Script:
    """What the engine does; set by tests before they send a request."""

    text: str | None = None  # None: words drawn from the seed
    token_ids: list[int] | None = None  # exact output, instead of text
    delay_s: float = 0.0  # before each token
    held: threading.Event | None = None  # tokens from `held_from` on wait until it is set, or the call ends
    held_from: int = 4
    fail_after: int | None = None  # tokens before the call fails with `fail_code`
    fail_code: grpc.StatusCode = grpc.StatusCode.INTERNAL
    fail_details: str = "scripted failure"
    tokens_per_chunk: int = 1
    logprobs: tuple[float, ...] = (-0.25,)  # of the tokens of each output; the last one's of all further ones
    error_message: str = ""  # ends the output with finish_reason "error"
    constraint_failed: bool = False  # that error is of the request's constraint


@dataclass
class Seen:
    """What reached the engine; filled by `FakeEngine`."""

    requests: list[pb.GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    cancelled_at: list[float] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)


class FakeEngine(engine_pb2_grpc.EngineServicer):
    """Answers Generate as protos/engine.proto says, from `script`."""

    def __init__(
        self, directory: Path, tokenizer: Tokenizer, context: int = CONTEXT, model_type: str = ""
    ) -> None:
        """`context`: tokens of prompt and output together; `model_type`: of the pretended config.json."""
        self._context = context
        self._model_type = model_type
        self.script = Script()
        self.seen = Seen()
        self.identity = ""  # what it says of its files
        self.has_many = True  # False: as an engine that does not know the method
        self._directory = directory
        self._tokenizer = tokenizer
        self._eos = int(tokenizer.token_to_id("<|end|>") or 0)
        self._prompts: set[tuple[int, ...]] = set()
        self.live = pb.GetLiveResponse()  # what GetLive answers
        self.live_calls = 0

    def reset(self) -> None:
        """Forgets script and requests, between tests."""
        self.script, self.seen = Script(), Seen()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of a prompt, special tokens included."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def GetModelInfo(self, request: Any, context: Any) -> pb.GetModelInfoResponse:
        """Returns the facts of the pretended model."""
        return pb.GetModelInfoResponse(
            model_path=str(self._directory),
            is_generation=True,
            max_context_length=self._context,
            model_type=self._model_type,
            vocab_size=self._tokenizer.get_vocab_size(),
            served_model_name=MODEL,
            tokenizer_path=str(self._directory),
            eos_token_ids=[self._eos],
            max_req_input_len=self._context - 1,
            max_waiting_requests=WAITING,
            default_sampling_params_json='{"temperature": 0.7, "top_k": 20}',
            identity=self.identity,
            hidden_size=HIDDEN,
        )

    def GetLive(self, request: Any, context: Any) -> pb.GetLiveResponse:
        """Returns figures as tests set them."""
        self.live_calls += 1
        return self.live

    def GetLoad(self, request: Any, context: Any) -> pb.GetLoadResponse:
        """Load that it pretends to have."""
        return pb.GetLoadResponse(
            version="fake", num_running_reqs=3, num_total_reqs=3, max_running_requests=4, token_usage=0.25
        )

    def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        """Notes the ids."""
        self.seen.aborted += request.request_ids
        return pb.AbortResponse()

    def FlushCache(self, request: pb.FlushCacheRequest, context: Any) -> pb.FlushCacheResponse:
        """Forgets which prompts it has seen."""
        self._prompts.clear()
        return pb.FlushCacheResponse(success=True, freed_tokens=16)

    def Sleep(self, request: pb.SleepRequest, context: Any) -> pb.SleepResponse:
        """It has no memory to give back."""
        return pb.SleepResponse()

    def WakeUp(self, request: pb.WakeUpRequest, context: Any) -> pb.WakeUpResponse:
        """It is always awake."""
        return pb.WakeUpResponse()

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        """Streams the scripted outputs, indices interleaved, then one GenerateComplete each."""
        seen, script = self.seen, self.script
        seen.requests.append(request)
        seen.metadata.append(dict(context.invocation_metadata()))
        context.add_callback(lambda: self._note_end(seen, context))
        params = request.sampling_params
        prompt = tuple(request.tokenized.input_ids)
        cached = 16 if prompt in self._prompts else 0
        self._prompts.add(prompt)
        count = params.n or 1
        outputs = [self._output(script, request, index) for index in range(count)]
        if script.fail_after == 0:
            context.abort(script.fail_code, script.fail_details)
        longest = max(len(ids) for ids, _ in outputs)
        step = script.tokens_per_chunk
        for start in range(0, longest, step):
            time.sleep(script.delay_s)
            while script.held and start >= script.held_from and context.is_active():
                if script.held.wait(0.05):
                    break
            if not context.is_active():
                return
            if script.fail_after is not None and start >= script.fail_after:
                context.abort(script.fail_code, script.fail_details)
            for index, (ids, _) in enumerate(outputs):
                if request.stream and ids[start : start + step]:
                    yield self._chunk(request, index, ids, start, step, cached)
        for index, (ids, reason) in enumerate(outputs):
            yield self._complete(request, index, ids, reason, cached)
        context.finished_well = True

    def GenerateWithImages(
        self, messages: Iterator[pb.GenerateWithImagesRequest], context: Any
    ) -> Iterator[pb.GenerateResponse]:
        """Generate, once all of the request is there."""
        gathered = GatheredRequest()
        for message in messages:
            gathered.take(message)
        yield from self.Generate(gathered.finish(), context)

    def GenerateMany(self, requests: Iterator[pb.GenerateManyRequest], context: Any) -> Any:
        """Returns each call of the stream as Generate would answer it, in a thread of its own."""
        if not self.has_many:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        return many_calls(self.Generate, requests, context)

    @staticmethod
    def _note_end(seen: Seen, context: Any) -> None:
        """gRPC calls this when a call ends for any reason."""
        if not getattr(context, "finished_well", False):
            seen.cancelled_at.append(time.monotonic())
            seen.cancelled.set()

    def _output(self, script: Script, request: pb.GenerateRequest, index: int) -> tuple[list[int], str]:
        """Returns token ids of one output and why it ends."""
        params = request.sampling_params
        limit = params.max_tokens
        if script.token_ids is not None:
            ids = list(script.token_ids)
        else:
            ids = [*self._tokenizer.encode(script.text or self._words(params, index)).ids, self._eos]
        if params.ignore_eos:
            ids = [token for token in ids if token != self._eos]
            ids = (ids * (limit // len(ids) + 1))[:limit]
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {self._eos})
        for position, token in enumerate(ids[:limit]):
            if token in stops:
                return ids[: position + 1], "stop"
        return ids[:limit], "length"

    @staticmethod
    def _words(params: pb.SamplingParams, index: int) -> str:
        """Returns the words that depend on the seed and index when sampling, and on nothing when greedy."""
        if params.temperature == 0:
            return "The quick brown fox jumps over the lazy dog."
        seed = params.seed if params.HasField("seed") else random.randrange(2**62)
        draw = random.Random(seed * 131 + index)
        return " ".join(draw.choice(WORDS) for _ in range(20))

    def _chunk(
        self, request: pb.GenerateRequest, index: int, ids: list[int], start: int, step: int, cached: int
    ) -> pb.GenerateResponse:
        params = request.sampling_params
        new = ids[start : start + step]
        chunk = pb.GenerateStreamChunk(
            token_ids=new,
            prompt_tokens=len(request.tokenized.input_ids),
            completion_tokens=start + len(new),
            cached_tokens=cached,
            index=index,
            complete_follows=start + step >= len(ids) and self._ends_well,
        )
        if params.HasField("logprobs"):
            chunk.output_logprobs.CopyFrom(self._scored(new, params, index))
        if params.HasField("prompt_logprobs") and start == 0:
            chunk.input_logprobs.CopyFrom(_input_logprobs(request))
        return pb.GenerateResponse(chunk=chunk)

    @property
    def _ends_well(self) -> bool:
        return self.script.fail_after is None and not self.script.error_message

    def _scored(self, ids: Sequence[int], params: pb.SamplingParams, index: int) -> pb.OutputLogProbs:
        """Returns the log-probabilities as scripted for the output; after the alternatives the ids that the
        request names.
        """
        value = self.script.logprobs[min(index, len(self.script.logprobs) - 1)]
        top = [_top(token, params.logprobs) for token in ids]
        for row in top:
            row.token_ids.extend(params.logprob_token_ids)
            row.values.extend(-9.0 - number for number in range(len(params.logprob_token_ids)))
        return pb.OutputLogProbs(token_ids=ids, token_logprobs=[value] * len(ids), top_logprobs=top)

    def _complete(
        self, request: pb.GenerateRequest, index: int, ids: list[int], reason: str, cached: int
    ) -> pb.GenerateResponse:
        params = request.sampling_params
        message = pb.GenerateComplete(
            output_ids=ids,
            finish_reason="error" if self.script.error_message else reason,
            error_message=self.script.error_message,
            constraint_failed=self.script.constraint_failed,
            prompt_tokens=len(request.tokenized.input_ids),
            completion_tokens=len(ids),
            cached_tokens=cached,
            index=index,
            first_token_seconds=FIRST_TOKEN_S + 100 * index if ids else 0,
        )
        if params.pooling:
            message.pooled_hidden_states.extend(pooled_states(request.tokenized.input_ids, params.pooling))
        if reason == "stop":
            message.matched_token_id = ids[-1]
        if not request.stream and params.HasField("logprobs"):
            message.output_logprobs.CopyFrom(self._scored(ids, params, index))
        if not request.stream and params.HasField("prompt_logprobs"):
            message.input_logprobs.CopyFrom(_input_logprobs(request))
        return pb.GenerateResponse(complete=message)


class CallContext:
    """One call of a stream of many, with the methods of a synchronous gRPC context."""

    def __init__(self, metadata: dict[str, str]) -> None:
        self._metadata = metadata
        self._callbacks: list[Callable[[], None]] = []
        self._active = True

    def invocation_metadata(self) -> list[tuple[str, str]]:
        """Returns the trace context, which has no other place here."""
        return list(self._metadata.items())

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Called at the end."""
        self._callbacks.append(callback)
        return True

    def is_active(self) -> bool:
        """Until it is cancelled or ended."""
        return self._active

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        """Ends the call."""
        raise _Aborted(code, details)

    def end(self) -> None:
        """It has ended, or was cancelled."""
        if self._active:
            self._active = False
            for callback in self._callbacks:
                callback()


class _Aborted(Exception):
    pass


def many_calls(
    generate: Callable[[pb.GenerateRequest, Any], Iterator[pb.GenerateResponse]],
    requests: Iterator[pb.GenerateManyRequest],
    context: Any,
) -> Iterator[pb.GenerateManyResponse]:
    """`Engine.GenerateMany` of a synchronous servicer."""
    updates: queue.SimpleQueue[pb.CallUpdate | None] = queue.SimpleQueue()
    calls: dict[int, CallContext] = {}

    def end_all() -> None:
        for call in list(calls.values()):
            call.end()
        updates.put(None)

    context.add_callback(end_all)

    def run(number: int, request: pb.GenerateRequest, call: CallContext) -> None:
        code, details = grpc.StatusCode.OK, ""
        try:
            for response in generate(request, call):
                if not call.is_active():
                    return
                updates.put(pb.CallUpdate(call=number, response=response))
        except _Aborted as error:
            code, details = error.args
        call.end()
        updates.put(pb.CallUpdate(call=number, end=pb.CallEnd(code=code.value[0], details=details)))

    def read() -> None:
        with contextlib.suppress(Exception):  # gRPC raises one of its own when the stream is cancelled
            for message in requests:
                for one in message.requests:
                    if one.WhichOneof("kind") == "cancel":
                        calls[one.call].end()
                        continue
                    calls[one.call] = call = CallContext(dict(one.start.trace_context))
                    threading.Thread(target=run, args=(one.call, one.start, call), daemon=True).start()

    threading.Thread(target=read, daemon=True).start()
    while (update := updates.get()) is not None:
        yield pb.GenerateManyResponse(updates=[update])


def _top(token_id: int, count: int) -> pb.TopLogProbs:
    """`count` alternatives, the token itself first."""
    others = [(token_id + 1 + number) % 300 + 3 for number in range(max(count - 1, 0))]
    ids = [token_id, *others][:count]
    return pb.TopLogProbs(token_ids=ids, values=[-0.25 - number for number in range(len(ids))])


def _input_logprobs(request: pb.GenerateRequest) -> pb.InputLogProbs:
    ids = list(request.tokenized.input_ids)
    count = request.sampling_params.prompt_logprobs
    return pb.InputLogProbs(
        token_ids=ids,
        token_logprobs=[pb.InputTokenLogProb(), *(pb.InputTokenLogProb(value=-0.5) for _ in ids[1:])],
        top_logprobs=[pb.TopLogProbs(), *(_top(token, count) for token in ids[1:])],
    )


class ExplainedHealth(health.HealthServicer):
    """Says why it does not serve, where that is set, as the engine's does."""

    not_ready = ""

    def Check(self, request: Any, context: Any) -> Any:
        """Answers as the standard says."""
        if self.not_ready:
            context.set_trailing_metadata(((NOT_READY_METADATA, self.not_ready.encode()),))
        return super().Check(request, context)


@contextlib.contextmanager
def serving(engine: FakeEngine, address: str) -> Iterator[ExplainedHealth]:
    """Serves `engine` at `address` (unix:path); yields its health service, which reports SERVING."""
    server = grpc.server(ThreadPoolExecutor(48))
    cast(Any, engine_pb2_grpc.add_EngineServicer_to_server)(engine, server)
    health_service = ExplainedHealth()
    health_service.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    listen(server, address)
    server.start()
    try:
        yield health_service
    finally:
        server.stop(grace=None).wait()
