"""Guards the engine that launches without waiting, with real expert servers behind a device-driven client.

The doorbell kernels run on the host here, from the source that GPUs run; the same is repeated on a GPU in
tests/gpu/test_engine_experts_gpu.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from gpu_service.core.request import Request, SamplingParams
from gpu_service.device.stream import HostDeviceStream
from gpu_service.experts.doorbell.client import DoorbellExpertClient
from gpu_service.models.common import CausalLM
from moebius.mailbox import Mailbox
from moebius.mailbox.plan import mailbox_geometry
from tests.helpers.capturable_attention import CapturableAttention
from tests.helpers.doorbell_host import doorbell_client
from tests.helpers.expert_cluster import READY_S, Cluster, running_cluster
from tests.helpers.tiny_engine import Setup, tiny_engine, tiny_model
from tests.helpers.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CausalLM, Cluster]]:
    """A tiny model, and two servers of its experts."""
    directory = tmp_path_factory.mktemp("device_engine")
    make_tiny_model("qwen3_moe", directory / "model")
    with running_cluster(
        directory / "model", directory, dtype="float32", split_count=2, mailbox_deadline_ms=20000
    ) as cluster:
        yield tiny_model(directory / "model", torch.device("cpu")), cluster


def workload() -> list[Request]:
    """Returns seeds and penalties: what a step run twice could spoil."""
    params = {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.8, "repetition_penalty": 1.2}
    return [
        Request(
            f"r{i}",
            [3 + (i * 37 + k * k * 5 + k) % 200 for k in range(4 + 11 * i)],
            SamplingParams(seed=i, max_tokens=12 + i, ignore_eos=True, **params),  # type: ignore[arg-type]
        )
        for i in range(4)
    ]


def run(model: CausalLM, client: DoorbellExpertClient) -> list[list[int]]:
    """Returns the workload through an engine that launches a step after the one that computes."""
    with tiny_engine(model, client, HostDeviceStream(), CapturableAttention, Setup()) as engine:
        return engine.run(workload())


@contextmanager
def attached(cluster: Cluster) -> Iterator[DoorbellExpertClient]:
    """A device-driven client of the cluster's servers, which are ready."""
    box = Mailbox.attach(
        cluster.config.experts.mailbox, 5, mailbox_geometry(cluster.config, cluster.geometry)
    )
    with doorbell_client(box, cluster.geometry, deadline_ms=20000) as (client, _):
        client.wait_ready(READY_S)
        yield client


def test_a_server_killed_in_the_middle_does_not_show(served: tuple[CausalLM, Cluster]) -> None:
    """SIGKILL between two steps and a new process: every request ends with the tokens of a quiet run."""
    model, cluster = served
    # A client for each engine: one that stops interrupts its client for good.
    with attached(cluster) as client:
        expected = run(model, client)
    with attached(cluster) as client:
        cluster.replace_at_step(9, 1, client)
        assert run(model, client) == expected
        assert client.stats().recoveries == 1
