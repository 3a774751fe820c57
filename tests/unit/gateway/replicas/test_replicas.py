"""Guards the gateway's use of several engine replicas: who gets a request, and what when one fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from gateway.replicas.addresses import is_name, resolved
from gateway.replicas.engine_client import SERVICE, EngineClient
from gateway.replicas.prefixes import BLOCK, SentPrefixes, block_digests, preferred_replica
from gateway.replicas.replica import Replica, difference
from gateway.replicas.replica_set import ReplicaSet
from gateway.replicas.routing import choose, last_resort
from gateway.telemetry.metrics import ReplicaMetrics
from gpu_service.server.responses import ManyCalls
from moebius.models.identity import identity_digest
from protos import engine_pb2 as pb
from protos import engine_pb2_grpc

PROMPTS = st.lists(st.integers(0, 3), max_size=12)  # blocks of one repeated token each


def tokens(blocks: Sequence[int]) -> list[int]:
    """Returns a prompt of these blocks."""
    return [block for block in blocks for _ in range(BLOCK)]


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """Returns the length of the common beginning."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(left), len(right)))


@given(sent=st.lists(PROMPTS, max_size=6), prompt=PROMPTS, rest=st.integers(0, BLOCK - 1))
def test_a_match_is_the_longest_beginning_that_was_sent(
    sent: list[list[int]], prompt: list[int], rest: int
) -> None:
    """Whole blocks only, and only together with all tokens before them."""
    prefixes = SentPrefixes()
    for one in sent:
        prefixes.note(block_digests(tokens(one)))
    digests = block_digests(tokens(prompt) + [9] * rest)
    assert len(digests) == len(prompt)
    assert prefixes.match(digests) == max((common(one, prompt) for one in sent), default=0)
    assert prefixes.match(block_digests(tokens(prompt), salt="tenant")) == 0


def test_what_is_kept_of_prompts_is_bounded_and_begins_at_their_beginning() -> None:
    """A prompt longer than all that is kept still matches from its first block on."""
    prefixes = SentPrefixes(most=10)
    prefixes.note(block_digests(tokens(range(100, 130))))
    assert prefixes.match(block_digests(tokens(range(100, 130)))) == 10
    prefixes.note(block_digests(tokens(range(200, 206))))
    assert prefixes.match(block_digests(tokens(range(200, 206)))) == 6
    assert prefixes.match(block_digests(tokens(range(100, 130)))) == 4


@given(prompt=st.lists(st.integers(0, 2**17), min_size=BLOCK, max_size=BLOCK), gone=st.integers(0, 3))
def test_only_the_prompts_of_a_replica_that_goes_move(prompt: list[int], gone: int) -> None:
    """The preferred replica is the same in every process and order, and stays when another one leaves."""
    names = [f"10.0.0.{number}:50051" for number in range(4)]
    digests = block_digests(prompt)
    chosen = preferred_replica(digests, names)
    assert preferred_replica(digests, names[::-1]) == chosen
    if names[gone] != chosen:
        assert preferred_replica(digests, names[:gone] + names[gone + 1 :]) == chosen


