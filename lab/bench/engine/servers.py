"""Expert servers for a benchmark, started, watched and stopped by the supervisor's own parts."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.exits import ENDING
from app.supervisor.plan import plan_processes
from app.supervisor.process import ManagedProcess
from app.supervisor.supervisor import Supervisor
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from moebius.mailbox import Mailbox
from moebius.network.tls import configure_tls

# What the engine in this process stands for: its own process in a plan, and the one in front of it.
_NOT_STARTED = ("gateway", "gpu", "gpu-0")
TIMEOUT_S = 10.0
WATCH_S = 0.5


@dataclass(frozen=True)
class ServerCounters:
    """One server's counters at one moment; filled by `ExpertServers.counters`. By MoE layer."""

    calls: dict[int, int]
    # Experts with at least one row, summed over calls.
    experts: dict[int, int]
    busy_seconds: float
    expert_rows: dict[int, tuple[int, ...]]  # Rows that each expert computed, `[num_experts]`.


@dataclass(frozen=True)
class ServerInfo:
    """What one server holds; filled by `ExpertServers.info`."""

    packed_bytes: int
    num_threads: int
    isa: str
    num_experts: int  # Experts of every layer that it has at least a slice of.


@dataclass(frozen=True)
class ExpertServers:
    """Running servers; filled by `running_servers`. `config` is what the engine is built with."""

    config: MoebiusConfig

    @property
    def addresses(self) -> Sequence[str]:
        """The gRPC addresses of all servers, by share; empty when the engine computes experts itself."""
        return self.config.experts.expert_addresses

    def counters(self) -> list[ServerCounters]:
        """Returns the present counters of every server."""
        return [self._ask(address, "Stats", _counters) for address in self.addresses]

    def info(self) -> list[ServerInfo]:
        """Returns what every server says of itself."""
        return [self._ask(address, "Info", _info) for address in self.addresses]

    def _ask(self, address: str, method: str, read: Callable[[Any], Any]) -> Any:
        import grpc

        from moebius.network.grpc_channels import open_channel
        from protos import expert_pb2, expert_pb2_grpc

        make_stub: Callable[[grpc.Channel], Any] = expert_pb2_grpc.ExpertStub
        request = getattr(expert_pb2, f"{method}Request")()
        options = [("grpc.max_receive_message_length", -1)]
        with open_channel(address, options) as channel:
            try:
                return read(getattr(make_stub(channel), method)(request, timeout=TIMEOUT_S))
            except grpc.RpcError as error:
                raise UserError(f"expert server at {address} does not answer: {error.details()}") from None


def _counters(answer: Any) -> ServerCounters:
    return ServerCounters(
        {layer.layer: layer.calls for layer in answer.layers},
        {layer.layer: layer.experts for layer in answer.layers},
        answer.busy_seconds,
        {layer.layer: tuple(layer.expert_rows) for layer in answer.layers},
    )


def _info(answer: Any) -> ServerInfo:
    held = answer.expert_end - answer.expert_begin
    return ServerInfo(answer.packed_bytes, answer.num_threads, answer.isa, held)


@contextlib.contextmanager
def running_servers(config: MoebiusConfig) -> Iterator[ExpertServers]:
    """Yields everything of `moebius serve` but gateway and the engine's first rank; stopped at the end.

    From the main thread only. Raises StartupError, ConfigError, CheckpointError as `moebius serve` does.
    """
    configure_tls(config.security)
    with tempfile.TemporaryDirectory(prefix="moebius-bench-") as directory:
        config = _own_state(config, Path(directory))
        serve_plan = plan_processes(config)
        processes = tuple(spec for spec in serve_plan.plan.processes if spec.name not in _NOT_STARTED)
        plan = replace(serve_plan.plan, processes=processes)
        # The supervisor only notes signals, for a loop that looks; a benchmark has to be left.
        earlier = {number: signal.getsignal(number) for number in ENDING}
        with Supervisor(plan, serve_plan.timing) as supervisor:
            for number, handler in earlier.items():
                signal.signal(number, handler)
            # Other ranks are ready only together with the first one, which is built here afterwards.
            experts = [process for process in supervisor.processes if process.spec.name.startswith("expert")]
            if len(experts) == len(processes):
                supervisor.wait_ready()
            # A rank that ends is noticed by the others, and all end with the first one.
            with _watched(experts, [segment.name for segment in plan.segments]):
                yield ExpertServers(serve_plan.config)


@contextlib.contextmanager
def _watched(processes: Sequence[ManagedProcess], segments: Sequence[str]) -> Iterator[None]:
    """Ends this process when one of the others ends: they are not restarted, and an engine waits for long."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(WATCH_S):
            for process in processes:
                if process.exit_code is not None:
                    print(f"{process.spec.name} ended: {process.last_words}", file=sys.stderr, flush=True)
                    for name in segments:
                        Mailbox.unlink(name)
                    # The main thread may wait in a call that no signal reaches; children end with us.
                    os._exit(1)

    thread = threading.Thread(target=watch, name="watch-servers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _own_state(config: MoebiusConfig, directory: Path) -> MoebiusConfig:
    """Returns a state directory and a port that collide with no server of the same user; warnings only."""
    supervisor = config.supervisor
    if not supervisor.state_dir:
        supervisor = supervisor.model_copy(update={"state_dir": str(directory)})
    gateway = config.gateway.model_copy(update={"port": 0})
    # The table is what is asked for, not the life of the servers.
    telemetry = config.telemetry.model_copy(update={"log_level": "warning"})
    return config.model_copy(update={"supervisor": supervisor, "gateway": gateway, "telemetry": telemetry})
