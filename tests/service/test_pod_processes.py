"""Guards processes started one by one, as the containers of Pods are: in any order, without a supervisor."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from app.supervisor.health import GrpcProbe
from app.supervisor.plan import ENGINE_HEALTH, EXPERT_HEALTH
from expert_service.mailbox_service import FirstCall, Standstill
from moebius.mailbox import Mailbox, server_health
from moebius.network.grpc_channels import open_channel
from moebius.process.operations import NOT_READY_METADATA
from tests.helpers.ports import free_port
from tests.helpers.rank_serving import TOKENS, complete, generate
from tests.helpers.tiny_models import TinyModel, write_tiny_model
from tests.helpers.waiting import wait_until
from tests.helpers.warm_processes import Program, start_program

MODEL = TinyModel("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2})
LIMIT_S = 120.0


class Containers:
    """Commands that share one configuration file; all are gone at the end of the test."""

    def __init__(self, directory: Path) -> None:
        write_tiny_model(MODEL, directory / "model", seed=5)
        self.directory = directory
        self.config = directory / "moebius.yaml"
        self.mailbox = f"moebius-test-{directory.name[-20:]}-{free_port()}"
        self.experts = [free_port(), free_port()]
        self.engine = free_port()
        self.running: list[Program] = []

    def settings(self, transport: str, **parallel: object) -> None:
        """Writes what all containers read."""
        tree = {
            "model": {"model": str(self.directory / "model"), "dtype": "float32"},
            "gpu": {"device": "cpu", "num_pages": 64, "gpu_address": f"127.0.0.1:{self.engine}"},
            "experts": {
                "expert_transport": transport,
                "split_count": 2,
                "expert_servers": 2,
                "expert_threads": 1,
                "numa_node": "auto",
                "mailbox": self.mailbox if transport == "mailbox" else "",
                "expert_addresses": [f"127.0.0.1:{port}" for port in self.experts],
                "expert_weights_dir": str(self.directory),
            },
            "parallel": parallel,
            "supervisor": {"state_dir": str(self.directory / "s"), "stop_timeout_s": 10.0},
        }
        self.config.write_text(yaml.safe_dump(tree))

    def start(self, *arguments: str) -> Program:
        """`moebius …`"""
        command = ["-m", "moebius", *arguments, "--config", str(self.config)]
        with (self.directory / "log").open("ab") as log:
            process = start_program(command, log, log)
        self.running.append(process)
        return process

    def start_expert(self, index: int, *flags: str) -> Program:
        """Returns one expert server's container."""
        address = f"127.0.0.1:{self.experts[index]}"
        return self.start("expert", "--split-index", str(index), "--expert-address", address, *flags)

    def kill(self, process: Program) -> None:
        """kill -9."""
        process.kill()
        process.wait()
        self.running.remove(process)

    def wait_serving(self, port: int, service: str) -> None:
        """Until a gRPC probe would say so."""
        probe, end = GrpcProbe(f"127.0.0.1:{port}", service), time.monotonic() + LIMIT_S
        while not probe.ready():
            assert time.monotonic() < end, (self.directory / "log").read_text()[-3000:]
            assert all(process.poll() is None for process in self.running), self.log
            time.sleep(0.1)

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[Containers]:
    made = Containers(tmp_path)
    yield made
    for process in made.running:
        process.kill()
        process.wait()
    Mailbox.unlink(made.mailbox)


def test_sidecars_are_ready_before_anybody_asks_for_them(containers: Containers) -> None:
    """Expert servers load without an engine: the first of them makes the mailbox. The engine comes later,
    an expert server that is killed comes back under the same name, and all end well at SIGTERM."""
    containers.settings("mailbox")
    experts = [containers.start_expert(index) for index in range(2)]
    for port in containers.experts:
        containers.wait_serving(port, EXPERT_HEALTH)
    assert [server.calls for server in server_health(containers.mailbox)] == [0, 0]
    engine = containers.start("gpu")
    containers.wait_serving(containers.engine, ENGINE_HEALTH)
    assert all(server.calls for server in server_health(containers.mailbox))
    address = f"127.0.0.1:{containers.engine}"
    expected = generate(address)
    assert len(expected) == TOKENS
    containers.kill(experts[1])
    experts[1] = containers.start_expert(1)
    assert generate(address) == expected
    for process in (engine, *experts):
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, containers.log