class Clock:
    """A time that tests set."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def replica(name: str = "a", clock: Clock | None = None, **values: Any) -> Replica:
    """Returns one without a connection."""
    return Replica(name, cast(EngineClient, None), clock or Clock(), **values)


def test_a_prompt_goes_where_its_prefix_is_cached_unless_that_is_far_busier() -> None:
    """Affinity decides among replicas that are about as busy, load among those that are not."""
    digests = block_digests(tokens([1, 2, 3, 4]))
    cached, other = replica("a"), replica("b")
    cached.prefixes.note(digests)
    assert choose([cached, other], digests) is cached
    assert choose([other, cached], digests) is cached
    cached.in_flight = 20  # of 64
    assert choose([cached, other], digests) is cached
    cached.in_flight = 60
    assert choose([cached, other], digests) is other
    assert choose([cached, other], block_digests(tokens([9]))) is other


def test_the_load_that_others_cause_counts() -> None:
    """A replica reports all its outputs; what this process sent meanwhile comes on top."""
    one, two = replica("a", reported=30, reported_own=10, in_flight=12), replica("b", in_flight=25)
    assert one.load == pytest.approx(32 / 64)
    assert choose([one, two], ()) is two


@given(
    states=st.lists(
        st.tuples(st.booleans(), st.booleans(), st.booleans(), st.integers(0, 3), st.integers(0, 2)),
        min_size=1,
        max_size=5,
    ),
    prompt=PROMPTS,
)
def test_only_replicas_that_may_be_used_are_chosen(states: list[Any], prompt: list[int]) -> None:
    """Replicas are chosen so whatever their load and cache; and when none may be, the last resort is one of
    the same model.
    """
    replicas = []
    for number, (serving, mismatch, leaving, failures, in_flight) in enumerate(states):
        one = replica(str(number), is_serving=serving, mismatch="another" * mismatch, is_leaving=leaving)
        one.failures, one.in_flight = failures, in_flight
        replicas.append(one)
    found = choose(replicas, block_digests(tokens(prompt)))
    usable = [
        one
        for one in replicas
        if one.is_serving and not one.mismatch and not one.is_leaving and not (one.failures and one.in_flight)
    ]
    assert found in usable if usable else found is None
    last = last_resort(replicas)
    assert (last is None) == all(one.mismatch or one.is_leaving for one in replicas)


def test_a_replica_that_fails_is_left_alone_longer_each_time_and_tried_by_one() -> None:
    """After its pause one request at a time may try; the first answer brings it back."""
    clock = Clock()
    one = replica(clock=clock)
    for pause_s in (1.0, 2.0, 4.0):
        one.failed()
        clock.time += pause_s - 0.01
        assert not one.may_be_used
        clock.time += 0.02
        assert one.may_be_used
        one.in_flight = 1
        assert not one.may_be_used
        one.in_flight = 0
    for _ in range(40):
        one.failed()
    assert one.ejected_until - clock.time == 30.0
    one.worked()
    one.in_flight = 50
    assert one.may_be_used


def test_a_different_model_is_named() -> None:
    """The first fact that differs, with both values."""
    ours = pb.GetModelInfoResponse(served_model_name="m", vocab_size=100, eos_token_ids=[1, 2])
    theirs = pb.GetModelInfoResponse(served_model_name="m", vocab_size=100, eos_token_ids=[1])
    assert difference(ours, ours) == ""
    assert difference(ours, theirs) == "eos_token_ids is [1], that of the others is [1, 2]"
    ours.identity, theirs.identity = "a.json=0\nb.gguf=1\n", "a.json=0\nc.gguf=1\n"
    theirs.eos_token_ids.append(2)
    assert difference(ours, theirs) == ""
    theirs.identity = "a.json=1\n"
    assert difference(ours, theirs).endswith("than this gateway: a.json has changed")


def test_names_are_distinguished_from_addresses() -> None:
    """Only names are looked up again."""
    assert [is_name(one) for one in ("unix:/a/b:1", "10.0.0.1:5", "[::1]:5")] == [False] * 3
    assert [is_name(one) for one in ("engine:5", "localhost:5", "a.b.svc.cluster.local:50051")] == [True] * 3


async def test_a_name_stands_for_the_addresses_of_one_family() -> None:
    """Both families lead to the same replicas."""
    assert await resolved("localhost:7") in (["127.0.0.1:7"], ["[::1]:7"])
    assert await resolved("no-such-host.invalid:7") is None


class Engine(engine_pb2_grpc.EngineServicer):
    """A replica whose answers a test chooses."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: list[str] = []
        self.fails_with: tuple[grpc.StatusCode, str] | None = None
        self.after = 0  # chunks before that
        self.endless = False
        self.info = pb.GetModelInfoResponse(served_model_name="m", vocab_size=100)
        self.num_waiting = 0

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        """Yields three chunks and the end, unless it fails."""
        if self.info.identity and request.model_identity != identity_digest(self.info.identity):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "other files")
        self.seen.append(request.request_id)
        for number in range(self.after if self.fails_with else 3):
            yield pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=[number]))
        if self.fails_with:
            await context.abort(*self.fails_with)
        if self.endless:
            await asyncio.Event().wait()
        yield pb.GenerateResponse(complete=pb.GenerateComplete(finish_reason=self.name))

    async def GenerateMany(self, requests: Any, context: Any) -> AsyncIterator[pb.GenerateManyResponse]:
        """The common stream."""
        async with aclosing(ManyCalls(self.Generate).serve(requests)) as messages:
            async for message in messages:
                yield message

    async def GetModelInfo(self, request: Any, context: Any) -> pb.GetModelInfoResponse:
        """Returns what it says of its model."""
        return self.info

    async def GetLoad(self, request: Any, context: Any) -> pb.GetLoadResponse:
        """Returns what it says of its queues."""
        return pb.GetLoadResponse(num_total_reqs=self.num_waiting, max_running_requests=8)


