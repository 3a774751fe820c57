"""Starts expert processes around a mailbox, as the launcher does, for tests."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import torch

from gpu_service.experts.client import ExpertClient
from gpu_service.experts.factory import make_expert_client
from moebius.config import GpuConfig, MoebiusConfig, PlacementConfig
from moebius.mailbox import Mailbox
from moebius.mailbox.plan import mailbox_geometry
from moebius.models.geometry import MoeGeometry
from moebius.models.read import read_geometry
from moebius.network.grpc_channels import open_channel
from protos import expert_pb2_grpc
from tests.helpers.waiting import wait_until
from tests.helpers.warm_processes import ExpertProcess

READY_S = 60.0


def make_config(model: Path | str, directory: Path, **experts: Any) -> MoebiusConfig:
    """Returns a configuration of `split_count` servers whose sockets are in `directory`."""
    count = experts.get("split_count", 1)
    settings = {
        "expert_threads": 1,
        "expert_addresses": [f"unix:{directory}/e{index}" for index in range(count)],
        "mailbox_rows": 16,
        "expert_address": f"unix:{directory}/e{experts.get('split_index', 0)}",
        **experts,
    }
    document = {"model": {"model": str(model)}, "experts": settings, "supervisor": {"stop_timeout_s": 8}}
    return MoebiusConfig.model_validate(document)


@dataclass
class Cluster:
    """Running servers of one model; filled by `running_cluster`."""

    config: MoebiusConfig
    geometry: MoeGeometry
    log: Path
    processes: list[ExpertProcess] = field(default_factory=list)

    def own_config(self, index: int) -> MoebiusConfig:
        """Returns what the server `index` is started with."""
        addresses = self.config.experts.expert_addresses
        update = {"split_index": index, "expert_address": addresses[index]}
        return self.config.model_copy(update={"experts": self.config.experts.model_copy(update=update)})

    def start(self, index: int) -> ExpertProcess:
        """Start the server, or start it again."""
        process = ExpertProcess(self.own_config(index), self.log)
        self.processes[index : index + 1] = [process]
        return process

    def replace_at_step(self, step: int, index: int, client: ExpertClient) -> None:
        """Before the `step`-th step that asks `client` the server `index` is killed, and started again."""
        begun, begin_step = itertools.count(1), client.begin_step

        def counted() -> None:
            if next(begun) == step:
                self.processes[index].kill()
                self.processes[index].wait()
                self.start(index)
            begin_step()

        client.begin_step = counted  # type: ignore[method-assign]

    @contextlib.contextmanager
    def started_again(self, index: int) -> Iterator[int]:
        """Within it a server that dies is started again with another segment; the pid of the one that may be
        killed. At the end it is killed if it lives.
        """
        process = self.processes[index]
        segment = Path(self.config.experts.expert_weights_dir) / f"expert-{index}.weights"

        def restart() -> None:
            process.wait()
            segment.unlink()
            self.start(index)

        restarting = threading.Thread(target=restart)
        restarting.start()
        try:
            yield process.pid
        finally:
            process.kill()
            restarting.join()

    def client(self, transport: str, **experts: Any) -> ExpertClient:
        """Returns a ready client."""
        settings = self.config.experts.model_copy(update={"expert_transport": transport, **experts})
        client = make_expert_client(self.config.model_copy(update={"experts": settings}), self.geometry)
        client.wait_ready(READY_S)
        return client

    @contextlib.contextmanager
    def stub(self, index: int = 0) -> Iterator[Any]:
        """The gRPC stub of one server."""
        make_stub: Callable[[grpc.Channel], Any] = expert_pb2_grpc.ExpertStub
        with open_channel(self.config.experts.expert_addresses[index]) as channel:
            yield make_stub(channel)


@contextlib.contextmanager
def running_cluster(
    model: Path,
    directory: Path,
    *,
    dtype: str = "auto",
    expert_checkpoint: Path | None = None,
    placement: PlacementConfig | None = None,
    gpu: dict[str, Any] | None = None,
    **experts: Any,
) -> Iterator[Cluster]:
    """Servers and their mailbox; at the end they must leave on SIGTERM with status 0.

    Servers leave out what `placement` makes resident on a device; `gpu`: the engine's settings that matter to
    servers.
    """
    directory.mkdir(parents=True, exist_ok=True)
    name = f"moebius-test-{secrets.token_hex(6)}"
    config = make_config(model, directory, mailbox=name, **experts)
    apart = str(expert_checkpoint or "")
    sections: dict[str, Any] = {
        "model": config.model.model_copy(update={"dtype": dtype, "expert_checkpoint": apart})
    }
    sections |= {"placement": placement or PlacementConfig(), "gpu": GpuConfig.model_validate(gpu or {})}
    config = config.model_copy(update=sections)
    geometry = read_geometry(model, mtp_heads=config.gpu.mtp_heads)
    mailbox = Mailbox.create(name, mailbox_geometry(config, geometry))
    cluster = Cluster(config, geometry, directory / "experts.log")
    try:
        for index in range(config.experts.split_count):
            cluster.start(index)
        mailbox.wait_servers_ready(READY_S)
        yield cluster
        for process in cluster.processes:
            process.send_signal(signal.SIGTERM)
        statuses = [process.wait(timeout=60) for process in cluster.processes]
        assert statuses == [0] * len(statuses), cluster.log.read_text()[-4000:]
    finally:
        for process in cluster.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        Mailbox.unlink(name)


def random_routing(
    geometry: MoeGeometry, rows: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden_states `[rows, H]`, distinct topk_ids int32 `[rows, K]` and topk_weights float32 `[rows, K]`."""
    generator = torch.Generator().manual_seed(seed)
    hidden_states = torch.randn(rows, geometry.hidden_size, generator=generator).to(dtype)
    scores = torch.rand(rows, geometry.num_experts, generator=generator)
    topk_weights, topk_ids = scores.topk(geometry.top_k)
    return hidden_states, topk_ids.to(torch.int32), topk_weights


def compute(client: ExpertClient, layer: int, routing: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Submit and collect at once."""
    hidden_states, topk_ids, topk_weights = routing
    return client.collect(client.submit(layer, hidden_states, topk_ids, topk_weights))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns largest difference, as a fraction of the largest expected magnitude."""
    return float((found - expected).abs().max() / expected.abs().max())


def relative_rms(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over that of what is expected."""
    return float((found - expected).norm() / expected.norm())


def freeze(process: ExpertProcess) -> None:
    """SIGSTOP, and waits until no thread of the process runs: on a spare core one could still answer."""
    process.send_signal(signal.SIGSTOP)
    tasks = Path(f"/proc/{process.pid}/task")

    def stopped() -> bool:
        states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()]
        return set(states) == {"T"}

    wait_until(stopped)
