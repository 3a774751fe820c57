"""Guards that by gRPC only the servers of the start compute, and that who is refused is named at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import structlog
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from expert_service.servicer import ExpertServicer
from gpu_service.experts.client import ExpertRefused, ExpertUnavailable
from gpu_service.experts.grpc_client import GrpcExpertClient
from gpu_service.experts.grpc_servers import SERVICE
from moebius import _kernels
from moebius.errors import WrongIdentity
from moebius.models.geometry import MoeGeometry
from protos import expert_pb2, expert_pb2_grpc
from tests.helpers.checkpoints import TinyMoe
from tests.helpers.waiting import wait_until

ABI = _kernels.MAILBOX_ABI_VERSION
# Far longer than a test may take: a refusal must not wait for it.
FOREVER_S = 3600.0
GIVEN = {"identity": "checkpoint=a\nexpert_dtype=keep\n", "weights_digest": 7, "abi_version": ABI}


@dataclass
class Fake(expert_pb2_grpc.ExpertServicer):
    """A server whose every answer is ones; tests make another process of it by changing its fields."""

    info: dict[str, Any]
    instance_id: int = 1
    asked: int = 0
    address: str = ""
    health: health.HealthServicer = field(default_factory=health.HealthServicer)

    def Info(self, request: Any, context: Any) -> expert_pb2.InfoResponse:
        """Answers with what was set."""
        return expert_pb2.InfoResponse(**self.info, instance_id=self.instance_id, version="9.9")

    def Compute(self, requests: Any, context: Any) -> Iterator[expert_pb2.ComputeResponse]:
        """Ones, by the rule of the real server."""
        real: Any = SimpleNamespace(_instance_id=self.instance_id, _compute=self._ones)
        return ExpertServicer.Compute(real, requests, context)

    def _ones(self, request: expert_pb2.ComputeRequest) -> expert_pb2.ComputeResponse:
        self.asked += 1
        size = len(request.hidden_states) // 4
        return expert_pb2.ComputeResponse(epoch=request.epoch, output=torch.ones(size).numpy().tobytes())

    def becomes(self, instance_id: int, **info: Any) -> None:
        """Another process from now on."""
        self.info, self.instance_id = {**self.info, **info}, instance_id

    def serving(self, is_serving: bool) -> None:
        """What its health says."""
        status = health_pb2.HealthCheckResponse
        self.health.set(SERVICE, status.SERVING if is_serving else status.NOT_SERVING)


Start = Callable[..., Fake]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts fake servers, of which each may say something else."""
    running = []

    def start_one(**info: Any) -> Fake:
        fake = Fake({**GIVEN, **info})
        server = grpc.server(futures.ThreadPoolExecutor(8))
        add: Any = expert_pb2_grpc.add_ExpertServicer_to_server
        add(fake, server)
        health_pb2_grpc.add_HealthServicer_to_server(fake.health, server)
        fake.serving(True)
        fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        running.append(server)
        return fake

    yield start_one
    for server in running:
        server.stop(0).wait()


@pytest.fixture(scope="module")
def geometry(tmp_path_factory: pytest.TempPathFactory) -> MoeGeometry:
    from moebius.models.read import read_geometry

    return read_geometry(TinyMoe(family="glm4_moe").write(tmp_path_factory.mktemp("model") / "model"))


def client_of(geometry: MoeGeometry, *servers: Fake) -> GrpcExpertClient:
    """Not ready yet."""
    return GrpcExpertClient([server.address for server in servers], geometry, torch.float32, 10_000)


def ask(client: GrpcExpertClient, geometry: MoeGeometry) -> torch.Tensor:
    """Returns one row of one layer."""
    ids = torch.zeros((1, geometry.top_k), dtype=torch.int32)
    weights = torch.zeros((1, geometry.top_k))
    return client.collect(
        client.submit(geometry.moe_layers[0], torch.zeros((1, geometry.hidden_size)), ids, weights)
    )