class Replicas:
    """Some engines and the set of them."""

    def __init__(self, directory: Path, count: int) -> None:
        self.engines = [Engine(str(number)) for number in range(count)]
        self.addresses = [f"unix:{directory}/{number}.sock" for number in range(count)]
        self.servers: list[grpc.aio.Server] = []
        self.registry = CollectorRegistry()
        self.set = ReplicaSet(self.addresses, ReplicaMetrics(self.registry), poll_s=0.05)

    async def start(self, number: int) -> grpc.aio.Server:
        """Serves one engine."""
        server = grpc.aio.server()
        cast(Any, engine_pb2_grpc.add_EngineServicer_to_server)(self.engines[number], server)
        service = health.aio.HealthServicer()
        await service.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(service, server)
        server.add_insecure_port(self.addresses[number])
        await server.start()
        return server

    async def ask(self, name: str = "r", prompt: Sequence[int] = ()) -> str:
        """Returns the name of the engine that answered."""
        request = pb.GenerateRequest(request_id=name, tokenized=pb.TokenizedInput(input_ids=prompt or [1]))
        async with aclosing(self.set.generate(request)) as responses:
            return [response.complete.finish_reason async for response in responses][-1]

    def of(self, number: int) -> Replica:
        """Returns the gateway's view of one."""
        return self.set.replicas[self.addresses[number]]

    async def until(self, condition: Any) -> None:
        """Waits for it."""
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - what the set's own tasks find out
                await asyncio.sleep(0.01)


IDENTITY = "tokenizer.json=00\nconfig.json=00\n"


@contextlib.asynccontextmanager
async def replicas(directory: Path, count: int = 3, identity: str = "") -> AsyncIterator[Replicas]:
    """Engines that serve, and a set that knows them.

    With an `identity` they say that they have read that, and the set refuses what was made for other files.
    """
    made = Replicas(directory, count)
    for engine in made.engines:
        engine.info.identity = identity
    made.servers = [await made.start(number) for number in range(count)]
    await made.set.open()
    if identity:
        await made.set.model_info()
    await made.until(lambda: all(made.of(number).info for number in range(count)))
    try:
        yield made
    finally:
        await made.set.close()
        for server in made.servers:
            await server.stop(None)


async def test_a_request_that_has_not_begun_goes_to_another_replica(tmp_path: Path) -> None:
    """Those that are going, gone or full are passed over, one after the other; the client sees an answer."""
    async with replicas(tmp_path) as made:
        made.engines[0].fails_with = (grpc.StatusCode.UNAVAILABLE, "the engine is shutting down")
        made.engines[1].fails_with = (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        assert {await made.ask(str(number)) for number in range(12)} == {"2"}
        assert made.of(0).failures
        assert not made.of(1).failures  # busy, not broken
        assert not made.of(0).may_be_used or made.of(0).is_on_probation
        made.engines[0].fails_with = None
        made.of(0).ejected_until = 0
        made.engines[2].fails_with = (grpc.StatusCode.UNAVAILABLE, "gone")
        assert await made.ask("again") == "0"
        assert made.of(0).failures == 0


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNKNOWN])
async def test_what_is_the_requests_fault_is_not_tried_again(tmp_path: Path, code: grpc.StatusCode) -> None:
    """Another replica would say the same; and one that raised a defect is not fed to all of them."""
    async with replicas(tmp_path) as made:
        for engine in made.engines:
            engine.fails_with = (code, "no")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await made.ask()
        assert caught.value.code() is code
        assert sum(len(engine.seen) for engine in made.engines) == 1


