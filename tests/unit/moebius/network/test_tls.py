"""Guards TLS of gRPC: who gets in, what is refused by name, and certificates that change while calls run."""

from __future__ import annotations

import asyncio
import datetime
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from app.commands.experts import engine_stub
from app.commands.once import quiet
from app.commands.running import running
from app.supervisor.health import Plan, Timing
from app.supervisor.plan import ServePlan
from gateway.replicas.engine_client import EngineClient
from gateway.telemetry.combined import added, samples_of
from lab.bench.engine import servers
from lab.bench.engine.servers import running_servers
from moebius.config import GatewayConfig, MoebiusConfig, SecurityConfig
from moebius.errors import ConfigError, UserError
from moebius.network import grpc_channels, tls
from moebius.network.grpc_channels import listen, open_aio_channel, open_channel, tls_problem
from moebius.network.tls import (
    RenewedFiles,
    active_tls,
    configure_tls,
    grpc_files,
    http_files,
    read_credentials,
)
from moebius.telemetry.certificates import CertificateCollector
from protos import engine_pb2
from tests.helpers.certificates import Authority, Pair, grpc_security, write_secret
from tests.helpers.waiting import wait_until

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(autouse=True)
def _plain_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other tests speak plain text; each test's failures are reported again."""
    monkeypatch.setattr(tls, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(grpc_channels, "_reported", {})
    yield
    configure_tls(SecurityConfig())


@pytest.fixture(scope="module")
def authority() -> Authority:
    """Returns one CA for the whole module."""
    return Authority()


def secret(directory: Path, pair: Pair, ca: bytes) -> Path:
    """Returns a directory with a certificate."""
    directory.mkdir()
    write_secret(directory, pair, ca)
    return directory


@contextmanager
def served(directory: Path, mode: str = "mutual", address: str = "127.0.0.1:0") -> Iterator[str]:
    """A health service with the certificate of `directory`; yields its address."""
    configure_tls(grpc_security(directory, mode))
    server = grpc.server(futures.ThreadPoolExecutor(4))
    service = health.HealthServicer()
    service.set("", SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(service, server)
    port = listen(server, address)
    server.start()
    try:
        yield address.replace(":0", f":{port}")
    finally:
        server.stop(None).wait()


def check(address: str, timeout_s: float = 5.0) -> Any:
    """Returns the server's answer; raises grpc.RpcError."""
    # Without this all channels of the process with equal credentials share a connection.
    with open_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        make_stub: Callable[[grpc.Channel], Any] = health_pb2_grpc.HealthStub
        return make_stub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s).status


@pytest.mark.parametrize("kind", ["host", "socket"])
def test_both_sides_know_one_another(authority: Authority, tmp_path: Path, kind: str) -> None:
    """With certificates of one CA calls pass, over TCP and over sockets in the file system."""
    directory = secret(tmp_path / "own", authority.issue("engine"), authority.pem)
    address = "127.0.0.1:0" if kind == "host" else f"unix:{tmp_path}/grpc.sock"
    with served(directory, address=address) as found:
        assert check(found) == SERVING


@pytest.mark.parametrize(
    ("who", "words"),
    [
        ("nobody", "refuses clients without a certificate"),
        ("stranger", "refuses this process's certificate (CN=client, issued by CN=other CA)"),
        ("other CA", "certificate is refused: unable to get local issuer certificate"),
        ("plain text", ""),
    ],
)
def test_strangers_are_refused_and_named(authority: Authority, tmp_path: Path, who: str, words: str) -> None:
    """Without a certificate, with one of another CA, for a server of another CA or without TLS nothing is
    answered; the client logs, once, which address refused it and why."""
    other = Authority("other CA")
    directory = secret(tmp_path / "own", authority.issue("engine"), authority.pem)
    with served(directory) as address, structlog.testing.capture_logs() as logs:
        if who == "plain text":
            configure_tls(SecurityConfig())
        elif who == "other CA":
            configure_tls(grpc_security(secret(tmp_path / "its", other.issue("client"), other.pem)))
        elif who == "nobody":
            settings = SecurityConfig(grpc_tls="tls", grpc_ca_file=str(directory / "ca.crt"))
            configure_tls(settings)
        else:
            # Signed by another CA than the one it checks servers by, which is refused at start elsewhere.
            pair = other.issue("client")
            its = secret(tmp_path / "its", pair, authority.pem)
            configure_tls(grpc_security(its, "tls"))
        for _ in range(2):
            with pytest.raises(grpc.RpcError) as caught:
                check(address)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert tls_problem(address)  # what commands of an operator say
        if words:
            wait_until(lambda: len(logs) > 0)
            (line,) = logs
            assert (line["event"], line["peer"]) == ("TLS handshake failed", address)
            assert words in line["reason"]


async def test_a_gateway_without_tls_says_that_the_engine_speaks_it(
    authority: Authority, tmp_path: Path
) -> None:
    """The line comes once, with the engine's address, and not for an engine that is not there."""
    directory = secret(tmp_path / "own", authority.issue("engine"), authority.pem)
    with served(directory) as address, structlog.testing.capture_logs() as logs:
        configure_tls(SecurityConfig())
        silent = f"unix:{tmp_path}/nobody"
        for target in (silent, address, address):
            client = EngineClient(target)
            assert not await client.is_serving()
            await client.close()
        await asyncio.to_thread(wait_until, lambda: len(logs) > 0, 10)
        (line,) = logs
        assert (line["event"], line["peer"]) == ("TLS handshake failed", address)
        assert "grpc_tls is 'off' here" in line["reason"]


@pytest.mark.parametrize("mode", ["off", "mutual"])
def test_a_command_says_that_tls_is_missing(authority: Authority, tmp_path: Path, mode: str) -> None:
    """The line comes only for a server that speaks TLS, and says what would help."""
    directory = secret(tmp_path / "own", authority.issue("engine"), authority.pem)
    with served(directory, mode) as address:
        configure_tls(SecurityConfig())
        words = (
            "speaks TLS, and grpc_tls is 'off' here; --config FILE" if mode == "mutual" else "engine refused"
        )
        with pytest.raises(UserError, match=words) as caught, engine_stub(address) as engine:
            engine.GetModelInfo(engine_pb2.GetModelInfoRequest(), timeout=60)
        assert ("TLS" in str(caught.value)) == (mode == "mutual")


@pytest.mark.parametrize("start", [running, running_servers])
def test_the_supervisor_asks_its_processes_by_tls(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[[Any], Any]
) -> None:
    """What runs, demonstrates or measures configures TLS before its supervisor asks for health."""

    class Started(Exception):
        pass

    def supervisor(*_: object) -> None:
        assert active_tls() is not None
        raise Started

    module = sys.modules[start.__module__]
    monkeypatch.setattr(module, "Supervisor", supervisor)
    directory = secret(tmp_path / "own", authority.issue("engine"), authority.pem)
    config = MoebiusConfig(security=grpc_security(directory))
    serve_plan = ServePlan(Plan(tmp_path, (), json_logs=True), Timing(1, 1, 1, 1, 1), "", config)
    monkeypatch.setattr(servers, "plan_processes", lambda config: serve_plan)
    with pytest.raises(Started), start(serve_plan if start is running else config):
        pass


def test_a_system_for_one_request_speaks_plain_http(authority: Authority, tmp_path: Path) -> None:
    """`moebius run` of a configuration for others' clients needs neither their CA nor a key; gRPC stays."""
    directory = secret(tmp_path / "own", authority.issue("engine"), authority.pem)
    files = {"http_cert_file": str(directory / "tls.crt"), "http_key_file": str(directory / "tls.key")}
    security = grpc_security(directory).model_copy(update=files)
    gateway = GatewayConfig(host="0.0.0.0", api_key="secret-of-clients")
    config = quiet(MoebiusConfig(security=security, gateway=gateway))
    assert http_files(config.security) is None
    assert config.security.grpc_tls == "mutual"
    assert (config.gateway.host, config.gateway.api_key, config.gateway.port) == ("127.0.0.1", "", 0)


def test_a_changed_certificate_ends_no_call(authority: Authority, tmp_path: Path) -> None:
    """After both CA and certificates were replaced a stream that was open goes on, and new calls and new
    connections use what is there now, on both sides."""
    directory = secret(tmp_path / "own", authority.issue("first"), authority.pem)
    with served(directory) as address:
        channel = open_channel(address)
        make_stub: Callable[[grpc.Channel], Any] = health_pb2_grpc.HealthStub
        stub = make_stub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == SERVING
        successor = Authority("successor")
        write_secret(directory, successor.issue("second"), successor.pem)
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=60).status == SERVING
        assert check(address) == SERVING  # by the new CA: the server shows its new certificate
        assert watch.is_active()
        assert watch.cancel()
        channel.close()


