"""Guards the gateway's connections: how many, how long half a request may take, who may ask from where."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.transport.connections import ConnectionTable, connection_limits
from moebius.config import GatewayConfig
from moebius.errors import ConfigError
from tests.helpers.fake_engine import MODEL, FakeEngine, Script, serving
from tests.helpers.gateway_server import gateway_config, running_gateway
from tests.helpers.ports import free_port
from tests.helpers.stack import ROOT
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer
from tests.helpers.waiting import wait_ready, wait_until

pytestmark = pytest.mark.plain_http
HALF_A_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
HALF_A_BODY = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"
BODY = {"model": MODEL, "prompt": "The", "max_tokens": 2}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeEngine, str]]:
    """A scripted engine and its address."""
    directory = tmp_path_factory.mktemp("connections")
    tokenizer = byte_level_tokenizer()
    write_tokenizer(directory, tokenizer)
    fake = FakeEngine(directory, tokenizer)
    with serving(fake, f"unix:{directory}/engine.sock"):
        yield fake, f"unix:{directory}/engine.sock"


@contextlib.contextmanager
def gateway(engine: tuple[FakeEngine, str], **settings: Any) -> Iterator[tuple[str, int]]:
    """URL and port of a gateway with these settings, and a fresh script."""
    engine[0].reset()
    with running_gateway(gateway_config(engine[1], **settings)) as url:
        yield url, int(url.rsplit(":", 1)[1])


def dial(port: int, data: bytes = b"") -> socket.socket:
    """Returns a connection on which `data` was sent."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(data)
    return connection


def head_for(body: bytes) -> bytes:
    """Returns the head of a completion request whose connection ends with the answer."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()


def answer_on(connection: socket.socket) -> bytes:
    """Returns all that arrives until the server closes; fails when it does not."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            received += data
    return received


def metric(url: str, name: str) -> float:
    """Returns one sample of /metrics; 0 when there is none yet."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)), 0.0)


def error_in(answer: bytes) -> tuple[int, dict[str, Any]]:
    """Returns status and error object of a raw answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def test_half_a_head_and_half_a_body_end_with_408(engine: tuple[FakeEngine, str]) -> None:
    """Each part of a request has its time, in total: a byte now and then does not prolong the head's."""
    with gateway(engine, header_timeout_s=1.5, body_timeout_s=1.5) as (url, port):
        silent, head, body = dial(port), dial(port, HALF_A_HEAD), dial(port, HALF_A_BODY)
        end = time.monotonic() + 60
        with contextlib.suppress(OSError):
            while time.monotonic() < end:
                head.sendall(b"x")
                time.sleep(0.1)
        assert time.monotonic() < end, "a dripping head kept its connection"
        assert answer_on(silent) == b""
        status, error = error_in(answer_on(body))
        assert (status, error["code"]) == (408, "request_timeout")
        assert "body" in error["message"]
        assert metric(url, 'moebius:gateway_connections_closed_total{reason="head_timeout"}') == 2
        assert metric(url, 'moebius:gateway_connections_closed_total{reason="body_timeout"}') == 1
        with dial(port, HALF_A_HEAD) as again:
            status, error = error_in(answer_on(again))
        assert (status, error["type"]) == (408, "invalid_request_error")
        assert "head" in error["message"]


def test_a_slow_upload_that_goes_on_is_let_through(engine: tuple[FakeEngine, str]) -> None:
    """The limit is of silence and crawling, not of size: a body that brings enough gets more time."""
    with gateway(engine, body_timeout_s=1.5) as (_, port):
        body = json.dumps(BODY).encode() + b" " * 600_000
        with dial(port, head_for(body)) as slow:
            for start in range(0, len(body), 60_000):
                slow.sendall(body[start : start + 60_000])
                time.sleep(0.2)
            assert answer_on(slow).startswith(b"HTTP/1.1 200")


def test_a_long_answer_and_an_idle_connection_have_no_deadline_of_the_request(
    engine: tuple[FakeEngine, str],
) -> None:
    """Once a request is complete its client owes nothing, and may ask again on the same connection."""
    with gateway(engine, header_timeout_s=1.0, body_timeout_s=1.0) as (url, _), httpx.Client() as client:
        engine[0].script = Script(delay_s=0.1)
        body = {**BODY, "max_tokens": 15, "ignore_eos": True}
        for _ in range(2):
            assert client.post(f"{url}/v1/completions", json=body).status_code == 200
            time.sleep(1.2)
        assert metric(url, "moebius:gateway_connections ") == 2  # this one and that of `metric`


