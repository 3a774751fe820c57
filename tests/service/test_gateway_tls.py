"""Guards HTTPS of the gateway: who gets in, what is logged of who does not, and renewed certificates."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import structlog

from gateway.app.server import server_for
from gateway.transport.tls import FailedHandshakes, TlsAcceptor
from moebius.config import MoebiusConfig
from moebius.errors import ConfigError
from moebius.network import tls
from tests.helpers.certificates import Authority, Pair, write_secret
from tests.helpers.fake_engine import MODEL, FakeEngine, Script, serving
from tests.helpers.gateway_server import gateway_config, running_gateway
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer
from tests.helpers.waiting import wait_until

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "temperature": 0}


@pytest.fixture(scope="module")
def authority() -> Authority:
    """Returns the CA of all clients that are allowed."""
    return Authority()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeEngine, str]]:
    """A scripted engine and its address."""
    directory = tmp_path_factory.mktemp("engine")
    tokenizer = byte_level_tokenizer()
    write_tokenizer(directory, tokenizer)
    fake = FakeEngine(directory, tokenizer)
    address = f"unix:{directory}/engine.sock"
    with serving(fake, address):
        yield fake, address


def https_config(engine_address: str, directory: Path, **gateway: object) -> MoebiusConfig:
    """HTTPS with the files of `write_secret`; clients need a certificate, too."""
    security = {
        "http_cert_file": str(directory / "tls.crt"),
        "http_key_file": str(directory / "tls.key"),
        "http_client_ca_file": str(directory / "ca.crt"),
    }
    config = gateway_config(engine_address, **gateway).model_dump()
    return MoebiusConfig.model_validate({**config, "security": security})


def client_context(authority: Authority, pair: Pair | None, directory: Path) -> ssl.SSLContext:
    """Checks servers by `authority`, and shows `pair`."""
    context = ssl.create_default_context(cadata=authority.pem.decode())
    if pair is not None:
        directory.mkdir(exist_ok=True)
        (directory / "client.crt").write_bytes(pair.certificate)
        (directory / "client.key").write_bytes(pair.key)
        context.load_cert_chain(directory / "client.crt", directory / "client.key")
    return context


@pytest.fixture
def url(authority: Authority, engine: tuple[FakeEngine, str], tmp_path: Path) -> Iterator[str]:
    """A gateway with HTTPS, its files in `tmp_path/secret`."""
    write_secret(tmp_path / "secret", authority.issue("gateway"), authority.pem)
    engine[0].reset()
    with running_gateway(https_config(engine[1], tmp_path / "secret"), wait=False) as plain:
        yield plain.replace("http://", "https://")


@contextlib.contextmanager
def ready_client(url: str, context: ssl.SSLContext) -> Iterator[httpx.Client]:
    """A client whose server is ready."""
    with httpx.Client(base_url=url, verify=context, timeout=60) as client:
        wait_until(lambda: client.get("/ready").status_code == 200)
        yield client


def test_clients_with_a_certificate_are_served(url: str, authority: Authority, tmp_path: Path) -> None:
    """Answers and streams pass over TLS, more than one on a connection."""
    with ready_client(url, client_context(authority, authority.issue("me"), tmp_path / "own")) as client:
        answer = client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["message"]["content"]
        with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as stream:
            lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        pieces = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines[:-1]]
        assert "".join(pieces) == text


@pytest.mark.parametrize(
    ("who", "words"),
    [
        ("nobody", "showed no certificate"),
        ("expired", "certificate has expired"),
        ("stranger", "certificate is refused: "),
        ("plain", "speaks plain HTTP"),
    ],
)
def test_others_are_refused_and_named(
    url: str, authority: Authority, tmp_path: Path, who: str, words: str
) -> None:
    """No certificate, an expired one, one of another CA or no TLS: one line says which client and why."""
    pairs = {"expired": authority.issue("old", -5, -1), "stranger": Authority("other CA").issue("me")}
    context = client_context(authority, pairs.get(who), tmp_path / "its")
    own = client_context(authority, authority.issue("me"), tmp_path / "own")
    with ready_client(url, own) as good, structlog.testing.capture_logs() as logs:
        address = url if who != "plain" else url.replace("https://", "http://")
        for _ in range(2):
            with pytest.raises((httpx.TransportError, ssl.SSLError)):
                httpx.get(f"{address}/health", verify=context)
        wait_until(lambda: 'reason="tls_handshake"} 2.0' in good.get("/metrics").text)
    (line,) = [line for line in logs if line["event"] == "TLS handshake failed"]
    assert line["client"] == "127.0.0.1"
    assert words in line["reason"]


def test_a_renewed_certificate_ends_no_stream(
    url: str,
    engine: tuple[FakeEngine, str],
    authority: Authority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files are replaced while a stream runs: it goes on, and a new connection gets the new certificate."""
    monkeypatch.setattr(tls, "LOOK_EVERY_S", 0.0)
    held = threading.Event()
    engine[0].script = Script(text="fox dog hill lazy brown runs quick over the", held=held)
    host, port = url.removeprefix("https://").split(":")
    own = client_context(authority, authority.issue("me"), tmp_path / "own")

    def serial() -> object:
        raw = socket.create_connection((host, int(port)))
        with own.wrap_socket(raw, server_hostname=host) as connection:
            certificate = connection.getpeercert()
            assert certificate is not None
            return certificate["serialNumber"]

    with ready_client(url, own) as client:
        before = serial()
        with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            write_secret(tmp_path / "secret", authority.issue("gateway"), authority.pem)
            assert serial() != before
            held.set()
            assert [line for line in lines if line][-1] == "data: [DONE]"


def test_silent_clients_are_given_up(
    engine: tuple[FakeEngine, str], authority: Authority, tmp_path: Path
) -> None:
    """Who connects and says nothing holds its socket no longer than the head of a request may take."""
    write_secret(tmp_path / "secret", authority.issue("gateway"), authority.pem)
    config = https_config(engine[1], tmp_path / "secret", header_timeout_s=0.3)
    with running_gateway(config, wait=False) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as silent:
            assert silent.recv(1) == b""
        wait_until(lambda: not TlsAcceptor.handshakes)


def test_lines_about_failures_are_rare() -> None:
    """One line a minute and client; what was left out is counted, and addresses do not pile up."""
    clock, counted = [0.0], list[str]()
    failed = FailedHandshakes(counted.append, lambda: clock[0])
    error = ssl.SSLError(1, "[SSL: HTTP_REQUEST] http request")
    error.reason = "HTTP_REQUEST"
    with structlog.testing.capture_logs() as logs:
        for _ in range(5):
            failed.note("10.0.0.1", error)
        failed.note("10.0.0.2", error)
        clock[0] = 61.0
        failed.note("10.0.0.1", error)
        for number in range(5000):
            failed.note(f"10.1.{number // 256}.{number % 256}", error)
    assert [(line["client"], line.get("lines_left_out")) for line in logs[:3]] == [
        ("10.0.0.1", None),
        ("10.0.0.2", 4),
        ("10.0.0.1", None),
    ]
    assert len(failed._reported) <= 1024
    assert counted == ["tls_handshake"] * 5007


def test_bad_files_are_refused_at_start(
    engine: tuple[FakeEngine, str], authority: Authority, tmp_path: Path
) -> None:
    """An expired certificate of the HTTP server ends the start by name."""
    write_secret(tmp_path, authority.issue("gateway", -5, -1), authority.pem)
    with pytest.raises(ConfigError, match=r"http_cert_file: the certificate in .*tls.crt .* expired at"):
        server_for(https_config(engine[1], tmp_path))
