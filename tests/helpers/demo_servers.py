"""Real expert server processes on the demo model, reached by mailbox or gRPC, or none (in process)."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpu_service.experts.client import ExpertClient
from gpu_service.experts.factory import make_expert_client
from moebius.config import ExpertConfig, ModelConfigSection, MoebiusConfig
from moebius.mailbox import Mailbox
from moebius.mailbox.plan import mailbox_geometry
from moebius.models.geometry import MoeGeometry
from moebius.models.read import read_geometry
from tests.helpers.demo import demo_checkpoint
from tests.helpers.warm_processes import ExpertProcess

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
Transport = Literal["mailbox", "grpc", "local"]


@dataclass(frozen=True)
class Fleet:
    """Expert servers that together hold the whole model; chosen by the test."""

    split: Literal["tensor", "expert"]
    shares: tuple[int, ...]

    def __str__(self) -> str:
        """For test names: `tensor-1-2-1`."""
        return "-".join([self.split, *map(str, self.shares)])


@dataclass(frozen=True)
class RunningFleet:
    """Filled by `running_fleet`; `config` is what gpu_service would get."""

    config: MoebiusConfig
    geometry: MoeGeometry

    @contextmanager
    def client(self, transport: Transport) -> Iterator[ExpertClient]:
        """A client once every server computes. At most one mailbox client in a fleet's life."""
        config = with_experts(self.config, expert_transport=transport)
        with closing(make_expert_client(config, self.geometry)) as client:
            client.wait_ready(READY_TIMEOUT_S)
            yield client


def demo_config(top_k: int | None) -> MoebiusConfig:
    """Returns the demo model in fp32, small mailbox slots so that a prefill takes several."""
    model = ModelConfigSection(model=str(demo_checkpoint()), dtype="float32", experts_per_token=top_k)
    experts = ExpertConfig(mailbox_slots=3, mailbox_rows=24, expert_threads=1, mailbox_deadline_ms=60_000)
    return MoebiusConfig(model=model, experts=experts)


def with_experts(config: MoebiusConfig, **changes: object) -> MoebiusConfig:
    """The configuration with other leaves in its experts section."""
    return config.model_copy(update={"experts": config.experts.model_copy(update=changes)})


@contextmanager
def running_fleet(fleet: Fleet, directory: Path, top_k: int | None = None) -> Iterator[RunningFleet]:
    """Create the mailbox, start one process per share, and at the end stop all and remove the mailbox."""
    count = len(fleet.shares)
    addresses = tuple(f"unix:{directory}/expert-{index}.sock" for index in range(count))
    config = with_experts(
        demo_config(top_k),
        mailbox=f"moebius-test-{secrets.token_hex(6)}",
        expert_split=fleet.split,
        split_shares=fleet.shares,
        split_count=count,
        expert_addresses=addresses,
    )
    geometry = read_geometry(config.model.model, top_k)
    with ExitStack() as stack:
        stack.callback(Mailbox.unlink, config.experts.mailbox)
        mailbox = Mailbox.create(config.experts.mailbox, mailbox_geometry(config, geometry))
        for index, address in enumerate(addresses):
            own = with_experts(config, split_index=index, expert_address=address)
            stack.enter_context(server_process(own, directory / f"expert-{index}"))
        yield RunningFleet(config, geometry)
        del mailbox


@contextmanager
def server_process(config: MoebiusConfig, base: Path) -> Iterator[None]:
    """Runs an expert server with the configuration; it must end well on SIGTERM."""
    log = base.with_suffix(".log")
    process = ExpertProcess(config, log)
    try:
        yield
        process.terminate()
        assert process.wait(STOP_TIMEOUT_S) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