def test_an_idle_connection_is_closed(engine: tuple[FakeEngine, str]) -> None:
    """After its answer a connection may stay for `idle_timeout_s`, no longer."""
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with gateway(engine, idle_timeout_s=1) as (_, port), dial(port, request) as idle:
        assert answer_on(idle).startswith(b"HTTP/1.1 200")


def test_a_client_that_does_not_read_is_given_up(engine: tuple[FakeEngine, str]) -> None:
    """An answer that its client does not read does not hold its request, nor its place, for ever."""
    with gateway(engine, idle_timeout_s=1) as (url, port):
        engine[0].script = Script(text="The quick brown fox " * 40, tokens_per_chunk=1)
        body = json.dumps({**BODY, "max_tokens": 250, "n": 100, "logprobs": 5, "stream": True}).encode()
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", port))
        deaf.sendall(head_for(body) + body)
        wait_until(
            lambda: metric(url, 'moebius:gateway_connections_closed_total{reason="unread_answer"}') == 1
        )
        wait_until(lambda: metric(url, "moebius:gateway_requests_in_flight") == 0)
        deaf.close()


@pytest.mark.parametrize("half", [HALF_A_HEAD, HALF_A_BODY, b""], ids=["head", "body", "nothing"])
def test_half_requests_do_not_shut_others_out(engine: tuple[FakeEngine, str], half: bytes) -> None:
    """With all places taken by clients who wait, whole requests are answered; there are never more places,
    and a stream that runs keeps its own."""
    with gateway(engine, max_connections=20) as (url, port), contextlib.ExitStack() as stack:
        held = threading.Event()
        engine[0].script = Script(held=held)
        body = {**BODY, "max_tokens": 60, "ignore_eos": True, "stream": True}
        response = stack.enter_context(httpx.stream("POST", f"{url}/v1/completions", json=body))
        lines = response.iter_lines()
        assert next(lines).startswith("data:")
        for _ in range(100):
            stack.enter_context(dial(port, half))
        engine[0].script = Script()
        for _ in range(3):
            assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 200
        assert metric(url, "moebius:gateway_connections ") <= 20
        displaced = metric(url, 'moebius:gateway_connections_closed_total{reason="displaced"}')
        assert displaced >= 80
        held.set()
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_beyond_the_bound_running_requests_win(engine: tuple[FakeEngine, str]) -> None:
    """When every place has a request that runs, a new connection is answered 503 at once; they go on."""
    with gateway(engine, max_connections=3) as (url, port), contextlib.ExitStack() as stack:
        held = threading.Event()
        engine[0].script = Script(held=held)
        body = {**BODY, "max_tokens": 60, "ignore_eos": True, "stream": True}
        running = [
            stack.enter_context(httpx.stream("POST", f"{url}/v1/completions", json=body)) for _ in range(3)
        ]
        with dial(port) as refused:
            status, error = error_in(answer_on(refused))
        assert (status, error["type"]) == (503, "server_error")
        held.set()
        for response in running:
            assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"


def test_what_is_no_http_is_refused_in_the_shape_of_all_errors(engine: tuple[FakeEngine, str]) -> None:
    """Clients find one kind of error body, whatever went wrong."""
    with gateway(engine) as (_, port), dial(port, b"NONSENSE\r\n\r\n") as connection:
        status, error = error_in(answer_on(connection))
        assert (status, error["code"]) == (400, "invalid_http")


