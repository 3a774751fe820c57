"""Malformed requests to the gateway: bodies that are nearly right, and bytes that are nearly HTTP."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.drills import mutations
from tests.drills.checkpoint import MODEL
from tests.drills.load import Fate, Outcome, refusal

CLIENTS = 24
# No answer and no end of the connection within this time is a hang.
DEADLINE_S = 90.0
_MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The quick fox"}]
_TOOL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_HISTORY = [*_MESSAGES, {"role": "assistant", "tool_calls": [_TOOL]}, {"role": "user", "content": "and?"}]
_PARTS = [{"role": "user", "content": [{"type": "text", "text": "The"}, {"type": "text", "text": "fox"}]}]
_SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.0, "seed": 1, "n": 2, "stop": ["x"]}
_LESS_USED = {"logit_bias": {"5": 1.5}, "stop_token_ids": [9], "presence_penalty": 0.1, "cache_salt": "a"}
_STREAM = {"stream": True, "stream_options": {"include_usage": True}}
_CHAT = {"model": MODEL, "max_tokens": 3, "messages": _MESSAGES}
_TEXT = {"model": MODEL, "max_tokens": 3, "prompt": "The quick"}
# (path, a body that is right).
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", _CHAT | _SAMPLING),
    ("/v1/chat/completions", _CHAT | {"messages": _HISTORY} | _LESS_USED),
    ("/v1/chat/completions", _CHAT | {"messages": _PARTS, "logprobs": True, "top_logprobs": 3} | _STREAM),
    ("/v1/chat/completions", _CHAT | {"chat_template_kwargs": {"a": 1}, "add_generation_prompt": True}),
    ("/v1/completions", _TEXT | _SAMPLING | _STREAM),
    ("/v1/completions", _TEXT | {"prompt": [[5, 6], [7]], "logprobs": 2, "echo": True} | _LESS_USED),
    ("/tokenize", {"model": MODEL, "prompt": "The quick brown"}),
    ("/tokenize", {"model": MODEL, "messages": _MESSAGES}),
    ("/detokenize", {"model": MODEL, "tokens": [5, 6, 7]}),
)
_TYPES = (
    "application/json",
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data",
    "\x0b",
)


def judged(status: int, content: bytes) -> tuple[Fate, str]:
    """An answer is right when it is a result, or a refusal with a status below 500 in OpenAI's shape."""
    if status < 300:
        broken = b'"code":"internal' in content or b'"type":"server_error"' in content
        return ("broken", f"a result with {content[:200]!r}") if broken else ("right", "")
    fate, detail = refusal(status, content)
    if status >= 500:
        return "broken", detail
    return ("right" if fate == "refused" else fate), detail


async def _body(client: httpx.AsyncClient, rng: random.Random) -> Outcome:
    path, valid = rng.choice(BODIES)
    # Some take seconds to make, in which other clients would stand still until the server gives them up.
    content = await asyncio.to_thread(mutations.json_bytes, rng, valid)
    headers = {"content-type": _TYPES[0] if rng.random() < 0.9 else rng.choice(_TYPES)}
    started = time.monotonic()
    fate: Fate
    try:
        async with asyncio.timeout(DEADLINE_S):
            response = await client.post(path, content=content, headers=headers)
        fate, detail = judged(response.status_code, response.content)
    except TimeoutError:
        fate, detail = "late", f"no answer in {DEADLINE_S:g} s"
    except httpx.LocalProtocolError:  # the client's own library will not send it
        fate, detail = "right", ""
    except httpx.HTTPError as error:
        fate, detail = "broken", f"{type(error).__name__}: {error}"
    seen = "" if fate == "right" else f"{detail} [{path} {content[:600]!r}]"
    return Outcome(fate, started, time.monotonic() - started, seen)


