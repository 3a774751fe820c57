"""Guards the gRPC face of an expert server: every call, health, reflection, and the metrics next to it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from moebius.config import MoebiusConfig, TelemetryConfig
from moebius.kernels.weight_formats import expert_layout
from moebius.mailbox.plan import MOST_GRPC_ROWS, grpc_message_bytes
from moebius.network.grpc_channels import open_channel
from protos import expert_pb2 as pb
from protos import expert_pb2_grpc
from tests.helpers.checkpoints import TinyMoe
from tests.helpers.expert_cluster import (
    compute,
    make_config,
    random_routing,
    running_cluster,
)
from tests.helpers.ports import free_port
from tests.helpers.waiting import wait_until
from tests.helpers.warm_processes import ExpertProcess

EXPERT_HEALTH = "moebius.expert.v1.Expert"


@pytest.fixture
def lonely(tmp_path: Path) -> Iterator[tuple[grpc.Channel, MoebiusConfig]]:
    """A server that was given no model, and a channel to it; it must leave with status 0."""
    config = make_config("", tmp_path, expert_metrics_port=free_port())
    config = config.model_copy(update={"telemetry": TelemetryConfig(grpc_reflection=True)})
    process = ExpertProcess(config, tmp_path / "log")
    with open_channel(config.experts.expert_address) as channel:
        grpc.channel_ready_future(channel).result(timeout=60)
        yield channel, config
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0, (tmp_path / "log").read_text()


def stub_of(channel: grpc.Channel) -> Any:
    """Returns the Expert stub, untyped."""
    make_stub: Callable[[grpc.Channel], Any] = expert_pb2_grpc.ExpertStub
    return make_stub(channel)


def health_of(channel: grpc.Channel, service: str) -> int:
    """Returns the status of one health name."""
    make_stub: Callable[[grpc.Channel], Any] = health_pb2_grpc.HealthStub
    answer = make_stub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
    return int(answer.status)


def refusal(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    """Code and details of a call that must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    return error.code(), error.details()


def send(stub: Any, *records: pb.ComputeRequest) -> list[pb.ComputeResponse]:
    """All answers of one Compute stream."""
    return list(stub.Compute(iter(records)))


def record(**changes: Any) -> pb.ComputeRequest:
    """Returns one valid row for TinyMoe's defaults, with changes."""
    fields: dict[str, Any] = {
        "epoch": 1,
        "layer": 0,
        "rows": 1,
        "dtype": pb.DTYPE_FLOAT32,
        "hidden_states": np.ones(48, np.float32).tobytes(),
        "topk_ids": np.arange(3, dtype=np.int32).tobytes(),
        "topk_weights": np.ones(3, np.float32).tobytes(),
    }
    return pb.ComputeRequest(**{**fields, **changes})


def test_load_by_grpc(lonely: tuple[grpc.Channel, MoebiusConfig], tmp_path: Path) -> None:
    """The server is alive before a load and serves after it; errors name the tensor; a second load is
    refused.
    """
    channel, config = lonely
    stub = stub_of(channel)
    assert health_of(channel, "") == health_pb2.HealthCheckResponse.SERVING
    assert health_of(channel, EXPERT_HEALTH) == health_pb2.HealthCheckResponse.NOT_SERVING
    assert refusal(partial(send, stub, record()))[0] is grpc.StatusCode.UNAVAILABLE
    missing = "model.layers.1.mlp.experts.4.up_proj.weight"
    broken = TinyMoe().write(tmp_path / "broken", {missing: None})
    code, details = refusal(lambda: stub.Load(pb.LoadRequest(model_path=str(broken))))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert missing in details
    whole = TinyMoe().write(tmp_path / "whole")
    request = pb.LoadRequest(
        model_path=str(whole), split=pb.EXPERT_SPLIT_EXPERT, split_index=1, split_count=2, split_shares=[3, 4]
    )
    assert stub.Load(request).packed_bytes >= 4 * 3 * 3 * 48 * 56 * 4
    assert health_of(channel, EXPERT_HEALTH) == health_pb2.HealthCheckResponse.SERVING
    assert refusal(lambda: stub.Load(request))[0] is grpc.StatusCode.FAILED_PRECONDITION
    info = stub.Info(pb.InfoRequest())
    assert (info.expert_begin, info.expert_end, info.num_experts) == (3, 7, 7)
    assert (info.intermediate_begin, info.intermediate_end, info.top_k) == (0, 56, 3)
    check_bad_records(stub)
    check_metrics(stub, config.experts.expert_metrics_port)


