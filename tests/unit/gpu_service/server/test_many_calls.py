"""Guards Engine.GenerateMany: calls that share a stream are as independent as calls of their own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from gateway.replicas.engine_client import EngineClient
from gpu_service.server.responses import CallContext, ManyCalls
from moebius.network.outbox import Outbox
from protos import engine_pb2 as pb
from protos import engine_pb2_grpc
from tests.helpers.waiting import until

LARGE = 100_000  # token ids: more than the common stream takes


class Engine(engine_pb2_grpc.EngineServicer):
    """Sends `max_tokens` chunks; `request_id` says what happens then."""

    def __init__(self) -> None:
        self.streams = self.own_calls = 0
        self.running: set[str] = set()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        """Yields one call, of its own or not."""
        self.own_calls += not isinstance(context, CallContext)
        self.running.add(request.request_id)
        try:
            for number in range(request.sampling_params.max_tokens):
                yield pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[number]))
            if request.request_id == "refused":
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
            if request.request_id == "broken":
                raise ValueError("a defect")
            if request.request_id.startswith("endless"):
                await asyncio.Event().wait()
        finally:
            self.running.discard(request.request_id)

    async def GenerateMany(self, requests: Any, context: Any) -> AsyncIterator[pb.GenerateManyResponse]:
        """The common stream."""
        self.streams += 1
        async with aclosing(ManyCalls(self.Generate).serve(requests)) as messages:
            async for message in messages:
                yield message


class OldEngine(Engine):
    """One that has no GenerateMany."""

    async def GenerateMany(self, requests: Any, context: Any) -> AsyncIterator[pb.GenerateManyResponse]:
        """Answers like an engine that does not know the method."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        yield pb.GenerateManyResponse()


@contextlib.asynccontextmanager
async def serving(engine: Engine, address: str) -> AsyncIterator[grpc.aio.Server]:
    """The engine at `address`."""
    server = grpc.aio.server()
    cast(Any, engine_pb2_grpc.add_EngineServicer_to_server)(engine, server)
    server.add_insecure_port(address)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def connected(engine: Engine, directory: Path) -> AsyncIterator[tuple[EngineClient, grpc.aio.Server]]:
    """A client of it, and its server."""
    address = f"unix:{directory}/engine.sock"
    async with serving(engine, address) as server:
        client = EngineClient(address)
        try:
            yield client, server
        finally:
            await client.close()


def request(name: str, tokens: int = 3, prompt: int = 4) -> pb.GenerateRequest:
    """Returns one request."""
    return pb.GenerateRequest(
        request_id=name,
        tokenized=pb.TokenizedInput(input_ids=[70_000] * prompt),
        sampling_params=pb.SamplingParams(max_tokens=tokens),
    )


async def tokens_of(client: EngineClient, one: pb.GenerateRequest) -> list[int]:
    """Returns all tokens of a call."""
    async with aclosing(client.generate(one)) as responses:
        return [token async for response in responses for token in response.chunk.token_ids]


async def test_calls_share_a_stream_and_keep_their_order(tmp_path: Path) -> None:
    """Each call gets its own messages, all of them, in order; 50 calls take one stream."""
    engine = Engine()
    async with connected(engine, tmp_path) as (client, _):
        answers = await asyncio.gather(*(tokens_of(client, request(str(n), n)) for n in range(50)))
    assert answers == [list(range(n)) for n in range(50)]
    assert (engine.streams, engine.own_calls) == (1, 0)


async def test_tokens_in_columns_are_chunks_like_those_before_them(tmp_path: Path) -> None:
    """What steps bring to many calls at once is, for each call, as if its chunks had been sent one by one."""

    class Columns(Engine):
        async def Generate(
            self, request: pb.GenerateRequest, context: Any
        ) -> AsyncIterator[pb.GenerateResponse]:
            count = request.sampling_params.max_tokens
            facts = {"prompt_tokens": 4, "cached_tokens": count}
            for number in range(count):
                if number % 5 == 0:  # another kind of update, before and after which all keep their order
                    chunk = pb.GenerateStreamChunk(token_ids=[0], completion_tokens=number + 1, **facts)
                    yield pb.GenerateResponse(chunk=chunk)
                else:
                    context.send_token(number, number + 1)
                if number % 3 == 0:
                    await asyncio.sleep(0)

    async with connected(Columns(), tmp_path) as (client, _):

        async def chunks(count: int) -> list[tuple[list[int], int, int, int]]:
            async with aclosing(client.generate(request(str(count), count))) as responses:
                found = [response.chunk async for response in responses]
            return [(list(c.token_ids), c.completion_tokens, c.prompt_tokens, c.cached_tokens) for c in found]

        answers = await asyncio.gather(*map(chunks, range(1, 40)))
    for count, answer in enumerate(answers, start=1):
        expected = [([n if n % 5 else 0], n + 1, 4, count) for n in range(count)]
        assert answer == expected


