"""Guards captured steps with real expert servers in them: replayed doorbell kernels give the eager tokens.

Kernels and graphs are the host's twins of a GPU's; a replay runs no Python, so slots, layers and rows are
constants in it, and only what lies in device memory (epochs, inputs) moves on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gpu_service.core.request import Request, SamplingParams
from gpu_service.device.stream import HostDeviceStream
from gpu_service.engine.decode_graphs import DecodeGraphs
from gpu_service.experts.doorbell.client import DoorbellExpertClient
from gpu_service.models.common import CausalLM
from moebius.mailbox import Mailbox
from moebius.mailbox.plan import mailbox_geometry
from tests.helpers.capturable_attention import CapturableAttention
from tests.helpers.doorbell_host import doorbell_client
from tests.helpers.expert_cluster import READY_S, Cluster, running_cluster
from tests.helpers.host_graphs import RecordedOperations
from tests.helpers.tiny_engine import Setup, tiny_engine, tiny_model
from tests.helpers.tiny_models import make_tiny_model

Served = tuple[CausalLM, Cluster]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A tiny model, and two servers of its experts."""
    directory = tmp_path_factory.mktemp("doorbell_graphs")
    make_tiny_model("qwen3_moe", directory / "model")
    with running_cluster(
        directory / "model", directory, dtype="float32", split_count=2, mailbox_deadline_ms=20000
    ) as cluster:
        yield tiny_model(directory / "model", torch.device("cpu")), cluster


@contextmanager
def client_of(cluster: Cluster, is_memops: bool = False) -> Iterator[DoorbellExpertClient]:
    """A ready client of the cluster's mailbox."""
    geometry = mailbox_geometry(cluster.config, cluster.geometry)
    box = Mailbox.attach(cluster.config.experts.mailbox, 5, geometry)
    with doorbell_client(box, cluster.geometry, deadline_ms=20000, is_memops=is_memops) as (client, _):
        client.wait_ready(READY_S)
        yield client


def run(model: CausalLM, client: DoorbellExpertClient, setup: Setup) -> list[list[int]]:
    """Returns the batches that shrink from four to one as requests end."""
    params: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.8}
    wanted = [
        Request(
            f"r{i}",
            [3 + (i * 37 + k * k * 5 + k) % 200 for k in range(4 + 9 * i)],
            SamplingParams(seed=i, max_tokens=6 + 3 * i, ignore_eos=True, **params),
        )
        for i in range(4)
    ]
    stream, graphs = HostDeviceStream(), RecordedOperations()
    with tiny_engine(model, client, stream, CapturableAttention, setup, graphs) as engine:
        return engine.run(wanted)


@pytest.mark.parametrize("is_memops", [False, True], ids=["doorbell", "memops"])
def test_replayed_steps_ring_and_wait_like_eager_ones(
    served: Served, is_memops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every decode step is a replay, and says what the eager one says."""
    model, cluster = served
    replays = [0]
    original = DecodeGraphs.replay

    def replay(self: DecodeGraphs, *arguments: object) -> object:
        replays[0] += 1
        return original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(DecodeGraphs, "replay", replay)
    with client_of(cluster, is_memops) as client:
        eager = run(model, client, Setup())
        assert replays == [0]
        assert run(model, client, Setup(largest_graph=4)) == eager
        assert replays[0] >= 10
        assert client.stats().recoveries == 0


def test_a_server_killed_during_replays_does_not_show(served: Served) -> None:
    """The same graphs go on after the recovery, with epochs that continue beyond what was abandoned."""
    model, cluster = served
    # A client of its own: an engine that stops gives up its client's waits for good.
    with client_of(cluster) as client:
        expected = run(model, client, Setup(largest_graph=4))
    with client_of(cluster) as client:
        # Three sizes are warmed up and captured first, three steps each.
        cluster.replace_at_step(18, 0, client)
        assert run(model, client, Setup(largest_graph=4)) == expected
        assert client.stats().recoveries == 1