def check_bad_records(stub: Any) -> None:
    """Each bad field is named, with INVALID_ARGUMENT."""
    bad: dict[str, pb.ComputeRequest] = {
        "hidden_states": record(hidden_states=b"123"),
        "topk_ids": record(topk_ids=b""),
        "topk_weights": record(topk_weights=bytes(8)),
        "dtype": record(dtype=pb.DTYPE_UNSPECIFIED),
        "rows": record(rows=0),
        "layer": record(layer=99),
    }
    for field, request in bad.items():
        code, details = refusal(partial(send, stub, request))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert field in details
    code, details = refusal(partial(send, stub, record(epoch=5), record(epoch=5)))
    assert (code, "epoch" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)


def check_metrics(stub: Any, port: int) -> None:
    """Prometheus and Stats tell the same."""
    stats = stub.Stats(pb.StatsRequest())
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    assert f'moebius:expert_rows_total{{layer="0"}} {float(stats.layers[0].rows)}' in text
    assert "moebius:expert_serving 1.0" in text


def test_reflection_lists_the_service(lonely: tuple[grpc.Channel, MoebiusConfig]) -> None:
    """A client without our stubs can find the contract, where the setting allows it."""
    assert {EXPERT_HEALTH, "grpc.health.v1.Health"} <= reflected(lonely[0])


def reflected(channel: grpc.Channel) -> set[str]:
    """Returns the services that reflection lists."""
    make_stub: Callable[[grpc.Channel], Any] = reflection_pb2_grpc.ServerReflectionStub
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answer = next(iter(make_stub(channel).ServerReflectionInfo(iter([request]), timeout=30)))
    return {service.name for service in answer.list_services_response.service}


def test_no_reflection_and_bounded_messages_by_default(tmp_path: Path) -> None:
    """Services are listed only where set; what no step could need is refused before it is read whole."""
    model = TinyMoe().write(tmp_path / "model")
    with running_cluster(model, tmp_path / "run") as cluster, cluster.stub() as stub:
        with open_channel(cluster.config.experts.expert_addresses[0]) as channel:
            assert refusal(partial(reflected, channel))[0] is grpc.StatusCode.UNIMPLEMENTED
        limit = grpc_message_bytes(cluster.geometry)
        assert limit < 16 * 2**20
        too_large = refusal(partial(send, stub, record(hidden_states=bytes(limit))))
        assert too_large[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        most = MOST_GRPC_ROWS + 1
        assert "at most 4096" in refusal(partial(send, stub, record(rows=most)))[1]
        assert refusal(partial(send, stub, record(rows=0)))[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_stats_equal_an_offline_recount(tmp_path: Path) -> None:
    """Per layer and expert, what both transports computed together; then Drain refuses further work."""
    model = TinyMoe().write(tmp_path / "model")
    with running_cluster(model, tmp_path / "run") as cluster:
        clients = [cluster.client("mailbox"), cluster.client("grpc")]
        counted = np.zeros((3, 7), np.int64)
        for number, (layer, rows) in enumerate([(0, 5), (2, 40), (2, 1), (0, 9)]):
            routing = random_routing(cluster.geometry, rows, seed=number)
            compute(clients[number % 2], layer, routing)
            counted[layer] += np.bincount(routing[1].numpy().ravel(), minlength=7)
        with cluster.stub() as stub:
            stats = stub.Stats(pb.StatsRequest())
            found = {layer.layer: list(layer.expert_rows) for layer in stats.layers}
            assert found == {0: counted[0].tolist(), 2: counted[2].tolist()}
            assert {layer.layer: layer.rows for layer in stats.layers} == {0: 14, 2: 41}
            assert stats.rows == 55
            info = stub.Info(pb.InfoRequest())
            channels = info.intermediate_end - info.intermediate_begin
            one = expert_layout(info.weight_format, info.weight_format, info.hidden_size, channels)
            read = sum(layer.experts for layer in stats.layers)
            assert (read > 0, stats.weight_bytes) == (True, read * one.expert_bytes)
            clients[1].close()
            stub.Drain(pb.DrainRequest(timeout_ms=5000))
            assert refusal(partial(send, stub, record()))[0] is grpc.StatusCode.UNAVAILABLE
            with open_channel(cluster.config.experts.expert_address) as channel:
                wait_until(
                    lambda: health_of(channel, EXPERT_HEALTH) != health_pb2.HealthCheckResponse.SERVING
                )


def test_bytes_that_are_no_message_do_not_keep_the_process(
    lonely: tuple[grpc.Channel, MoebiusConfig],
) -> None:
    """They are refused (`grpc_refusal.py`); the fixture's SIGTERM ends the process with status 0."""
    call = lonely[0].stream_stream("/moebius.expert.v1.Expert/Compute")
    for _ in range(20):
        code, _details = refusal(lambda: list(call(iter([b"\xff" * 20]), timeout=60)))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
