"""Guards the plumbing of streams: merging, keep-alive comments, closing, and SSE framing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from starlette.types import Message, Receive, Scope, Send

from gateway.generation.job import merge
from gateway.http.admission import Admission
from gateway.http.streaming import (
    KEEP_ALIVE,
    ClientGone,
    ClientWatch,
    DirectSend,
    EventStream,
    LastEvent,
    encoded,
    event,
)
from gateway.schemas.errors import ApiError
from gateway.telemetry.metrics import GatewayMetrics


class Source:
    """A stream that notes when it was closed; filled by its own generator."""

    def __init__(self) -> None:
        self.closed = False

    async def items(self, count: int, wait_s: float = 0.0, fail: bool = False) -> AsyncGenerator[int, None]:
        """`count` numbers; then waits, fails or ends."""
        try:
            for number in range(count):
                yield number
            await asyncio.sleep(wait_s)
            if fail:
                raise ValueError("source failed")
        finally:
            self.closed = True


@pytest.mark.parametrize("streams", [1, 3])
async def test_merge_gives_every_item(streams: int) -> None:
    """Nothing is lost or doubled, and every stream is closed."""
    sources = [Source() for _ in range(streams)]
    items = [item async for item in merge([source.items(5) for source in sources])]
    assert sorted(items) == sorted(list(range(5)) * streams)
    assert all(source.closed for source in sources)


async def test_merge_closes_the_others_on_failure() -> None:
    """One stream's failure ends the merge at once, and nothing goes on in the background."""
    slow, broken = Source(), Source()
    merged = merge([slow.items(1, wait_s=60), broken.items(1, fail=True)])
    with pytest.raises(ValueError, match="source failed"):
        _ = [item async for item in merged]
    assert slow.closed
    assert broken.closed


async def test_merge_closes_all_when_the_reader_leaves() -> None:
    """Closing the merged stream closes its sources: that is how a disconnect reaches the engine."""
    sources = [Source(), Source()]
    merged = merge([source.items(1, wait_s=60) for source in sources])
    await anext(merged)
    await merged.aclose()
    assert all(source.closed for source in sources)


class Client:
    """One connection as ASGI shows it: what it was sent, and when it leaves."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.left = asyncio.Event()
        self.got_comment = asyncio.Event()

    async def receive(self) -> Message:
        """Waits until the client leaves."""
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Notes a body."""
        if message["type"] == "http.response.body":
            self.bodies.append(message["body"])
            if message["body"] == KEEP_ALIVE:
                self.got_comment.set()


async def nothing() -> None:
    """Does nothing, for streams without a cleanup."""


async def test_comments_fill_silence_only() -> None:
    """Comments come during silence and never replace, reorder or drop an event."""
    client = Client()

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"a"
        await client.got_comment.wait()
        yield b"b"

    await EventStream(events(), 0.01, nothing)({"type": "http"}, client.receive, client.send)
    assert client.bodies[0] == b"a"
    assert client.bodies[-2:] == [b"b", b""]
    assert set(client.bodies[1:-2]) == {KEEP_ALIVE}


async def test_a_stream_can_be_left_while_it_is_silent() -> None:
    """A disconnect during a long prefill closes the source although no event is there yet."""
    source, client = Source(), Client()

    async def events() -> AsyncGenerator[bytes, None]:
        async with aclosing(source.items(0, wait_s=60)) as items:
            async for _ in items:
                yield b""

    stream = EventStream(events(), 0.01, nothing)({"type": "http"}, client.receive, client.send)
    serving = asyncio.create_task(stream)
    await client.got_comment.wait()
    client.left.set()
    await asyncio.wait_for(serving, 60)
    assert source.closed


async def test_the_content_of_a_stream_passes_no_middleware() -> None:
    """What is sent once per token goes to the server at once; beginning and end are seen by every layer."""
    inner, server = Client(), Client()

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"a"
        yield b"b"

    async def app(scope: Scope, receive: Receive, _send: Send) -> None:
        await EventStream(events(), 60, nothing)(scope, receive, inner.send)

    await DirectSend(app)({"type": "http"}, server.receive, server.send)
    assert server.bodies == [b"a", b"b"]
    assert inner.bodies == [b""]


