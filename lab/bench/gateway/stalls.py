"""How long a stream stands still while the gateway reads a heavy request."""

from __future__ import annotations

import asyncio
import base64
import os
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lab.bench.gateway.clients import StreamClient, connect, read_answer, request_bytes
from lab.bench.gateway.engine import WORDS
from moebius.errors import UserError

_TOKENS = 100_000  # of the stream that is watched: more than it ever gets
_QUIET_S = 2.0


@dataclass(frozen=True)
class Stall:
    """Filled by `measure_stalls`; milliseconds between two tokens of the stream that is watched."""

    name: str
    gap_ms: float  # the longest while the request was answered
    quiet_ms: float  # the longest of a time without any other request
    answered_s: float


@dataclass(frozen=True)
class Heavy:
    """A request; `body` makes it for a model of this name."""

    body: Callable[[str], Any]
    status: int = 200  # of its answer
    path: str = "/v1/chat/completions"


def _chat(messages: Callable[[], Any]) -> Callable[[str], Any]:
    return lambda model: {"model": model, "messages": messages(), "max_tokens": 1}


def _text(words: int) -> str:
    return " ".join(WORDS[number % len(WORDS)] for number in range(words))


def png(size: int) -> bytes:
    """Returns a square picture of noise, which does not compress: about 3 * size**2 bytes."""
    rows = b"".join(b"\0" + os.urandom(3 * size) for _ in range(size))
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows, 0)),
        (b"IEND", b""),
    )
    parts = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _images() -> Any:
    url = "data:image/png;base64," + base64.b64encode(png(800)).decode()  # 1.9 MB
    part = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [part] * 20}]


def _ids(model: str) -> Any:
    return {"model": model, "prompt": [100 + number % 50 for number in range(10**6)], "max_tokens": 1}


HEAVY: dict[str, Heavy] = {
    "20 MB of text": Heavy(_chat(lambda: [{"role": "user", "content": _text(4 * 10**6)[: 20 * 10**6]}]), 400),
    "128k words": Heavy(_chat(lambda: [{"role": "user", "content": _text(128_000)}])),
    "10000 messages": Heavy(
        _chat(lambda: [{"role": ("user", "assistant")[n % 2], "content": _text(8)} for n in range(9_999)])
    ),
    "20 images": Heavy(_chat(_images)),
    "1000000 token ids": Heavy(_ids, path="/v1/completions"),
    "malformed 20 MB": Heavy(lambda _: b"[" * (20 * 10**6), 400),
}


async def measure_stalls(port: int, model: str, names: tuple[str, ...]) -> list[Stall]:
    """One heavy request after the other, next to one stream. Raises UserError when the stream fails."""
    (client,) = await connect(port, 1)
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": model, "messages": messages, "max_tokens": _TOKENS, "stream": True}
    client.send(request_bytes(body))
    await client.began
    if client.failure:
        raise UserError(f"the stream that is watched failed: {client.failure[:500]}")
    await asyncio.sleep(_QUIET_S / 2)
    client.forget_gaps()
    await asyncio.sleep(_QUIET_S)
    quiet_ms = client.longest_gap_s * 1e3
    stalls = [await _stall(port, model, client, name, quiet_ms) for name in names]
    client.close()
    return stalls


async def _stall(port: int, model: str, client: StreamClient, name: str, quiet_ms: float) -> Stall:
    heavy = HEAVY[name]
    # Making it takes its time, in which the stream that is watched is not read.
    request = request_bytes(heavy.body(model), heavy.path)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    client.forget_gaps()
    begin = time.perf_counter()
    sending = asyncio.create_task(_send(writer, request))
    await read_answer(reader, (heavy.status,))
    seconds = time.perf_counter() - begin
    await asyncio.gather(sending, return_exceptions=True)  # it was answered before it had sent all
    writer.close()
    await asyncio.sleep(0.3)
    return Stall(name, client.longest_gap_s * 1e3, quiet_ms, seconds)


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    """In pieces, so that the clients' own event loop does not stand still."""
    for start in range(0, len(data), 2**18):
        writer.write(data[start : start + 2**18])
        await writer.drain()
