"""Guards the plumbing of streams: keep-alive comments, closing, and SSE framing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from gateway.transport.streaming import (
    KEEP_ALIVE,
    ClientGone,
    ClientWatch,
    DirectSend,
    EventStream,
    LastEvent,
    encoded,
    event,
)
from tests.unit.gateway.generation.test_job import Source


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
