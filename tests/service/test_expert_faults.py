"""Guards the fault path of expert servers: death, restart, drain, refusal, and rest when idle."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from expert_service.errors import LoadCancelled
from expert_service.host import ExpertHost
from expert_service.placement import ThreadPlacement
from gpu_service.experts.client import ExpertUnavailable
from moebius.experts.slices import SliceRequest
from moebius.mailbox import Mailbox
from tests.helpers.checkpoints import TinyMoe
from tests.helpers.expert_cluster import (
    READY_S,
    Cluster,
    compute,
    freeze,
    make_config,
    random_routing,
    running_cluster,
)
from tests.helpers.idle import becomes_idle
from tests.helpers.waiting import wait_until
from tests.helpers.warm_processes import ExpertProcess


@pytest.mark.parametrize("transport", ["mailbox", "grpc"])
def test_killed_server_is_named_and_the_replay_is_equal(cluster: Cluster, transport: str) -> None:
    """SIGKILL with a layer in flight: ExpertUnavailable, and after the restart the same bits as before."""
    client = cluster.client(transport)
    routing = random_routing(cluster.geometry, 40)
    before = compute(client, 1, routing)
    # A stopped server cannot answer, so the kill is sure to hit a request in flight.
    freeze(cluster.processes[1])
    ticket = client.submit(1, *routing)
    cluster.processes[1].kill()
    cluster.processes[1].wait()
    with pytest.raises(ExpertUnavailable) as caught:
        client.collect(ticket)
    assert caught.value.server_index == 1
    assert str(caught.value).count("expert server 1") == 1, "named once"
    with pytest.raises(ExpertUnavailable) as late:
        client.recover(0.1)
    assert str(late.value).count("expert server 1") == 1, "named once"
    cluster.start(1)
    client.recover(READY_S)
    assert torch.equal(compute(client, 1, routing), before)
    with pytest.raises(ValueError, match="ticket"):
        client.collect(ticket)
    client.close()


def test_silent_server_meets_the_deadline(cluster: Cluster) -> None:
    """A server that lives but does not answer is reported once the deadline passes; later it works again."""
    for transport in ("mailbox", "grpc"):
        client = cluster.client(transport, mailbox_deadline_ms=1500)
        routing = random_routing(cluster.geometry, 3)
        before = compute(client, 2, routing)
        freeze(cluster.processes[0])
        with pytest.raises(ExpertUnavailable) as caught:
            compute(client, 2, routing)
        cluster.processes[0].send_signal(signal.SIGCONT)
        assert caught.value.server_index == 0
        client.recover(READY_S)
        assert torch.equal(compute(client, 2, routing), before)
        client.close()


@pytest.mark.parametrize("transport", ["mailbox", "grpc"])
def test_a_lost_server_is_seen_while_no_step_runs(cluster: Cluster, transport: str) -> None:
    """An idle client says which server is gone, and that it is back; a wait for it can be given up."""
    client = cluster.client(transport)
    assert client.problem() == ""
    cluster.processes[1].kill()
    cluster.processes[1].wait()
    wait_until(lambda: "expert server 1" in client.problem())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.recover, 600.0)
        time.sleep(0.2)
        assert not waiting.done()
        client.interrupt()
        with pytest.raises(ExpertUnavailable, match="the engine stops"):
            waiting.result(timeout=60)
    cluster.start(1)
    wait_until(lambda: client.problem() == "")
    client.close()


@pytest.mark.parametrize("transport", ["mailbox", "grpc"])
def test_a_frozen_server_is_a_problem(cluster: Cluster, transport: str) -> None:
    """A server that lives but is silent for longer than an answer may take does not compute."""
    client = cluster.client(transport, mailbox_deadline_ms=700)
    freeze(cluster.processes[0])
    wait_until(lambda: "expert server 0" in client.problem())
    cluster.processes[0].send_signal(signal.SIGCONT)
    wait_until(lambda: client.problem() == "")
    client.close()


def cpu_seconds(process: psutil.Process) -> float:
    """Returns user and system time of a process."""
    return sum(process.cpu_times()[:2])


def test_idle_servers_sleep(cluster: Cluster) -> None:
    """A server takes below 2 % of one CPU without requests, although the last request was a moment ago."""
    compute(cluster.client("mailbox"), 1, random_routing(cluster.geometry, 4))
    for process in cluster.processes:
        assert becomes_idle(partial(cpu_seconds, psutil.Process(process.pid)), window_s=1.0)


def test_wrong_geometry_is_refused_and_named(cluster: Cluster, tmp_path: Path) -> None:
    """A server of another model does not enter the mailbox: it ends, naming the size that differs."""
    other = TinyMoe(family="glm4_moe", hidden_size=64).write(tmp_path / "other")
    config = cluster.own_config(0)
    own = config.experts.model_copy(update={"expert_address": f"unix:{tmp_path}/x"})
    model = config.model.model_copy(update={"model": str(other)})
    process = ExpertProcess(config.model_copy(update={"model": model, "experts": own}), tmp_path / "log")
    assert process.wait(timeout=60) != 0
    log = (tmp_path / "log").read_text()
    assert "hidden_size=64" in log
    assert "hidden_size=48" in log


def test_server_without_a_model_ends_on_sigterm(tmp_path: Path) -> None:
    """It waits for Load, and leaves with status 0 all the same."""
    process = ExpertProcess(make_config("", tmp_path), tmp_path / "log")
    wait_until(lambda: "listening" in (tmp_path / "log").read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0


def test_a_load_can_be_cancelled(tmp_path: Path) -> None:
    """SIGTERM does not wait for the rest of the weights; nothing counts as loaded."""
    model = TinyMoe().write(tmp_path / "model")
    host = ExpertHost(ThreadPlacement(-1, 1, ()), lambda *_: host.cancel_load(), lambda: None)
    with pytest.raises(LoadCancelled):
        host.load(SliceRequest(str(model)))
    assert host.loaded is None
    assert not host.is_serving


def test_shut_down_mailbox_ends_the_server(tmp_path: Path) -> None:
    """When the launcher shuts the mailbox down, servers leave by themselves with status 0."""
    model = TinyMoe().write(tmp_path / "model")
    with running_cluster(model, tmp_path / "run") as cluster:
        Mailbox.attach(cluster.config.experts.mailbox, 1.0).shut_down()
        assert cluster.processes[0].wait(timeout=60) == 0
