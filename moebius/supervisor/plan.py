"""From the configuration of `moebius serve` to the processes it runs.

Every process gets its settings as one YAML file in the run directory, so what runs is exactly what can be
read there; unix sockets in the same directory connect the processes.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moebius.checkpoint.moe_config import MoeGeometry
from moebius.config import MoebiusConfig, Section
from moebius.config_loader import effective_config
from moebius.errors import ConfigError, StartupError
from moebius.supervisor.cpus import ExpertPlacement, place_experts
from moebius.supervisor.probes import GrpcProbe, HttpProbe
from moebius.supervisor.runfile import clean_up_stale
from moebius.supervisor.spec import Plan, ProcessSpec, Segment, Timing

# sockaddr_un.sun_path holds 108 bytes, the last one zero.
MAX_SOCKET_PATH = 107
ENGINE_HEALTH = "moebius.engine.v1.Engine"
EXPERT_HEALTH = "moebius.expert.v1.Expert"
STOP_GATEWAY, STOP_GPU, STOP_EXPERTS = 0, 1, 2


@dataclass(frozen=True)
class ServePlan:
    """A plan, and where its parts are reached; filled by `make_plan`."""

    plan: Plan
    timing: Timing
    base_url: str
    served_model_name: str
    # gRPC addresses of the expert servers, by share.
    expert_addresses: tuple[str, ...]


def make_plan(config: MoebiusConfig) -> ServePlan:
    """Decides everything about the processes; cleans up what killed predecessors left on the way.

    Raises ConfigError (settings that can not be served), CheckpointError (a model we do not know) and
    StartupError (state directory or port unusable).
    """
    model = MoeGeometry.from_config(config.model.model, config.model.top_k)
    config = _with_port(config)
    state_dir = Path(config.supervisor.state_dir or default_state_dir()).absolute()
    clean_up_stale(state_dir)
    directory = state_dir / f"serve-{config.gateway.port}"
    placements = _placements(config)
    config = _shared_settings(config, directory, len(placements))
    members = [
        (
            "gateway",
            "gateway",
            config,
            HttpProbe(_reachable(config.gateway.host), config.gateway.port, "/ready"),
        ),
        ("gpu", "gpu", config, GrpcProbe(config.gpu.gpu_address, ENGINE_HEALTH)),
    ]
    cpus: dict[str, tuple[int, ...]] = {}
    for index, placement in enumerate(placements):
        own = _expert_settings(config, index, placement)
        name = f"expert-{index}"
        cpus[name] = placement.cpus
        members.append((name, "expert", own, GrpcProbe(own.experts.expert_address, EXPERT_HEALTH)))
    stages = {"gateway": STOP_GATEWAY, "gpu": STOP_GPU, "expert": STOP_EXPERTS}
    processes = tuple(
        ProcessSpec(name, _command(role, directory, name), probe, stages[role], cpus.get(name, ()))
        for name, role, _, probe in reversed(members)
    )
    files = tuple((directory / f"{name}.yaml", effective_config(own)) for name, _, own, _ in members)
    segments = (_mailbox(config, model),) if config.experts.mailbox else ()
    json_logs = config.telemetry.log_format == "json"
    host = _reachable(config.gateway.host)
    return ServePlan(
        plan=Plan(directory, processes, segments, files, json_logs),
        timing=_timing(config),
        base_url=f"http://{f'[{host}]' if ':' in host else host}:{config.gateway.port}",
        served_model_name=config.model.served_model_name,
        expert_addresses=config.experts.expert_addresses,
    )


def default_state_dir() -> Path:
    """`/run/user/UID/moebius` where the system made that directory, else one in the temporary directory."""
    runtime = Path(f"/run/user/{os.getuid()}")
    if runtime.is_dir() and os.access(runtime, os.W_OK):
        return runtime / "moebius"
    return Path(tempfile.gettempdir()) / f"moebius-{os.getuid()}"


def _with_port(config: MoebiusConfig) -> MoebiusConfig:
    """Port 0 becomes a free port, so that every process and the user can be told; a taken one is refused."""
    host = config.gateway.host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, config.gateway.port))
        except OSError as error:
            where = f"{host}:{config.gateway.port}"
            raise StartupError(f"cannot serve HTTP on {where} (--host, --port): {error.strerror}") from None
        port = int(probe.getsockname()[1])
    return _replace(config, "gateway", port=port)


def _reachable(host: str) -> str:
    """An address that reaches a server bound to `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def _placements(config: MoebiusConfig) -> tuple[ExpertPlacement, ...]:
    """One placement per expert server; none when gpu_service computes the experts itself."""
    experts = config.experts
    if experts.expert_transport == "local":
        return ()
    from moebius.topology import Topology

    topology = Topology.detect()
    nodes = {node.id: topology.usable_cpus(node.id) for node in topology.nodes}
    nodes = {node: cpus for node, cpus in nodes.items() if cpus} or {-1: topology.usable_cpus()}
    count = experts.expert_servers or len(nodes)
    if experts.split_shares and len(experts.split_shares) != count:
        raise ConfigError(
            f"--split-shares: {len(experts.split_shares)} shares for {count} expert servers; "
            "allowed: one share per server"
        )
    return place_experts(nodes, count, topology.cpu_quota)


def _shared_settings(config: MoebiusConfig, directory: Path, num_experts: int) -> MoebiusConfig:
    """What all processes agree on: sockets, the mailbox's name, the served name."""
    model = Path(config.model.model).absolute()
    config = _replace(
        config, "model", model=str(model), served_model_name=config.model.served_model_name or model.name
    )
    gpu_address = _socket(directory, "gpu")
    config = _replace(config, "gpu", gpu_address=gpu_address)
    config = _replace(config, "gateway", engine_address=gpu_address)
    addresses = tuple(_socket(directory, f"expert-{index}") for index in range(num_experts))
    wants_mailbox = config.experts.expert_transport == "mailbox"
    mailbox = config.experts.mailbox or f"moebius-{config.gateway.port}-{secrets.token_hex(4)}"
    return _replace(
        config,
        "experts",
        expert_servers=num_experts,
        split_count=max(1, num_experts),
        expert_addresses=addresses,
        mailbox=mailbox if wants_mailbox else "",
    )


def _expert_settings(config: MoebiusConfig, index: int, placement: ExpertPlacement) -> MoebiusConfig:
    """The settings of one expert server."""
    experts = config.experts
    port = experts.expert_metrics_port
    return _replace(
        config,
        "experts",
        split_index=index,
        expert_address=experts.expert_addresses[index],
        numa_node=placement.numa_node if experts.numa_node < 0 else experts.numa_node,
        expert_threads=experts.expert_threads or placement.threads,
        expert_metrics_port=port + index if port else 0,
    )


def _mailbox(config: MoebiusConfig, model: MoeGeometry) -> Segment:
    """The shared memory between gpu_service and the expert servers; created here so that it outlives both."""
    name = config.experts.mailbox

    def create() -> object:
        from moebius.mailbox import Mailbox
        from moebius.mailbox_plan import mailbox_geometry

        return Mailbox.create(name, mailbox_geometry(config, model))

    return Segment(name, create)


def _socket(directory: Path, name: str) -> str:
    path = directory / f"{name}.sock"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"--state-dir: the socket path {path} is longer than {MAX_SOCKET_PATH} bytes; "
            "allowed: a directory with a shorter name"
        )
    return f"unix:{path}"


def _command(role: str, directory: Path, name: str) -> tuple[str, ...]:
    settings = str(directory / f"{name}.yaml")
    # `moebius serve` has printed the configuration already.
    return (sys.executable, "-m", "moebius", role, "--config", settings, "--no-show-config")


def _timing(config: MoebiusConfig) -> Timing:
    settings = config.supervisor
    return Timing(
        ready_timeout_s=settings.ready_timeout_s,
        restart_backoff_s=settings.restart_backoff_s,
        restart_backoff_max_s=settings.restart_backoff_max_s,
        stop_timeout_s=settings.stop_timeout_s,
    )


def _replace(config: MoebiusConfig, section: str, **values: object) -> MoebiusConfig:
    """The configuration with some leaves of one section set; values are of the leaves' types."""
    old: Section = getattr(config, section)
    return config.model_copy(update={section: old.model_copy(update=values)})


def process_names(plan: Plan) -> Sequence[str]:
    """Names for a progress display, in the order a request meets them."""
    return [spec.name for spec in reversed(plan.processes)]