async def test_a_last_event_goes_with_the_end() -> None:
    """The end of a stream that says so costs no message of its own."""
    client = Client()

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"a"
        yield LastEvent(b"b")

    await EventStream(events(), 60, nothing)({"type": "http"}, client.receive, client.send)
    assert client.bodies == [b"a", b"b"]


async def test_work_ends_when_the_client_leaves_and_only_then() -> None:
    """All that is done for one request has one watch: it cancels what runs, refuses what comes later, and
    leaves a cancellation by others what it is."""
    client = Client()
    watch = ClientWatch(client.receive)
    with watch.guard():
        await asyncio.sleep(0)

    async def work() -> None:
        with watch.guard():
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(work(), 0.01)
    asyncio.get_running_loop().call_later(0.01, client.left.set)
    with pytest.raises(ClientGone):
        await work()
    with pytest.raises(ClientGone):
        await work()


async def test_work_that_ends_as_the_client_leaves_is_not_cancelled_later() -> None:
    """A task that left the guard at the moment when the client left continues: it has to clean up."""
    for steps in range(6):  # in one of them the watch has ended, and its callbacks are due
        client = Client()
        watch = ClientWatch(client.receive)
        await asyncio.sleep(0)
        with contextlib.suppress(ClientGone):
            await asyncio.create_task(_work_and_clean_up(watch, client, steps))


async def _work_and_clean_up(watch: ClientWatch, client: Client, steps: int) -> None:
    try:
        with watch.guard():
            client.left.set()
            for _ in range(steps):
                await asyncio.sleep(0)
    finally:
        for _ in range(4):
            await asyncio.sleep(0)


def test_an_event_is_one_line() -> None:
    """Line breaks and any script stay inside one `data:` line that parses back."""
    payload = {"text": "a\nb\r\n\u2028 東京 😀"}
    framed = event(payload)
    assert framed.startswith(b"data: ")
    assert framed.endswith(b"\n\n")
    assert framed.count(b"\n") == 2
    assert json.loads(framed.removeprefix(b"data: ")) == payload


_JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=3),
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
)


@given(value=_JSON, copies=st.sampled_from([0, 1, 33, 300]))
def test_json_in_pieces_is_json(value: object, copies: int) -> None:
    """An answer that is written piece by piece has the bytes of one that is written at once, at any size."""
    for one in (value, [value] * copies, {"a": [{"b": [value] * copies}]}):
        assert encoded(one, True) == encoded(one, False)


def test_admission_counts_places() -> None:
    """Exactly `limit` requests fit, and a place that is given back can be taken again."""
    admission = Admission(2, GatewayMetrics())
    admission.enter()
    admission.enter()
    with pytest.raises(ApiError) as caught:
        admission.enter()
    assert caught.value.headers() == {"Retry-After": "1"}
    admission.leave()
    admission.enter()
    assert admission.in_flight == 2


def test_gaps_that_are_counted_together_are_those_that_were_seen() -> None:
    """Buckets, count and sum of gaps between tokens are an ordinary histogram's, whenever one looks."""
    metrics, registry = GatewayMetrics(), CollectorRegistry()
    metrics.set_model("m")
    name = "vllm:inter_token_latency_seconds"
    bounds = [
        0.001,
        0.005,
        0.01,
        0.025,
        0.05,
        0.075,
        0.1,
        0.15,
        0.2,
        0.3,
        0.4,
        0.5,
        0.75,
        1.0,
        2.5,
        5.0,
        10.0,
    ]
    bounds += [20.0, 40.0, 80.0]
    plain = Histogram(name, "Each by itself", ["model_name"], buckets=bounds, registry=registry).labels("m")
    dice = random.Random(1)
    for count in (1, 3, 5000):
        for _ in range(count):
            gap = dice.choice([0.005, 80.0, 200.0, dice.random()])
            metrics.tokens(gap, 1)
            plain.observe(gap)
        for bound in [*map(str, bounds), "+Inf"]:
            labels = {"model_name": "m", "le": bound}
            wanted = registry.get_sample_value(f"{name}_bucket", labels)
            assert wanted is not None
            assert metrics.registry.get_sample_value(f"{name}_bucket", labels) == wanted
        for part in ("count", "sum"):
            own = metrics.registry.get_sample_value(f"{name}_{part}", {"model_name": "m"})
            assert own == pytest.approx(registry.get_sample_value(f"{name}_{part}", {"model_name": "m"}))
