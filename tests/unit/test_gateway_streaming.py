"""Guards the plumbing of streams: merging, keep-alive comments, closing, and SSE framing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

import pytest

from gateway.admission import Admission
from gateway.errors import ApiError
from gateway.generation import merge
from gateway.streaming import KEEP_ALIVE, event, keep_alive
from gateway.telemetry import GatewayMetrics


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


async def test_keep_alive_fills_silence_only() -> None:
    """Comments come during silence and never replace, reorder or drop an event."""

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"a"
        await asyncio.sleep(0.05)
        yield b"b"

    data = [item async for item in keep_alive(events(), 0.01)]
    assert data[0] == b"a"
    assert data[-1] == b"b"
    assert set(data[1:-1]) == {KEEP_ALIVE}


async def test_keep_alive_can_be_closed_while_waiting() -> None:
    """A disconnect during a long prefill closes the source although no event is there yet."""
    source = Source()

    async def events() -> AsyncGenerator[bytes, None]:
        async for _ in source.items(0, wait_s=60):
            yield b""

    stream = keep_alive(events(), 0.01)
    assert await anext(stream) == KEEP_ALIVE
    await stream.aclose()
    await asyncio.sleep(0)
    assert source.closed


def test_an_event_is_one_line() -> None:
    """Line breaks and any script stay inside one `data:` line that parses back."""
    payload = {"text": "a\nb\r\n\u2028 東京 😀"}
    framed = event(payload)
    assert framed.startswith(b"data: ")
    assert framed.endswith(b"\n\n")
    assert framed.count(b"\n") == 2
    assert json.loads(framed.removeprefix(b"data: ")) == payload


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