async def test_asynchronous_channels_follow_changes_too(authority: Authority, tmp_path: Path) -> None:
    """The same for grpc.aio; a server of that kind reads its files again, too."""
    directory = secret(tmp_path / "own", authority.issue("first"), authority.pem)
    configure_tls(grpc_security(directory))
    server = grpc.aio.server()
    service = health.aio.HealthServicer()
    await service.set("", SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(service, server)
    address = f"127.0.0.1:{listen(server, '127.0.0.1:0')}"
    await server.start()
    async with open_aio_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        successor = Authority("successor")
        write_secret(directory, successor.issue("second"), successor.pem)
        assert (await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)).status == SERVING
        assert await asyncio.to_thread(check, address) == SERVING
        await service.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
    await server.stop(None)


def test_old_channels_are_closed_after_their_last_call(authority: Authority, tmp_path: Path) -> None:
    """Channels of earlier certificates do not pile up."""
    directory = secret(tmp_path / "own", authority.issue("first"), authority.pem)
    with served(directory) as address:
        channel = open_channel(address)
        assert isinstance(channel, grpc_channels.RenewingChannel)
        make_stub: Callable[[grpc.Channel], Any] = health_pb2_grpc.HealthStub
        stub = make_stub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        next(watch)
        write_secret(directory, authority.issue("second"), authority.pem)
        stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert len(channel._retired) == 1
        ended = threading.Event()
        watch.add_done_callback(lambda _: ended.set())
        watch.cancel()
        assert ended.wait(60)
        wait_until(lambda: not channel._retired)
        channel.close()


