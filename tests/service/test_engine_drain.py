"""Guards the end of the engine process and what it says of itself: ready means that an answer would come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.replicas.engine_client import EngineClient
from gpu_service.core.request import FinishReason
from gpu_service.experts.client import ExpertUnavailable
from gpu_service.main import drain
from gpu_service.server.readiness import SERVICE_NAME, Readiness
from protos import engine_pb2 as pb
from tests.helpers.engine_harness import LOOPS, RECOVERY_TIMEOUT_S, make_request, prompt_of, running_engine
from tests.helpers.waiting import until, wait_until
from tests.service.test_engine_grpc import Served, message, served

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def watched(service: Served) -> AsyncIterator[Readiness]:
    """The service's readiness, looked at all the time."""
    engine, experts = service.harness.engine, service.harness.experts
    readiness = Readiness(service.report, engine, experts, look_every_s=0.02)  # type: ignore[arg-type]
    watching = asyncio.create_task(readiness.watch())
    yield readiness
    watching.cancel()


async def health(service: Served, name: str = SERVICE_NAME) -> int:
    """Returns what the standard health service says now."""
    check = health_pb2_grpc.HealthStub(service.channel).Check
    answer = await check(health_pb2.HealthCheckRequest(service=name))
    return int(answer.status)


async def becomes(service: Served, status: int) -> None:
    """Until the engine's health is `status`."""
    end = time.monotonic() + 60
    while await health(service) != status:
        assert time.monotonic() < end, "health did not change"
        await asyncio.sleep(0.02)


async def test_the_gateway_learns_why_an_engine_is_not_ready() -> None:
    """What is wrong with an expert server is what /ready answers, until the server is back."""
    async with served() as service, watched(service):
        await becomes(service, SERVING)
        client = EngineClient(f"127.0.0.1:{service.port}")
        try:
            assert await client.is_serving()
            assert client.not_ready == ""
            service.harness.experts.present.clear()
            await becomes(service, NOT_SERVING)
            assert not await client.is_serving()
            assert client.not_ready == "expert server 0 is dead"
            service.harness.experts.present.set()
            await becomes(service, SERVING)
            assert await client.is_serving()
            assert client.not_ready == ""
        finally:
            await client.close()


async def test_an_idle_engine_follows_its_expert_servers() -> None:
    """The engine does not serve while a server is gone, although no request runs, and serves when
    it is back.
    """
    async with served() as service, watched(service):
        await becomes(service, SERVING)
        service.harness.experts.present.clear()
        await becomes(service, NOT_SERVING)
        assert await health(service, "") == SERVING, "the process works, so that no probe kills it"
        service.harness.experts.present.set()
        await becomes(service, SERVING)


async def test_an_engine_in_recovery_is_not_ready() -> None:
    """The engine does not serve while steps wait for servers that claim to be there; the request ends well
    after that.
    """
    async with served() as service, watched(service):
        experts = service.harness.experts
        experts.problem = lambda: ""  # type: ignore[method-assign]
        experts.present.clear()
        service.harness.model.before_forward = _lost_at(service.harness.model.calls + 2)
        call = service.stub.Generate(message(stream=False))
        await becomes(service, NOT_SERVING)
        experts.present.set()
        assert (await call.read()).complete.finish_reason == "length"
        await becomes(service, SERVING)


