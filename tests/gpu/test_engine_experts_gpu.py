"""Invariant: an engine assembled for a GPU says what it says on a CPU, wherever its experts are computed.

By expert servers through the device-driven client, by the device itself, or by both; with a server killed in
the middle, too. In float32, where tiny random models have clear winners.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpu_service.core.request import Request, SamplingParams
from moebius.config import MoebiusConfig
from tests.helpers.built_engine import running_engine
from tests.helpers.expert_cluster import Cluster, running_cluster
from tests.helpers.tiny_models import make_tiny_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two servers of a tiny model's experts."""
    directory = tmp_path_factory.mktemp("engine_experts")
    make_tiny_model("qwen3_moe", directory / "model")
    with running_cluster(
        directory / "model", directory, dtype="float32", split_count=2, mailbox_deadline_ms=5000
    ) as running:
        yield running


def config_for(cluster: Cluster, transport: str, gpu: dict[str, Any], **placement: Any) -> MoebiusConfig:
    """Returns the cluster's settings, and a small pool."""
    small = {"num_pages": 128, "page_size": 4, "max_num_seqs": 8, "cuda_graph_max_batch_size": 8}
    document = cluster.config.model_dump()
    document["gpu"] |= small | gpu
    document["experts"]["expert_transport"] = transport
    document["placement"] |= placement
    return MoebiusConfig.model_validate(document)


def workload(max_tokens: int = 16) -> list[Request]:
    """Returns greedy ones and others with seeds and penalties, of different lengths."""
    sampled = {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.8, "repetition_penalty": 1.2}
    return [
        Request(
            f"r{i}",
            [3 + (i * 37 + k * k * 5 + k) % 200 for k in range(4 + 11 * i)],
            SamplingParams(
                seed=i,
                max_tokens=max_tokens + i,
                ignore_eos=True,
                **(sampled if i % 2 else {"temperature": 0.0}),  # type: ignore[arg-type]
            ),
        )
        for i in range(5)
    ]


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[list[int]]:
    """Returns the CPU path, with experts in process."""
    with running_engine(config_for(cluster, "local", {"device": "cpu"})) as engine:
        return engine.run(workload())


@pytest.mark.parametrize("gpu", [{}, {"cuda_graphs": False}, {"overlap_scheduling": False}], ids=str)
def test_expert_servers_over_doorbells(
    cluster: Cluster, expected: list[list[int]], gpu: dict[str, Any]
) -> None:
    """Tokens agree captured and eager, overlapped and not, and twice in a row."""
    with running_engine(config_for(cluster, "mailbox", {"device": "cuda"} | gpu)) as engine:
        assert engine.built.experts is not None
        assert engine.built.experts.is_device_driven
        assert engine.run(workload()) == expected
        assert engine.run(workload()) == expected


@pytest.mark.parametrize(
    "placement",
    [{"gpu_experts_ratio": 1.0}, {"gpu_experts_ratio": 0.4}, {"gpu_layers": "1"}, {"gpu_experts": 3}],
    ids=str,
)
def test_resident_experts_with_servers(
    cluster: Cluster, expected: list[list[int]], placement: dict[str, Any]
) -> None:
    """Any placement gives the same tokens; with all experts on the device no client is needed."""
    with running_engine(config_for(cluster, "mailbox", {"device": "cuda"}, **placement)) as engine:
        assert (engine.built.experts is None) == (placement == {"gpu_experts_ratio": 1.0})
        assert engine.run(workload()) == expected


@pytest.mark.parametrize("transport", ["grpc", "local"])
def test_clients_that_the_host_drives(cluster: Cluster, expected: list[list[int]], transport: str) -> None:
    """They block the launching thread, and no graph can hold them; the tokens are the same."""
    with running_engine(config_for(cluster, transport, {"device": "cuda"})) as engine:
        assert engine.run(workload()) == expected


@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "eager"])
def test_a_server_killed_in_the_middle_does_not_show(
    cluster: Cluster, expected: list[list[int]], cuda_graphs: bool
) -> None:
    """SIGKILL between two steps: the deadline fires, the server returns, every request ends well."""
    config = config_for(cluster, "mailbox", {"device": "cuda", "cuda_graphs": cuda_graphs})
    with running_engine(config) as engine:
        client = engine.built.experts
        assert client is not None
        cluster.replace_at_step(9, 1, client)
        assert engine.run(workload()) == expected
        assert client.stats().recoveries == 1