def spoil(directory: Path, what: str, authority: Authority) -> None:
    """One way in which files can be wrong."""
    good, other = authority.issue("engine"), Authority("other CA")
    pairs = {
        "expired": authority.issue("engine", -5, -1),
        "not yet valid": authority.issue("engine", 1, 5),
        "other CA": other.issue("engine"),
        "other key": Pair(good.certificate, authority.issue("engine").key),
        "no certificate": Pair(b"hello", good.key),
        "no key": Pair(good.certificate, b"hello"),
        "empty": Pair(b"", good.key),
    }
    write_secret(directory, pairs.get(what, good), b"hello" if what == "no CA" else authority.pem)
    if what == "missing":
        (directory / "tls.key").unlink()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("expired", ("grpc_cert_file", "tls.crt", "CN=engine", "expired at")),
        ("not yet valid", ("grpc_cert_file", "tls.crt", "is not valid before")),
        ("other CA", ("grpc_cert_file", "CN=other CA", "is not signed by a CA of grpc_ca_file", "ca.crt")),
        ("other key", ("grpc_key_file", "tls.key", "is not the key of the certificate", "CN=engine")),
        ("no certificate", ("grpc_cert_file", "tls.crt", "no certificate in PEM")),
        ("no key", ("grpc_key_file", "tls.key", "no private key in PEM")),
        ("no CA", ("grpc_ca_file", "ca.crt", "no certificate in PEM")),
        ("empty", ("grpc_cert_file", "tls.crt", "is empty")),
        ("missing", ("grpc_key_file", "tls.key", "cannot be read: No such file")),
    ],
)
def test_bad_files_are_refused_by_name(
    authority: Authority, tmp_path: Path, what: str, words: tuple[str, ...]
) -> None:
    """A process does not start with files that could not work; the message names setting, file and reason."""
    spoil(tmp_path, what, authority)
    with pytest.raises(ConfigError) as caught:
        configure_tls(grpc_security(tmp_path))
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_bad_successor_changes_nothing(authority: Authority, tmp_path: Path) -> None:
    """A certificate that is replaced by an unusable one stays in use; a line says why, once."""
    write_secret(tmp_path, authority.issue("engine"), authority.pem)
    renewed = RenewedFiles(grpc_files(grpc_security(tmp_path)))
    before = renewed.current()
    spoil(tmp_path, "other key", authority)
    with structlog.testing.capture_logs() as logs:
        assert renewed.current() == before
        assert renewed.current() == before
    (line,) = logs
    assert "tls.key is not the key" in line["reason"]
    write_secret(tmp_path, authority.issue("engine"), authority.pem)
    assert renewed.current() != before
    assert renewed.generation == 1