def _broken_http(rng: random.Random) -> bytes:
    """Returns the bytes that begin like a request, more or less."""
    body = b'{"model": "drill", "prompt": "a", "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    length = b"Content-Length: %d\r\n" % len(body)
    kinds = (
        lambda: rng.randbytes(rng.choice([1, 50, 3000])),
        lambda: mutations.changed_bytes(rng, head + length + b"\r\n" + body),
        lambda: mutations.changed_bytes(rng, head + length) + b"\r\n" + body,
        lambda: (head + length)[: rng.randrange(len(head + length))],
        lambda: head + b"Content-Length: %d\r\n\r\n" % rng.choice([0, 3, 10**9, 10**30]) + body,
        lambda: head + length + b"Content-Length: 7\r\n\r\n" + body,
        lambda: head + length + b"Transfer-Encoding: chunked\r\n\r\n" + body,
        lambda: (
            head
            + b"Transfer-Encoding: chunked\r\n\r\n"
            + rng.choice([b"zz\r\n", b"-1\r\n", b"ffffffffffffffffff\r\n", b"5\r\nab", b"1;" + b"a" * 5000])
            + body
        ),
        lambda: head + b"X: " + b"a" * rng.choice([10_000, 100_000]) + b"\r\n" + length + b"\r\n" + body,
        lambda: head + b"X: y\r\n" * rng.choice([50, 3000]) + length + b"\r\n" + body,
        lambda: b"GET /" + b"a" * rng.choice([1000, 100_000]) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        lambda: b"GET /v1/models/%00%ff%2e%2e/ HTTP/1.1\r\nHost: localhost\r\n\r\n" * rng.choice([1, 20]),
        lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200),
        lambda: b"GET / HTTP/%s\r\n\r\n" % rng.choice([b"9.9", b"1.1.1", b"", b"-1"]),
        lambda: head.replace(b"POST", rng.choice([b"BREW", b"", b"CONNECT", b"OPTIONS", b"TRACE"])) + b"\r\n",
        lambda: b"GET /health HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        lambda: head + b"Expect: 100-continue\r\n" + length + b"\r\n",
    )
    return rng.choice(kinds)()


async def _socket(host: str, port: int, rng: random.Random) -> Outcome:
    sent = _broken_http(rng)
    patient = rng.random() < 0.1  # leaves the end of the connection to the server
    started = time.monotonic()
    fate: Fate = "right"
    detail, received = "", b""
    try:
        async with asyncio.timeout(DEADLINE_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(sent)
                if not patient:
                    await writer.drain()
                    writer.write_eof()
                while data := await reader.read(65536):
                    received += data
            finally:
                writer.close()
    except TimeoutError:
        fate, detail = "late", f"still open after {DEADLINE_S:g} s"
    except ConnectionRefusedError as error:
        fate, detail = "broken", str(error)
    except OSError:  # reset by the server, which need not read what is no HTTP
        pass
    if b"HTTP/1.1 5" in received:
        fate, detail = "broken", f"{received[:300]!r}"
    seen = "" if fate == "right" else f"{detail} [{'patient ' if patient else ''}{sent[:300]!r}]"
    return Outcome(fate, started, time.monotonic() - started, seen)


async def send(base_url: str, kind: str, count: int, seed: int) -> list[Outcome]:
    """`count` malformed requests of kind "bodies" or "sockets", CLIENTS at a time."""
    outcomes: list[Outcome] = []
    numbers = iter(range(count))
    where = urlsplit(base_url)
    # An idle connection that the server closes at the moment it is used again says nothing about the server.
    limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=CLIENTS, keepalive_expiry=1.0)
    async with httpx.AsyncClient(base_url=base_url, timeout=None, limits=limits) as client:

        async def one_client() -> None:
            for number in numbers:
                rng = random.Random(f"{seed}/{kind}/{number}")
                if kind == "bodies":
                    outcomes.append(await _body(client, rng))
                else:
                    outcomes.append(await _socket(str(where.hostname), int(where.port or 0), rng))

        await asyncio.gather(*(one_client() for _ in range(CLIENTS)))
    return outcomes
