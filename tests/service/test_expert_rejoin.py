"""Guards who may return: a server of other weights or settings stays out, and those who wait learn why."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from gpu_service.experts.client import ExpertRefused, ExpertUnavailable
from gpu_service.experts.servers import CheckedExperts
from moebius.errors import WRONG_IDENTITY_EXIT, WrongIdentity
from moebius.models.checkpoint import open_index
from protos import expert_pb2
from tests.helpers.checkpoints import TinyMoe
from tests.helpers.expert_cluster import (
    READY_S,
    Cluster,
    compute,
    freeze,
    make_config,
    random_routing,
)
from tests.helpers.waiting import wait_until
from tests.helpers.warm_processes import ExpertProcess


def kill(cluster: Cluster, index: int) -> None:
    """kill -9."""
    cluster.processes[index].kill()
    cluster.processes[index].wait()


def last_words(cluster: Cluster) -> str:
    """Returns the last words of the process that has ended last."""
    return cluster.log.read_text().strip().splitlines()[-1]


def test_weights_changed_on_disk_are_refused(cluster: Cluster) -> None:
    """The files change, a server is killed: it ends with its own status, no client gets a wrong answer.

    With the old weights back it returns and computes the same bits as before.
    """
    clients = [cluster.client("mailbox"), cluster.client("grpc")]
    routing = random_routing(cluster.geometry, 5)
    before = [compute(client, 1, routing) for client in clients]
    info = next(iter(open_index(cluster.config.model.model).tensors.values()))
    content = info.file.read_bytes()
    kill(cluster, 1)
    changed = bytearray(content)
    changed[info.offset] ^= 1
    info.file.write_bytes(changed)
    try:
        assert cluster.start(1).wait(READY_S) == WRONG_IDENTITY_EXIT
        assert "checkpoint is " in last_words(cluster)
        assert "expert server 1 does not fit" in last_words(cluster)
        for client, reason in zip(clients, ("refused: checkpoint is ", "not ready"), strict=True):
            with pytest.raises(ExpertUnavailable):
                compute(client, 1, routing)
            with pytest.raises(ExpertUnavailable, match=reason):
                client.recover(0.1)
    finally:
        info.file.write_bytes(content)
    cluster.start(1)
    for client, answer in zip(clients, before, strict=True):
        client.recover(READY_S)
        assert torch.equal(compute(client, 1, routing), answer)
        client.close()


@pytest.mark.parametrize(
    ("setting", "value", "text"),
    [
        ("expert_dtype", "int8", "expert_dtype is int8, expected keep"),
        ("split_shares", (3, 1), "split_shares is 3,1, expected 1,1"),
        ("expert_split", "expert", "expert_split is expert, expected tensor"),
    ],
)
def test_a_replacement_with_other_settings_is_refused(
    cluster: Cluster, setting: str, value: Any, text: str
) -> None:
    """A server that is started by hand in the dead one's place is refused."""
    kill(cluster, 0)
    config = cluster.own_config(0)
    other = config.model_copy(update={"experts": config.experts.model_copy(update={setting: value})})
    assert ExpertProcess(other, cluster.log).wait(READY_S) == WRONG_IDENTITY_EXIT
    assert text in last_words(cluster)
    cluster.start(0)
    client = cluster.client("mailbox")
    compute(client, 1, random_routing(cluster.geometry, 2))
    client.close()


def _has_loaded(lone: Cluster) -> bool:
    with lone.stub() as stub:
        try:
            return bool(stub.Info(expert_pb2.InfoRequest(), timeout=5).identity)
        except grpc.RpcError:
            return False


def test_by_grpc_a_reconnect_compares(cluster: Cluster, tmp_path: Path) -> None:
    """A remote server has no mailbox that would refuse it: the engine does at once, asks it for nothing, and
    takes the right one."""
    model = cluster.config.model.model
    config = make_config(model, tmp_path, expert_transport="grpc")
    log = tmp_path / "log"
    lone = Cluster(config, cluster.geometry, log)
    process = ExpertProcess(config, log)
    other = config.model_copy(update={"experts": config.experts.model_copy(update={"expert_dtype": "int8"})})
    try:
        client = lone.client("grpc")
        routing = random_routing(cluster.geometry, 2)
        before = compute(client, 1, routing)
        for replacement in (other, config):
            process.kill()
            process.wait()
            with pytest.raises(ExpertUnavailable):
                compute(client, 1, routing)
            process = ExpertProcess(replacement, log)
            wait_until(lambda: _has_loaded(lone), READY_S)
            if replacement is other:
                with pytest.raises(ExpertRefused, match="expert_dtype is int8, expected keep"):
                    client.recover(3600)
                with pytest.raises(ExpertUnavailable):
                    compute(client, 1, routing)
        client.recover(READY_S)
        assert torch.equal(compute(client, 1, routing), before)
        client.close()
    finally:
        process.kill()
        process.wait()


def test_an_engine_of_other_files_is_refused_at_its_start(cluster: Cluster, tmp_path: Path) -> None:
    """Its dense weights are others than those that the experts belong to."""
    other = TinyMoe(family="glm4_moe", seed=1).write(tmp_path / "model")
    config = cluster.config.model_copy(
        update={"model": cluster.config.model.model_copy(update={"model": str(other)})}
    )
    with pytest.raises(WrongIdentity, match="checkpoint is "):
        Cluster(config, cluster.geometry, cluster.log).client("grpc")


@pytest.mark.covering(1)
@pytest.mark.parametrize("fault", ["killed", "frozen"])
@pytest.mark.parametrize("transport", ["mailbox", "grpc"])
def test_a_second_fault_during_the_check_is_waited_for(cluster: Cluster, transport: str, fault: str) -> None:
    """A server that has just returned is killed, or stands still, while it is compared: the recovery goes on,
    and what is computed then is what was before."""
    client = cluster.client(transport, mailbox_deadline_ms=1500)
    checked = CheckedExperts(client)
    routing = random_routing(cluster.geometry, 5)
    before = compute(checked, 1, routing)
    checks: list[int] = []

    def check() -> str:
        checks.append(cluster.processes[1].pid)
        if fault == "killed" and len(checks) < 3:
            kill(cluster, 1)
            cluster.start(1)
        if fault == "frozen" and len(checks) == 1:
            freeze(cluster.processes[1])
            threading.Timer(8.0, cluster.processes[1].send_signal, (signal.SIGCONT,)).start()
        return "" if torch.equal(compute(checked, 1, routing), before) else "another answer"

    checked.check_with(check)
    kill(cluster, 1)
    with pytest.raises(ExpertUnavailable):
        compute(checked, 1, routing)
    cluster.start(1)
    checked.recover(4 * READY_S)
    assert len(checks) >= 2
    assert checked.problem() == ""
    assert torch.equal(compute(checked, 1, routing), before)
    checked.close()