def test_files_are_looked_at_once_a_second(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call or handshake costs no look at the file system each time."""
    monkeypatch.setattr(tls, "LOOK_EVERY_S", 1.0)
    clock = [0.0]
    write_secret(tmp_path, authority.issue("engine"), authority.pem)
    renewed = RenewedFiles(grpc_files(grpc_security(tmp_path)), lambda: clock[0])
    before = renewed.current()
    write_secret(tmp_path, authority.issue("engine"), authority.pem)
    assert renewed.current() == before
    clock[0] = 1.1
    assert renewed.current() != before


def test_when_certificates_expire_is_a_metric(authority: Authority, tmp_path: Path) -> None:
    """It is the earliest end of the certificates for each use; of a process without any there is none, and of
    several gateway processes the earliest counts, not a sum."""
    name = "moebius:certificate_expiry_timestamp_seconds"
    registry = CollectorRegistry()
    registry.register(CertificateCollector())
    gc.collect()  # what earlier tests used
    assert registry.get_sample_value(name, {"use": "grpc"}) is None
    write_secret(tmp_path, authority.issue("engine"), authority.pem)
    renewed = RenewedFiles(grpc_files(grpc_security(tmp_path)))
    end = renewed.current().not_after
    assert end is not None
    assert registry.get_sample_value(name, {"use": "grpc"}) == end.timestamp()
    samples = samples_of(registry)
    (total,) = added([samples, samples, {}])[name].values.values()
    assert total == end.timestamp()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"grpc_tls": "tls"}, "grpc_ca_file is empty, but grpc_tls is 'tls'"),
        ({"grpc_tls": "mutual", "grpc_ca_file": "ca"}, "grpc_cert_file is empty"),
        ({"grpc_tls": "tls", "grpc_ca_file": "ca", "grpc_cert_file": "c"}, "grpc_key_file is empty"),
    ],
)
def test_missing_settings_of_grpc_are_named(settings: dict[str, str], words: str) -> None:
    """Half of what TLS needs is an error, not plain text."""
    with pytest.raises(ConfigError, match=words):
        configure_tls(SecurityConfig.model_validate(settings))


def test_half_of_https_is_an_error(tmp_path: Path) -> None:
    """A certificate without a key, or a client CA alone, is refused; nothing at all is plain HTTP."""
    assert http_files(SecurityConfig()) is None
    with pytest.raises(ConfigError, match="http_key_file is empty"):
        http_files(SecurityConfig(http_cert_file="c"))
    with pytest.raises(ConfigError, match="http_cert_file is empty"):
        http_files(SecurityConfig(http_client_ca_file="c"))


def test_chains_are_followed(tmp_path: Path) -> None:
    """A chain file whose first certificate is our own and whose CA is in the bundle is accepted, and the
    earliest end of the chain counts."""
    authority = Authority()
    pair = authority.issue("engine", end=3)
    write_secret(tmp_path, Pair(pair.certificate + authority.pem, pair.key), authority.pem)
    read = read_credentials(grpc_files(grpc_security(tmp_path)))
    assert read.not_after is not None
    left = read.not_after - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=2) < left < datetime.timedelta(days=4)
