"""Guards the gRPC face of the engine against an in-process server on the fake model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from gpu_service.main import MIN_PING_INTERVAL_MS, make_server
from gpu_service.server.readiness import SERVICE_NAME, HealthReport
from gpu_service.server.responses import OutputRouter
from gpu_service.server.servicer import EngineServicer, Service
from gpu_service.server.validation import Bounds
from gpu_service.telemetry.metrics import EngineMetrics, EngineTelemetry
from moebius.config.request_limits import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from moebius.network.grpc_channels import open_aio_channel
from protos import engine_pb2 as pb
from protos import engine_pb2_grpc
from tests.helpers.engine_harness import Harness, make_request, prompt_of, running_engine
from tests.helpers.fake_model import VOCAB
from tests.helpers.waiting import until


@dataclass
class Served:
    """A running server, its client stub and what is behind it."""

    stub: engine_pb2_grpc.EngineStub
    channel: grpc.aio.Channel
    harness: Harness
    registry: CollectorRegistry
    servicer: EngineServicer
    report: HealthReport
    port: int


@asynccontextmanager
async def served(min_ping_interval_ms: int = MIN_PING_INTERVAL_MS, **knobs: Any) -> AsyncIterator[Served]:
    """Serves a fake engine on a free port."""
    registry = CollectorRegistry()
    telemetry = EngineTelemetry(EngineMetrics("fake", registry))
    telemetry.enabled = True
    knobs = {"overlap": True, "observer": telemetry} | knobs
    with running_engine(**knobs) as harness:
        router = OutputRouter(asyncio.get_running_loop())
        harness.on_output = router.on_output  # type: ignore[method-assign]
        servicer = EngineServicer()
        server, report, port = make_server(servicer, "127.0.0.1:0", min_ping_interval_ms)
        await report.set(True)
        await server.start()
        info = pb.GetModelInfoResponse(vocab_size=VOCAB, served_model_name="fake")
        servicer.service = Service(harness.engine, router, telemetry, Bounds(VOCAB, 128), info, 4)
        async with open_aio_channel(f"127.0.0.1:{port}") as channel:
            stub = engine_pb2_grpc.EngineStub(channel)
            yield Served(stub, channel, harness, registry, servicer, report, port)
        harness.model.gate.set()
        await server.stop(0)


def message(request_id: str = "r", stream: bool = True, **sampling: Any) -> pb.GenerateRequest:
    """Returns a greedy request of 12 tokens."""
    defaults: dict[str, object] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=prompt_of(1, 10)),
        sampling_params=pb.SamplingParams(**(defaults | sampling)),  # type: ignore[arg-type]
        stream=stream,
    )


async def idle(harness: Harness) -> None:
    """Until the engine has no request left."""
    await until(lambda: harness.engine.load.num_running + harness.engine.load.num_waiting == 0)


async def test_stream_adds_up_to_the_whole() -> None:
    """Chunks concatenate to the complete message, which equals the answer without streaming."""
    async with served() as service:
        streamed = [r async for r in service.stub.Generate(message("a", logprobs=2, prompt_logprobs=1))]
        before = time.perf_counter()
        whole = [r async for r in service.stub.Generate(message("b", stream=False, logprobs=2))]
        seconds = time.perf_counter() - before
    # Who does not stream learns from this alone how long the first token took.
    assert 0 < whole[0].complete.first_token_seconds < seconds
    assert streamed[-1].complete.first_token_seconds > 0
    chunks, last = [r.chunk for r in streamed[:-1]], streamed[-1].complete
    assert [t for c in chunks for t in c.token_ids] == list(last.output_ids)
    assert [t for c in chunks for t in c.output_logprobs.token_ids] == list(last.output_ids)
    assert list(chunks[0].input_logprobs.token_ids) == prompt_of(1, 10)
    assert not chunks[0].input_logprobs.token_logprobs[0].HasField("value")
    assert chunks[-1].completion_tokens == 12
    assert len(whole) == 1
    assert whole[0].complete.output_ids == last.output_ids
    assert whole[0].complete.finish_reason == "length"
    assert len(whole[0].complete.output_logprobs.top_logprobs[11].values) == 2


async def test_a_request_for_other_files_is_refused() -> None:
    """One that was made by another tokenizer would be answered as if nothing were wrong."""
    async with served() as running:
        running.servicer.service = replace(running.servicer.service, model_identity="ab")
        for identity in ("", "ab"):
            request = message(identity or "r")
            request.model_identity = identity
            assert [one async for one in running.stub.Generate(request)]
        request.model_identity = "cd"
        with pytest.raises(grpc.aio.AioRpcError, match="model_identity") as caught:
            [one async for one in running.stub.Generate(request)]
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_outputs_share_the_prompt_and_differ() -> None:
    """n outputs end once each; later ones find the prompt cached; the seed repeats all of them."""
    async with served() as service:
        rounds = []
        for request_id in ("a", "b"):
            call = service.stub.Generate(message(request_id, stream=False, n=3, seed=5, temperature=1.0))
            done = sorted([r.complete async for r in call], key=lambda c: c.index)
            rounds.append([list(c.output_ids) for c in done])
            assert [c.index for c in done] == [0, 1, 2]
            assert all(c.cached_tokens == 8 for c in done[1:])
    assert rounds[0] == rounds[1]
    assert rounds[0][0] != rounds[0][1]


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temperature": -1.0}, "sampling_params.temperature: -1.0 is not allowed; 0 (greedy) or more"),
        ({"temperature": float("nan")}, "sampling_params.temperature"),
        ({"top_p": 1.5}, "sampling_params.top_p"),
        ({"min_p": -0.1}, "sampling_params.min_p"),
        ({"presence_penalty": 3.0}, "sampling_params.presence_penalty"),
        ({"repetition_penalty": -1.0}, "sampling_params.repetition_penalty"),
        ({"n": 129}, "sampling_params.n: 129 is not allowed; 1 to 128"),
        ({"logprobs": 21}, "sampling_params.logprobs: 21 is not allowed; 0 to 20"),
        ({"stop_token_ids": [VOCAB]}, "sampling_params.stop_token_ids"),
        ({"logit_bias": {1: 101.0}}, "sampling_params.logit_bias"),
        (
            {"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)},
            f"sampling_params.logit_bias: '{MAX_LOGIT_BIAS + 1} entries' is not allowed; at most",
        ),
        (
            {"stop_token_ids": [1] * (MAX_STOP_TOKEN_IDS + 1)},
            f"sampling_params.stop_token_ids: '{MAX_STOP_TOKEN_IDS + 1} entries' is not allowed; at most",
        ),
        ({"max_tokens": 0}, "sampling_params.max_tokens: 0 is not allowed; 1 to 118 with 10 prompt tokens"),
        ({"max_tokens": 119}, "sampling_params.max_tokens"),
        ({"min_tokens": 13}, "sampling_params.min_tokens"),
        ({"allowed_token_ids": [VOCAB]}, "sampling_params.allowed_token_ids"),
        (
            {"allowed_token_ids": [1] * 8193},
            "sampling_params.allowed_token_ids: '8193 entries' is not allowed",
        ),
        ({"logprob_token_ids": [1]}, "sampling_params.logprob_token_ids: '1 ids' is not allowed; they need"),
        ({"bad_words": [pb.TokenSequence()]}, "sampling_params.bad_words"),
        ({"bad_words": [pb.TokenSequence(token_ids=[VOCAB])]}, "sampling_params.bad_words"),
        ({"bad_words": [pb.TokenSequence(token_ids=[1] * 100)] * 90}, "sampling_params.bad_words"),
    ],
)
async def test_bad_parameters_are_named(sampling: dict[str, object], field: str) -> None:
    """Every refusal is INVALID_ARGUMENT and names the field."""
    async with served() as service:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.stub.Generate(message(**sampling)).read()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert field in (caught.value.details() or "")


async def test_bad_prompts_and_ids_are_named() -> None:
    """Empty, overlong and out-of-vocabulary prompts, and a request id that is still live."""
    async with served() as service:
        for ids, field in (([], "0 tokens"), ([1] * 128, "1 to 127 tokens"), ([VOCAB], "[0, 97)")):
            bad = message()
            bad.tokenized.ClearField("input_ids")
            bad.tokenized.input_ids.extend(ids)
            with pytest.raises(grpc.aio.AioRpcError, match=r"tokenized\.input_ids") as caught:
                await service.stub.Generate(bad).read()
            assert field in (caught.value.details() or "")
        service.harness.model.gate.clear()
        first = service.stub.Generate(message("same"))
        await until(lambda: bool(service.harness.engine.scheduler.running))
        with pytest.raises(grpc.aio.AioRpcError, match="request_id"):
            await service.stub.Generate(message("same")).read()
        first.cancel()


async def test_cancel_aborts() -> None:
    """A call that is cancelled frees its pages although its output was far from done."""
    async with served() as service:
        call = service.stub.Generate(message(max_tokens=110))
        await call.read()
        service.harness.model.gate.clear()
        call.cancel()
        await until(lambda: service.servicer.running == 0)
        service.harness.model.gate.set()
        await idle(service.harness)
        assert service.harness.engine.load.used_pages == 0
        assert service.harness.model.calls < 100


async def test_abort_ends_the_stream() -> None:
    """Abort by id ends every output with finish_reason abort; unknown ids are ignored."""
    async with served() as service:
        call = service.stub.Generate(message("gone", max_tokens=110, n=2))
        messages = aiter(call)
        await anext(messages)
        service.harness.model.gate.clear()
        await service.stub.Abort(pb.AbortRequest(request_ids=["gone", "unknown"]))
        service.harness.model.gate.set()
        ends = [r.complete async for r in messages if r.WhichOneof("response") == "complete"]
    assert [end.finish_reason for end in ends] == ["abort", "abort"]


async def test_an_abort_of_an_unknown_request_fills_no_log() -> None:
    """Ids may be of any length and number; only those of live requests are worth a line."""
    async with served() as service:
        call = service.stub.Generate(message("live", max_tokens=110))
        await anext(aiter(call))
        with structlog.testing.capture_logs() as lines:
            await service.stub.Abort(pb.AbortRequest(request_ids=["x" * 10_000, "live"], reason="y" * 10_000))
        assert [line["request_id"] for line in lines if line["event"] == "abort"] == ["live"]
        assert len(str(lines)) < 1000


async def test_full_queue_is_resource_exhausted() -> None:
    """More outputs than may wait are refused at once, and the engine goes on."""
    async with served(max_waiting=2) as service:
        service.harness.model.gate.clear()
        engine = service.harness.engine
        running = service.stub.Generate(message("running"))
        # Two steps are in flight and wait at the gate: nothing more is scheduled.
        await until(lambda: any(one.scheduled_len > one.prompt_len for one in engine.scheduler.running))
        waiting = service.stub.Generate(message("waiting", n=2))
        await until(lambda: engine._inbox.num_added + len(engine.scheduler.waiting) == 2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.stub.Generate(message("refused")).read()
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "at most 2" in (caught.value.details() or "")
        service.harness.model.gate.set()
        assert [r async for r in running]
        assert [r async for r in waiting]


async def test_more_outputs_than_ever_wait_are_invalid() -> None:
    """Asking again would not help, so that the refusal is no full queue."""
    async with served(max_waiting=2) as service:
        with pytest.raises(grpc.aio.AioRpcError, match="at most 2 may wait") as caught:
            await service.stub.Generate(message(n=3)).read()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_slow_client_gets_several_tokens_per_message() -> None:
    """Tokens of many steps share a message once the client has fallen behind."""
    async with served() as service:
        buffer = service.servicer.service.router.open("slow")  # type: ignore[union-attr]
        request = make_request("slow", prompt_of(1, 5))
        service.harness.engine.submit([request])
        await until(lambda: request.finished)
        await asyncio.sleep(0.02)
        deltas = (await buffer.take())[0]
    assert sum(len(delta.token_ids) for delta in deltas) == 12
    assert len(deltas) > 1


async def test_load_flush_info_health_metrics() -> None:
    """The other calls tell what happened."""
    async with served() as service:
        assert [r async for r in service.stub.Generate(message(stream=False))]
        await idle(service.harness)
        load = await service.stub.GetLoad(pb.GetLoadRequest())
        assert load.num_total_reqs == 0
        assert load.num_cached_tokens == 20
        assert load.max_total_num_tokens == 199 * 4
        assert load.gen_throughput > 0
        flushed = await service.stub.FlushCache(pb.FlushCacheRequest())
        assert (flushed.success, flushed.freed_tokens) == (True, 20)
        assert (await service.stub.GetModelInfo(pb.GetModelInfoRequest())).served_model_name == "fake"
        check = health_pb2_grpc.HealthStub(service.channel).Check
        answer = await check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        labels = {"model_name": "fake", "engine": "0"}
        value = service.registry.get_sample_value
        assert value("vllm:prompt_tokens_total", labels) == 10
        assert value("vllm:generation_tokens_total", labels) == 12
        assert value("vllm:request_decode_time_seconds_count", labels) == 1


async def test_unavailable_before_ready_and_while_draining() -> None:
    """No call hangs on an engine that is not there."""
    async with served() as service:
        service.servicer.draining = True
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
            await service.stub.Generate(message()).read()
        service.servicer.service = None
        with pytest.raises(grpc.aio.AioRpcError, match="still loading"):
            await service.stub.GetLoad(pb.GetLoadRequest())


async def test_reflection_is_off_unless_asked_for() -> None:
    """Services are not listed to all who reach the port; with the setting they are."""
    for reflect in (False, True):
        server, _, port = make_server(EngineServicer(), "127.0.0.1:0", reflect=reflect)
        await server.start()
        async with open_aio_channel(f"127.0.0.1:{port}") as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            call = stub.ServerReflectionInfo(iter([request]))
            if reflect:
                answer = await call.read()
                assert SERVICE_NAME in {s.name for s in answer.list_services_response.service}
            else:
                assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
        await server.stop(0)
