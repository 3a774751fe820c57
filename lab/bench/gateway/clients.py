"""The clients of `moebius bench gateway`: many connections on one event loop that look at little."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

_EVENT, _DONE = b"data: {", b"data: [DONE]"
_HEAD_END = b"\r\n\r\n"


def request_bytes(body: Any, path: str = "/v1/chat/completions") -> bytes:
    """Returns a whole HTTP request; `body` is JSON or bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


class StreamClient(asyncio.Protocol):
    """One connection with one stream; times are of `time.perf_counter`."""

    def __init__(self) -> None:
        self.events = 0
        self.first_at = self.last_at = 0.0
        self.longest_gap_s = 0.0  # between two arrivals, since `forget_gaps`
        self.failure = ""
        self.record: list[bytes] | None = None  # what arrives, when somebody wants it
        self.began = asyncio.get_running_loop().create_future()
        self.done = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, data: bytes) -> None:
        """Sends the request."""
        assert self._transport is not None
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self.first_at:
            self.first_at = now
            if not data.startswith(b"HTTP/1.1 200"):
                self.failure = data.decode(errors="replace")
            self.began.set_result(None)
        else:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_at)
        self.last_at = now
        if self.record is not None:
            self.record.append(data)
        self.events += (self._tail + data).count(_EVENT)
        # An event that is cut in two is counted with its second part.
        self._tail = data[-(len(_EVENT) - 1) :]
        if (_DONE in data or self.failure) and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        for future in (self.began, self.done):
            if not future.done():
                future.set_exception(ConnectionError(f"the server closed a stream: {exc}"))
                future.exception()  # marks it as retrieved: not every caller waits for it

    def forget_gaps(self) -> None:
        """Begins again to look for the longest gap."""
        self.longest_gap_s, self.last_at = 0.0, time.perf_counter()

    def close(self) -> None:
        """Leaves at once."""
        if self._transport is not None:
            self._transport.abort()


async def connect(port: int, count: int) -> list[StreamClient]:
    """`count` open connections that have sent nothing."""
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(StreamClient, "127.0.0.1", port))[1] for _ in range(count)]


async def first_bytes(port: int, count: int, request: bytes) -> list[float]:
    """Seconds to the first byte of `count` streams that arrive together. Raises ConnectionError."""
    clients = await connect(port, count)
    begin = time.perf_counter()
    for client in clients:
        client.send(request)
    await asyncio.gather(*(client.done for client in clients))
    for client in clients:
        client.close()
        if client.failure:
            raise ConnectionError(client.failure[:500])
    return sorted(client.first_at - begin for client in clients)


async def whole_requests(port: int, connections: int, request: bytes, seconds: float) -> float:
    """Requests per second on connections that are kept. Raises ConnectionError."""
    end = time.perf_counter() + seconds
    answered = 0

    async def ask() -> None:
        nonlocal answered
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < end:
            writer.write(request)
            await read_answer(reader)
            answered += 1
        writer.close()

    begin = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(connections)))
    return answered / (time.perf_counter() - begin)


async def read_answer(reader: asyncio.StreamReader, statuses: Sequence[int] = (200,)) -> bytes:
    """Returns the body of one answer. Raises ConnectionError for another status."""
    head = await reader.readuntil(_HEAD_END)
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    body = await reader.readexactly(int(lengths[0].split(b":")[1]) if lengths else 0)
    if int(head.split(None, 2)[1]) not in statuses:
        raise ConnectionError((head + body).decode(errors="replace")[:500])
    return body