async def test_what_has_begun_is_not_computed_again(tmp_path: Path) -> None:
    """The client has seen a part of it: another replica would go on differently."""
    async with replicas(tmp_path) as made:
        for engine in made.engines:
            engine.fails_with, engine.after = (grpc.StatusCode.UNAVAILABLE, "gone"), 1
        with pytest.raises(grpc.aio.AioRpcError):
            await made.ask()
        assert sum(len(engine.seen) for engine in made.engines) == 1


async def test_a_request_that_ends_all_that_compute_it_does_not_reach_every_replica(tmp_path: Path) -> None:
    """Three attempts, then its client gets the error."""
    async with replicas(tmp_path, 5) as made:
        for engine in made.engines:
            engine.fails_with = (grpc.StatusCode.UNAVAILABLE, "gone")
        with pytest.raises(grpc.aio.AioRpcError, match="gone"):
            await made.ask()
        assert sum(len(engine.seen) for engine in made.engines) == 3


async def test_requests_of_a_replica_that_goes_are_computed_by_the_others(tmp_path: Path) -> None:
    """When a process ends, no call that has sent nothing is lost; when it is back it is used again."""
    async with replicas(tmp_path, 2) as made:
        await made.servers[0].stop(None)
        assert {await made.ask(str(number)) for number in range(8)} == {"1"}
        await made.until(lambda: not made.of(0).is_serving)
        assert not await made.set.why_not_serving()
        made.servers[0] = await made.start(0)
        await made.until(lambda: made.of(0).is_serving)
        await made.servers[1].stop(None)
        made.of(0).ejected_until = 0
        assert await made.ask("back") == "0"
        assert made.registry.get_sample_value("moebius:gateway_replica_up", {"replica": made.addresses[0]})


async def test_conversations_stay_where_their_prefix_is(tmp_path: Path) -> None:
    """Turns of one conversation are answered by one replica, and many conversations by all."""
    async with replicas(tmp_path) as made:
        # Addresses decide where, and a test's directory is another in each run: with 40 conversations one of
        # three replicas has none once in a million runs.
        used = set()
        for conversation in range(40):
            prompt: list[int] = []
            answered = set()
            for turn in range(4 if conversation < 12 else 1):
                prompt += tokens([conversation + 5, turn])
                answered.add(await made.ask(f"{conversation}.{turn}", prompt))
            assert len(answered) == 1
            used |= answered
        assert used == {"0", "1", "2"}


async def test_busy_replicas_are_avoided(tmp_path: Path) -> None:
    """Replicas are avoided by what they say of themselves: other gateways send requests there, too."""
    async with replicas(tmp_path, 2) as made:
        made.engines[0].num_waiting = 40
        await made.until(lambda: made.of(0).reported == 40)
        assert {await made.ask(str(number)) for number in range(8)} == {"1"}


async def test_a_replica_of_another_model_is_not_used(tmp_path: Path) -> None:
    """It is not used whatever its load; and it is found out also when it comes back as another one."""
    async with replicas(tmp_path, 2) as made:
        facts = await made.set.model_info()
        assert facts.vocab_size == 100
        await made.servers[1].stop(None)
        await made.until(lambda: not made.of(1).is_serving)
        made.engines[1].info = pb.GetModelInfoResponse(served_model_name="m", vocab_size=200)
        made.servers[1] = await made.start(1)
        await made.until(lambda: made.of(1).mismatch)
        assert made.of(1).mismatch == "vocab_size is 200, that of the others is 100"
        assert {await made.ask(str(number)) for number in range(8)} == {"0"}
        await made.servers[0].stop(None)
        await made.until(lambda: not made.of(0).is_serving)
        with pytest.raises(grpc.aio.AioRpcError):
            await made.ask()
        assert await made.set.why_not_serving()
        assert not made.engines[1].seen