async def test_clients_that_know_no_columns_get_chunks() -> None:
    """A gateway that was built before must not lose a token."""
    contexts: list[CallContext] = []

    async def generate(one: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        contexts.append(context)
        yield pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[7]))

    async def batches(takes_tokens: bool) -> AsyncIterator[pb.GenerateManyRequest]:
        start = pb.CallRequest(call=1, start=request("one"))
        yield pb.GenerateManyRequest(requests=[start], takes_tokens=takes_tokens)

    for takes_tokens in (False, True):
        async with aclosing(ManyCalls(generate).serve(batches(takes_tokens))) as messages:
            assert [update.call async for message in messages for update in message.updates] == [1, 1]
    assert [context.send_token is not None for context in contexts] == [False, True]


@pytest.mark.parametrize(
    ("name", "code", "details"),
    [
        ("refused", grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full"),
        ("broken", grpc.StatusCode.UNKNOWN, "ValueError"),
    ],
)
async def test_a_call_that_fails_ends_alone(
    tmp_path: Path, name: str, code: grpc.StatusCode, details: str
) -> None:
    """Its status and details are those of a call of its own, after what it had sent; others go on."""
    engine = Engine()
    async with connected(engine, tmp_path) as (client, _):
        other = client.generate(request("endless", 1))
        await anext(other)
        failing = client.generate(request(name, 2))
        assert [(await anext(failing)).chunk.token_ids[0] for _ in range(2)] == [0, 1]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(failing)
        assert caught.value.code() is code
        assert details in (caught.value.details() or "")
        assert engine.running == {"endless"}
        await other.aclose()
        await until(lambda: not engine.running)  # and one that is left is cancelled


async def test_the_stream_takes_its_calls_with_it_and_is_opened_again(tmp_path: Path) -> None:
    """An engine that goes away ends all calls with UNAVAILABLE; the next call finds the one that follows."""
    engine, address = Engine(), f"unix:{tmp_path}/engine.sock"
    client = EngineClient(address)
    async with serving(engine, address) as server:
        calls = [client.generate(request(f"endless{n}", 1)) for n in range(3)]
        for call in calls:
            await anext(call)
        await server.stop(None)
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(call)
            assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        await until(lambda: not engine.running)
    async with serving(engine, address):
        await until_answered(client)
    await client.close()


async def until_answered(client: EngineClient) -> None:
    """gRPC needs a moment to connect again."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert await tokens_of(client, request("again")) == [0, 1, 2]
                return
            await asyncio.sleep(0.05)


async def test_large_requests_have_calls_of_their_own(tmp_path: Path) -> None:
    """On the common stream they would hold up the others."""
    engine = Engine()
    async with connected(engine, tmp_path) as (client, _):
        assert await tokens_of(client, request("large", prompt=LARGE)) == [0, 1, 2]
    assert (engine.streams, engine.own_calls) == (0, 1)


async def test_an_engine_without_it_is_served_by_single_calls(tmp_path: Path) -> None:
    """Nothing is lost by asking, and it is asked once."""
    engine = OldEngine()
    async with connected(engine, tmp_path) as (client, _):
        for n in range(3):
            assert await tokens_of(client, request(str(n))) == [0, 1, 2]
    assert engine.own_calls == 3


async def test_an_ending_engine_closes_the_stream_once_its_calls_have_ended() -> None:
    """A stream without calls would keep a process that stops waiting."""
    requests: Outbox[pb.GenerateManyRequest] = Outbox()
    begun, gate = asyncio.Event(), asyncio.Event()

    async def generate(one: pb.GenerateRequest, _context: Any) -> AsyncIterator[pb.GenerateResponse]:
        begun.set()
        await gate.wait()
        yield pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[7]))

    async def batches() -> AsyncIterator[pb.GenerateManyRequest]:
        while taken := await requests.take():
            for message in taken:
                yield message

    calls = ManyCalls(generate)
    requests.put(pb.GenerateManyRequest(requests=[pb.CallRequest(call=1, start=request("a"))]))
    serving_calls = calls.serve(batches())
    first = asyncio.ensure_future(anext(serving_calls))
    await begun.wait()
    calls.finish()
    gate.set()
    updates = [
        *(await first).updates,
        *[update async for message in serving_calls for update in message.updates],
    ]
    assert [update.WhichOneof("kind") for update in updates] == ["response", "end"]