CHANGES = [
    ({"identity": "checkpoint=b\nexpert_dtype=keep\n"}, "checkpoint is b, expected a"),
    ({"identity": "checkpoint=a\nexpert_dtype=int8\n"}, "expert_dtype is int8, expected keep"),
    ({"weights_digest": 8}, "the weights have changed"),
    ({"split_index": 1}, "split_index is 1, expected 0"),
    ({"abi_version": ABI + 1}, f"it is Moebius 9.9 with version {ABI + 1} of the records, this engine is"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES, ids=lambda value: str(value)[:30])
def test_who_is_refused_is_named_at_once(
    geometry: MoeGeometry, start: Start, change: dict[str, Any], reason: str
) -> None:
    """In the error, on /ready and in the log (once); it computes nothing, and the right one is welcome."""
    servers = [start(), start(identity=GIVEN["identity"])]
    client = client_of(geometry, *servers)
    client.wait_ready(60)
    assert (ask(client, geometry) == len(servers)).all()
    servers[0].becomes(2, **change)
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            with pytest.raises(ExpertRefused) as caught:
                client.recover(FOREVER_S)
            assert "expert server 0: it was restarted and is refused: " in str(caught.value)
            assert reason in str(caught.value)
            assert client.problem() == str(caught.value)
            with pytest.raises(ExpertUnavailable):
                ask(client, geometry)
    assert [line["server"] for line in logs if line["log_level"] == "error"] == [0]
    assert servers[0].asked == 1, "another one was asked"
    servers[0].becomes(3, **GIVEN, split_index=0)
    assert client.problem() == ""
    client.recover(60)
    assert (ask(client, geometry) == len(servers)).all()
    client.close()


def test_a_refusal_does_not_wait_for_servers_that_load(geometry: MoeGeometry, start: Start) -> None:
    """Nor does it matter in which order they are."""
    servers = [start(), start()]
    client = client_of(geometry, *servers)
    client.wait_ready(60)
    servers[0].serving(False)
    servers[1].becomes(2, weights_digest=8)
    with pytest.raises(ExpertRefused, match="expert server 1"):
        client.recover(FOREVER_S)
    client.close()


def test_who_took_the_place_after_the_comparison_is_not_asked(geometry: MoeGeometry, start: Start) -> None:
    """A process that was replaced between `wait_ready` and the first record."""
    server = start()
    client = client_of(geometry, server)
    client.wait_ready(60)
    server.becomes(2, weights_digest=8)
    with pytest.raises(ExpertUnavailable, match="server was restarted"):
        ask(client, geometry)
    assert server.asked == 0
    client.close()


def test_who_was_sent_away_is_named_until_another_comes(geometry: MoeGeometry, start: Start) -> None:
    """Its fault may be of this process only, as damaged memory is: its successor is waited for."""
    server = start()
    client = client_of(geometry, server)
    client.wait_ready(60)
    client.confirm()
    server.becomes(2)
    client.recover(60)
    wrong = "layer 1, expert 0: relative error 2"
    client.reject(wrong)
    wait_until(lambda: client.problem() == f"expert server 0: it was refused: {wrong}")
    with pytest.raises(ExpertUnavailable, match=f"it was refused: {wrong}") as caught:
        client.recover(0.1)
    assert not isinstance(caught.value, ExpertRefused)
    server.becomes(3)
    client.recover(60)
    client.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"abi_version": ABI + 1}, "version"),
        ({"identity": "checkpoint=b\n"}, "unlike expert server 0, checkpoint is b"),
        ({"split_index": 0}, "split_index is 0, which that server is, too"),
    ],
    ids=["version", "checkpoint", "split"],
)
def test_servers_that_do_not_fit_from_the_start(
    geometry: MoeGeometry, start: Start, change: dict[str, Any], reason: str
) -> None:
    """The engine ends, naming why: no server's first process is compared with a predecessor."""
    servers = [start(split_count=2), start(split_count=2, split_index=1)]
    servers[1].becomes(1, **change)
    client = client_of(geometry, *servers)
    with pytest.raises(WrongIdentity, match=reason):
        client.wait_ready(60)
    client.close()