async def test_a_dead_engine_thread_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect that ends the thread is reported: requests fail, health says so, and the process can end."""
    async with served() as service, watched(service) as readiness:
        monkeypatch.setattr(service.harness.engine, "launch_next", lambda: 1 / 0)
        answer = await service.stub.Generate(message(stream=False)).read()
        assert answer.complete.finish_reason == "error"
        assert "ZeroDivisionError" in answer.complete.error_message
        await asyncio.wait_for(readiness.lost.wait(), 60)
        assert await health(service) == NOT_SERVING
        assert await health(service, "") == NOT_SERVING


async def test_health_follows_the_engine_before_it_counts_as_lost() -> None:
    """Health also follows an engine that ends right after it was looked at: a waiter for `lost` may end the
    process, and no request may be sent to it after that.
    """
    engine, answers = SimpleNamespace(is_alive=True, is_recovering=False), []

    def ends() -> str:
        engine.is_alive = False
        return ""

    async def tell(ready: bool, works: bool, why: str) -> None:
        answers.append((ready, works))

    report: Any = SimpleNamespace(set=tell)
    readiness = Readiness(report, engine, SimpleNamespace(problem=ends), look_every_s=0)  # type: ignore[arg-type]
    watching = asyncio.create_task(readiness.watch())
    await asyncio.wait_for(readiness.lost.wait(), 60)
    assert answers == [(True, True), (False, False)]
    watching.cancel()


async def test_drain_lets_running_calls_end() -> None:
    """New calls are refused while one that runs goes on to its last token."""
    async with served() as service, watched(service) as readiness:
        running = aiter(service.stub.Generate(message(max_tokens=110)))
        await anext(running)
        service.harness.model.gate.clear()
        draining = asyncio.create_task(drain(service.servicer, readiness, 60, asyncio.Event()))
        await becomes(service, NOT_SERVING)
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down") as caught:
            await service.stub.Generate(message("late")).read()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert not draining.done()
        service.harness.model.gate.set()
        rest = [response async for response in running]
        assert len(rest[-1].complete.output_ids) == 110
        await asyncio.wait_for(draining, 60)
        assert service.servicer.running == 0


@pytest.mark.parametrize("end", ["time", "second signal", "experts lost"])
async def test_drain_ends_what_does_not_end(end: str) -> None:
    """When the time is up, at a second signal, or with experts lost, calls end with UNAVAILABLE."""
    async with served() as service, watched(service) as readiness:
        service.harness.model.gate.clear()
        call = asyncio.create_task(_read_all(service, "endless"))
        await until(lambda: service.servicer.running == 1)
        hurry = asyncio.Event()
        draining = asyncio.create_task(
            drain(service.servicer, readiness, 0.1 if end == "time" else 600, hurry)
        )
        if end == "second signal":
            hurry.set()
        elif end == "experts lost":
            service.harness.experts.present.clear()
        await asyncio.wait_for(draining, 60)
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down") as caught:
            await asyncio.wait_for(call, 60)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def _read_all(service: Served, name: str) -> list[pb.GenerateResponse]:
    return [response async for response in service.stub.Generate(message(name))]


def _lost_at(call: int):  # type: ignore[no-untyped-def]
    """A `before_forward` that loses the experts at one forward call."""

    def before_forward(number: int) -> None:
        if number == call:
            raise ExpertUnavailable(0, "killed")

    return before_forward


@LOOPS
def test_stop_does_not_wait_for_lost_experts(
    loop: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine that stops in the middle of a recovery is gone at once, its requests have ended, and the log
    says why without a traceback."""
    with running_engine(**loop) as harness:
        harness.experts.present.clear()
        harness.model.before_forward = _lost_at(harness.model.calls + 2)
        request = make_request("r", prompt_of(1, 9))
        harness.engine.submit([request])
        wait_until(lambda: harness.engine.is_recovering)
        # Less than the runner of this test waits for a server.
        assert harness.engine.stop(timeout_s=RECOVERY_TIMEOUT_S / 2)
        assert request.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
        assert not harness.engine.is_alive
    log = capsys.readouterr().out
    assert "the engine stops" in log
    assert "Traceback" not in log


def test_stop_gives_up_on_a_step_that_computes() -> None:
    """A step that does not end in time is said so, and nothing is closed under it."""
    with running_engine(overlap=True) as harness:
        harness.model.gate.clear()
        request = make_request("r", prompt_of(1, 9))
        harness.engine.submit([request])
        wait_until(lambda: request.scheduled_len > 0)
        assert not harness.engine.stop(timeout_s=0.2)
        harness.model.gate.set()
        assert harness.engine.stop(timeout_s=60)