def test_limits_follow_the_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places, the kernel's backlog and our own descriptors fit together; more than that is refused."""
    for files in (256, 1024, 65536, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        limits = connection_limits(GatewayConfig())
        assert limits.max_connections >= 64
        if files > 0:
            assert limits.max_connections + limits.backlog <= files - 64
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    assert connection_limits(GatewayConfig(max_connections=50)).max_connections == 50
    with pytest.raises(ConfigError, match=r"max_connections: 200 .*at most 128.*256 files"):
        connection_limits(GatewayConfig(max_connections=200))


PROGRAM = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from gateway.main import run
from moebius.config import MoebiusConfig
sys.exit(run(MoebiusConfig.model_validate_json(sys.argv[1])))
"""


def test_few_descriptors_are_enough_for_good_clients(engine: tuple[FakeEngine, str], tmp_path: Path) -> None:
    """A process that may open 256 files, under 450 half-open connections at once, answers every request."""
    engine[0].reset()
    port = free_port()
    config = gateway_config(engine[1], port=port).model_dump_json()
    log = tmp_path / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, config], cwd=ROOT, stderr=sink)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_ready(url, process, log)
        with contextlib.ExitStack() as stack:
            for number in range(450):
                stack.enter_context(dial(port, HALF_A_HEAD if number % 2 else HALF_A_BODY))
                if number % 150 == 149:
                    answer = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60)
                    assert answer.status_code == 200
            assert metric(url, "moebius:gateway_connections ") <= 128
        process.terminate()
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
    assert "Too many open files" not in log.read_text()
    assert "Traceback" not in log.read_text()


def test_pages_of_allowed_origins_may_ask(engine: tuple[FakeEngine, str]) -> None:
    """CORS: the named origins get their headers, on errors too, with a key as well; others get none, and are
    refused where they ask first."""
    page, other = {"Origin": "https://page.example"}, {"Origin": "https://other.example"}
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = "access-control-allow-origin"
    with gateway(engine, cors_origins=["https://page.example"], api_key="secret") as (url, _):
        preflight = httpx.options(f"{url}/v1/chat/completions", headers={**page, **asked})
        assert preflight.status_code == 200
        assert preflight.headers[allowed] == "https://page.example"
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        assert httpx.options(f"{url}/v1/chat/completions", headers={**other, **asked}).status_code == 403
        key = {"Authorization": "Bearer secret"}
        good = httpx.post(f"{url}/v1/completions", json=BODY, headers={**page, **key})
        assert (good.status_code, good.headers[allowed]) == (200, "https://page.example")
        refused = httpx.post(f"{url}/v1/completions", json=BODY, headers=page)
        assert (refused.status_code, refused.headers[allowed]) == (401, "https://page.example")
        assert allowed not in httpx.get(f"{url}/v1/models", headers={**other, **key}).headers
    with gateway(engine) as (url, _):
        assert allowed not in httpx.get(f"{url}/v1/models", headers=page).headers


def test_an_answer_in_the_middle_of_a_body_reaches_a_client_that_sends_all_of_it(
    engine: tuple[FakeEngine, str],
) -> None:
    """Closed with unread input, a socket takes the 413 away from a client that reads after it has sent."""
    with gateway(engine, max_body_mib=0.5) as (_, port), dial(port) as connection:
        body = b" " * (24 << 20)
        connection.sendall(head_for(body))
        time.sleep(0.3)  # the answer is there, and the server has closed if it does not linger
        for begin in range(0, len(body), 1 << 20):
            connection.sendall(body[begin : begin + (1 << 20)])
        connection.shutdown(socket.SHUT_WR)
        received = b""
        while data := connection.recv(65536):
            received += data
    assert received.startswith(b"HTTP/1.1 413 ")
    assert b'"error"' in received


def test_a_client_that_was_answered_and_sends_no_more_is_closed(
    engine: tuple[FakeEngine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of a body is waited for as long as it comes, not for good."""
    monkeypatch.setattr("gateway.transport.connections._LINGER_PAUSE_S", 0.2)
    with gateway(engine, max_body_mib=0.5) as (_, port), dial(port) as connection:
        connection.sendall(head_for(b" " * (1 << 20)) + b" " * 1000)
        connection.settimeout(60)
        assert answer_on(connection).startswith(b"HTTP/1.1 413 ")
        assert wait_until_reset(connection) < 60


def wait_until_reset(connection: socket.socket) -> float:
    """Returns the seconds for which a byte now and then was still taken; fails when it is for ever."""
    began = time.monotonic()
    while time.monotonic() - began < 60:
        try:
            connection.sendall(b" ")
        except OSError:
            break
        time.sleep(0.5)
    return time.monotonic() - began


def test_a_head_without_end_is_refused(engine: tuple[FakeEngine, str]) -> None:
    """The parser keeps what it has of a header: a client cannot fill memory with one that never ends."""
    with gateway(engine) as (_, port), dial(port, HALF_A_HEAD) as connection:
        with contextlib.suppress(OSError):
            for _ in range(64):
                connection.sendall(b"x" * 8192)
        status, error = error_in(answer_on(connection))
        assert (status, error["code"]) == (400, "invalid_http")


CHUNKED = head_for(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")


@pytest.mark.parametrize("filler", [b"X: y\r\n", b"X: ", b"5;"], ids=["headers", "one", "extension"])
def test_what_surrounds_a_body_is_bounded(engine: tuple[FakeEngine, str], filler: bytes) -> None:
    """Headers after a chunked body, and extensions of a chunk, do not fill memory: what is kept of them
    is nothing, and what may come of them as much as of a head."""
    with gateway(engine) as (_, port), dial(port, CHUNKED) as connection:
        content = json.dumps(BODY).encode()
        connection.sendall(b"%x\r\n%b\r\n" % (len(content), content))
        connection.sendall(b"0\r\n" if filler[:1] == b"X" else b"")
        piece = filler * 2000 if filler.endswith(b"\n") else b"x" * 8192
        sent = 0
        with contextlib.suppress(OSError):
            connection.sendall(filler)
            while sent < 2**26:
                connection.sendall(piece)
                sent += len(piece)
        status, error = error_in(answer_on(connection))
        assert (status, error["code"]) == (400, "invalid_http")
        assert sent < 2**26


def test_a_body_byte_by_byte_with_headers_after_it_is_read(engine: tuple[FakeEngine, str]) -> None:
    """Chunks of one byte, each with an extension, and headers that say something else than the head."""
    with gateway(engine) as (_, port):
        content = json.dumps({**BODY, "user": "x" * 20_000}).encode()
        chunks = b"".join(b"1;a=b\r\n%c\r\n" % byte for byte in content)
        with dial(port, CHUNKED + chunks + b"0\r\nContent-Type: text/plain\r\nX: y\r\n\r\n") as connection:
            status, error = error_in(answer_on(connection))
        assert (status, error["param"]) == (400, "user")
        content = json.dumps(BODY).encode()
        chunks = b"".join(b"1;a=b\r\n%c\r\n" % byte for byte in content)
        with dial(port, CHUNKED + chunks + b"0\r\nX: y\r\n\r\n") as connection:
            assert answer_on(connection).startswith(b"HTTP/1.1 200")


def test_pipelined_requests_are_answered_in_order(engine: tuple[FakeEngine, str]) -> None:
    """A request sent before the answer to the last one waits for its turn, and its connection has no deadline
    meanwhile: the server is the side that does not answer."""
    with gateway(engine, header_timeout_s=1.0, body_timeout_s=1.0) as (_, port):
        engine[0].script = Script(delay_s=0.1)
        first = json.dumps({**BODY, "max_tokens": 15, "ignore_eos": True}).encode()
        second = json.dumps({**BODY, "prompt": "Two"}).encode()
        head = head_for(first).replace(b"Connection: close\r\n", b"")
        with dial(port, head + first + head_for(second) + second) as connection:
            answers = answer_on(connection)
        assert answers.count(b"HTTP/1.1 200") == 2
        assert answers.index(b'"completion_tokens":15') < answers.rindex(b"HTTP/1.1 200")


def test_a_client_that_leaves_cancels_what_runs_though_it_asked_more(engine: tuple[FakeEngine, str]) -> None:
    """The parser has gone on to the next request; the one that runs must learn of the end all the same."""
    with gateway(engine) as (_, port):
        engine[0].script = Script(delay_s=0.05)
        body = json.dumps({**BODY, "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
        head = head_for(body).replace(b"Connection: close\r\n", b"")
        with dial(port, head + body) as connection:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            connection.sendall(head_for(body) + body)
            time.sleep(0.2)
        assert engine[0].seen.cancelled.wait(60)


def test_requests_that_arrive_together_are_begun_some_at_a_time() -> None:
    """A crowd does not fill one turn of the event loop: other work has its place between, the oldest request
    is begun first, and one that comes alone at once."""
    seen: list[int | str] = []

    async def arrive() -> None:
        loop = asyncio.get_running_loop()
        table = ConnectionTable(connection_limits(GatewayConfig()), lambda _reason: None)
        table.begin(loop, lambda: seen.append("alone"))
        assert seen == ["alone"]
        await asyncio.sleep(0.01)
        for number in range(20):
            table.begin(loop, lambda number=number: seen.append(number))  # type: ignore[misc]
        while len(seen) < 20:
            seen.append("turn")
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        table.begin(loop, lambda: seen.append("last"))

    asyncio.run(arrive())
    numbers = [one for one in seen if isinstance(one, int)]
    assert numbers == list(range(20))
    assert seen[-1] == "last"
    runs = [
        list(group)
        for is_turn, group in itertools.groupby(seen[1:-1], lambda one: one == "turn")
        if not is_turn
    ]
    assert max(map(len, runs)) <= 8
    assert len(runs) >= 3


def test_a_request_that_cannot_start_does_not_delay_others() -> None:
    """Those that wait after it are begun, and so are later ones."""
    seen: list[int] = []

    async def arrive() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, _context: None)
        table = ConnectionTable(connection_limits(GatewayConfig()), lambda _reason: None)

        def start(number: int) -> None:
            if number == 9:
                raise RuntimeError("not this one")
            seen.append(number)

        for number in range(30):
            table.begin(loop, partial(start, number))
        for _ in range(20):
            await asyncio.sleep(0)
        table.begin(loop, partial(start, 30))

    asyncio.run(arrive())
    assert sorted(seen) == [number for number in range(31) if number != 9]