@pytest.mark.parametrize("count", [1, 2])
async def test_an_engine_that_comes_back_with_other_files_gets_nothing(tmp_path: Path, count: int) -> None:
    """It gets not one request between its start and the moment at which that is found out: each says for
    which files it was made. Of several engines another one computes it; with the right files back it is used
    again.
    """
    async with replicas(tmp_path, count, IDENTITY) as made:
        assert {await made.ask(str(number)) for number in range(8)} <= {"0", "1"}
        right = made.engines[0].info.identity
        made.engines[0].info.identity = right.replace("=00", "=01")
        made.engines[0].seen.clear()
        if count > 1:
            assert {await made.ask(str(number)) for number in range(16)} == {"1"}
            made.of(0).is_serving = False  # as it was while it was started
            await made.until(lambda: made.of(0).mismatch)
        else:
            with pytest.raises(grpc.aio.AioRpcError, match=r"tokenizer\.json has changed") as caught:
                await made.ask()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "tokenizer.json has changed" in made.set.other_model
        reason = await made.set.why_not_serving()
        assert (reason == "") if count > 1 else ("tokenizer.json has changed" in reason)
        assert not made.engines[0].seen
        made.engines[0].info.identity = right
        if count == 1:
            assert await made.set.why_not_serving() == ""
            assert await made.ask() == "0"


async def test_a_single_engines_memory_may_change(tmp_path: Path) -> None:
    """It was restarted with the same files and less memory: that is no other model."""
    async with replicas(tmp_path, 1, IDENTITY) as made:
        made.engines[0].info.max_context_length = 7
        assert await made.set.why_not_serving() == ""
        assert await made.ask() == "0"


async def test_a_names_addresses_come_and_go(tmp_path: Path) -> None:
    """New ones are used as soon as they are named; one that is not named any more gets nothing new, ends what
    it has and is forgotten; while the name cannot be resolved those that are known stay."""
    made = Replicas(tmp_path, 2)
    made.servers = [await made.start(number) for number in range(2)]
    named: list[str] | None = [made.addresses[0]]

    async def resolve(name: str) -> list[str] | None:
        assert name == "engines:50051"
        return named

    metrics = ReplicaMetrics(CollectorRegistry())
    made.set = ReplicaSet(["engines:50051"], metrics, resolve, poll_s=0.05, resolve_s=0.05)
    await made.set.open()
    assert await made.ask() == "0"
    made.engines[0].endless = True
    running = made.set.generate(pb.GenerateRequest(request_id="long"))
    await anext(running)
    named = [made.addresses[1]]
    await made.until(lambda: made.addresses[1] in made.set.replicas and made.of(0).is_leaving)
    assert {await made.ask(str(number)) for number in range(4)} == {"1"}
    named = None
    await asyncio.sleep(0.2)
    assert set(made.set.replicas) == set(made.addresses)
    await running.aclose()
    await made.until(lambda: set(made.set.replicas) == {made.addresses[1]})
    assert await made.ask() == "1"
    await made.set.close()
    for server in made.servers:
        await server.stop(None)


async def test_a_set_without_replicas_says_so(tmp_path: Path) -> None:
    """A name without an address is waited for, not an error of the settings."""

    async def resolve(_name: str) -> list[str] | None:
        return None

    empty = ReplicaSet(["engines:50051"], ReplicaMetrics(CollectorRegistry()), resolve)
    await empty.open()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(empty.generate(pb.GenerateRequest()))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "engines:50051" in (caught.value.details() or "")
    await empty.close()


async def test_the_model_is_known_though_replicas_come_while_one_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All pods of a headless service start together: the set changes while the first still loads."""
    found = ["127.0.0.1:1"]

    async def resolve(_name: str) -> list[str]:
        return list(found)

    made = ReplicaSet(["engine:1"], ReplicaMetrics(CollectorRegistry()), resolve, poll_s=60, resolve_s=0.01)
    asked = []

    async def model_info(client: EngineClient) -> pb.GetModelInfoResponse:
        asked.append(client.address)
        found[:] = ["127.0.0.1:1", "127.0.0.1:2"]
        while len(made.replicas) < 2:  # noqa: ASYNC110 - what the set's own task finds out
            await asyncio.sleep(0.01)
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())

    async def is_serving(_client: EngineClient) -> bool:
        return False

    monkeypatch.setattr(EngineClient, "model_info", model_info)
    monkeypatch.setattr(EngineClient, "is_serving", is_serving)
    await made.open()
    try:
        with pytest.raises(grpc.aio.AioRpcError):
            await made.model_info()
        assert asked == ["127.0.0.1:1"]
    finally:
        await made.close()
