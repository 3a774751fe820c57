"""Fixtures of several files in this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.helpers.agent_gateway import AgentGateway, agent_gateway
from tests.helpers.checkpoints import TinyMoe
from tests.helpers.expert_cluster import Cluster, running_cluster
from tests.helpers.warm_processes import fork_services, warm_services

# Those of supervisors in this process; a `moebius serve` forks its own.
fork_services(warm_services)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two expert servers of a tiny model, shared by a file's tests."""
    directory = tmp_path_factory.mktemp("cluster")
    model = TinyMoe(family="glm4_moe").write(directory / "model")
    with running_cluster(model, directory, split_count=2, mailbox_deadline_ms=20000) as running:
        yield running


@pytest.fixture(scope="module")
def gateway_settings() -> dict[str, Any]:
    """Returns leaves of the section `gateway` for a file's `gateway`; a file that needs some has its own."""
    return {}


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, gateway_settings: dict[str, Any]
) -> Iterator[AgentGateway]:
    """A gateway before a scripted engine, shared by a file's tests."""
    with agent_gateway(tmp_path_factory.mktemp("gateway"), **gateway_settings) as gateway:
        yield gateway


@pytest.fixture
def gateway(running: AgentGateway) -> AgentGateway:
    """Returns the shared gateway with a fresh record."""
    running.engine.reset()
    return running


@pytest.fixture
def client(gateway: AgentGateway) -> openai.OpenAI:
    """Returns a client of it that shows errors instead of retrying."""
    return gateway.client()