def test_a_remote_server_that_does_not_fit_is_named_at_once(containers: Containers) -> None:
    """Requests fail with what it was refused for, long before `expert_recovery_s`; health and the log say the
    same. Once the right one is there, they are answered as before."""
    containers.settings("grpc")
    experts = [containers.start_expert(index) for index in range(2)]
    containers.start("gpu")
    containers.wait_serving(containers.engine, ENGINE_HEALTH)
    address = f"127.0.0.1:{containers.engine}"
    expected = generate(address)
    containers.kill(experts[1])
    other = containers.start_expert(1, "--expert-dtype", "int8")
    reason = "expert server 1: it was restarted and is refused: expert_dtype is int8, expected keep"
    # Its time is shorter than the recovery's.
    assert complete(address).error_message == f"ExpertRefused: {reason}"
    with open_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=ENGINE_HEALTH)

        def why() -> str:
            _, call = health_pb2_grpc.HealthStub(channel).Check.with_call(request, timeout=60)
            return dict(call.trailing_metadata()).get(NOT_READY_METADATA, b"").decode()

        wait_until(lambda: why() == reason)
    assert reason.partition(": ")[2] in containers.log
    containers.kill(other)
    containers.start_expert(1)
    containers.wait_serving(containers.engine, ENGINE_HEALTH)
    assert generate(address) == expected


def test_a_server_without_calls_says_so() -> None:
    """A line every ten seconds, none once an engine has called."""
    now = [0.0]
    first_call = FirstCall("moebius-mine", lambda: now[0])
    with capture_logs() as logs:
        for now[0] in (1.0, 9.0, 10.0, 11.0, 19.0, 20.5, 21.5):
            first_call.look(is_awaited=True)
        for now[0] in (40.0, 50.0):
            first_call.look(is_awaited=False)
    assert [line["waited_s"] for line in logs] == [10, 20]
    assert {line["mailbox"] for line in logs} == {"moebius-mine"}
    assert {line["event"] for line in logs} == {"waiting for an engine's first call"}


def test_a_standing_server_says_so_to_a_liveness_probe(containers: Containers) -> None:
    """Health "" is SERVING while the serve loop counts, and it counts without a request."""
    now = [0.0]
    standstill = Standstill(2.5, lambda: now[0])
    for now[0], count, lasts in (
        (9.0, None, False),
        (10, 1, False),
        (20, 2, False),
        (22, 2, False),
        (23, 2, True),
    ):
        assert standstill.lasts(count) is lasts
    containers.settings("mailbox")
    containers.start_expert(0)
    containers.wait_serving(containers.experts[0], EXPERT_HEALTH)
    with open_channel(f"127.0.0.1:{containers.experts[0]}") as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    counted = server_health(containers.mailbox)[0].progress
    wait_until(lambda: server_health(containers.mailbox)[0].progress > counted)


def test_ranks_of_two_hosts_meet_late_and_end_together(containers: Containers) -> None:
    """Host 1 waits for host 0 for as long as a start may take, not for `rank_timeout_s`; both get SIGTERM at
    once, and rank 0 finishes what it has before the others go. The first rank of host 1 answers its kubelet's
    probes: it works while it waits, and is ready when its part is loaded."""
    containers.settings(
        "grpc",
        tensor_parallel_size=2,
        rank_hosts=2,
        rank_address=f"127.0.0.1:{free_port()}",
        rank_timeout_s=5.0,
    )
    for index in range(2):
        containers.start_expert(index)
    port = free_port()

    def answers(path: str, status: int) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=30).status_code == status
        return False

    second = containers.start("ranks", "--host-index", "1", "--gpu-metrics-port", str(port))
    time.sleep(10)
    assert second.poll() is None, containers.log
    wait_until(lambda: answers("/health", 200) and answers("/ready", 503))
    first = containers.start("ranks", "--host-index", "0")
    containers.wait_serving(containers.engine, ENGINE_HEALTH)
    assert len(generate(f"127.0.0.1:{containers.engine}")) == TOKENS
    wait_until(lambda: answers("/ready", 200))
    for process in (second, first):
        process.send_signal(signal.SIGTERM)
    assert [process.wait(timeout=60) for process in (first, second)] == [0, 0], containers.log
    assert "did not stop in time" not in containers.log
