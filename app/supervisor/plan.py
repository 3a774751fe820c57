"""From the configuration of `moebius serve` to the processes it runs.

Every process gets its settings as one YAML file in the run directory, so what runs is exactly what can be
read there; unix sockets in the same directory connect the processes.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from app.doctor.facts import read_volume
from app.problems import Problems
from app.supervisor.batch_directory import batch_directory
from app.supervisor.cold_experts import with_cold_experts
from app.supervisor.core_claims import CoreClaims
from app.supervisor.core_division import HostCores, divided_cores, known_cores
from app.supervisor.expert_placement import ServerBinding, place_experts
from app.supervisor.health import (
    GrpcProbe,
    HttpProbe,
    Liveness,
    MailboxLiveness,
    Plan,
    Probe,
    ProcessSpec,
    Segment,
    Timing,
)
from app.supervisor.placement import (
    RankBinding,
    find_gpus,
    place_ranks,
    rank_address,
    rank_settings,
    refuse_data_parallel,
    runs_on_gpus,
)
from app.supervisor.prefix_memory import with_prefix_memory, with_prefix_memory_of_engine
from app.supervisor.runfile import SHARED_MEMORY, clean_up_stale, own_state_directory
from app.supervisor.shortages import refuse_shortages, shared_memory_shortage
from app.supervisor.tables import with_tables
from app.supervisor.weight_files import WeightFile, free_reserved_bytes
from moebius.checkpoint.gguf.files import served_name
from moebius.config import MoebiusConfig, Section
from moebius.config.loader import effective_config
from moebius.errors import ConfigError, StartupError
from moebius.kernels.weight_segment import segment_path
from moebius.kv_tiers import ram_tier_path
from moebius.mailbox.plan import mailbox_names
from moebius.models.geometry import MoeGeometry
from moebius.models.served import read_served_geometry
from moebius.network.tls import http_files

_log = structlog.get_logger(__name__)
# sockaddr_un.sun_path holds 108 bytes, the last one zero.
MAX_SOCKET_PATH = 107
ENGINE_HEALTH = "moebius.engine.v1.Engine"
EXPERT_HEALTH = "moebius.expert.v1.Expert"
# In the run directory: what the processes have read. It goes with the supervisor.
IDENTITY_FILE = "identity.json"
# There, too: exists while the engine sleeps.
SLEEP_FILE = "asleep.json"
# A process drains for `stop_timeout_s`; then it tells whom it cannot serve, and closes what it has open.
STOP_MARGIN_S = 10.0
# Rank 0 tells the other ranks to end, in order, before anybody else does.
STOP_GATEWAY, STOP_GPU, STOP_RANKS, STOP_EXPERTS = 0, 1, 2, 3


@dataclass(frozen=True)
class ServePlan:
    """A plan, and where its parts are reached; filled by `plan_processes`."""

    plan: Plan
    timing: Timing
    base_url: str
    # What all processes share; each adds its own share and CPUs.
    config: MoebiusConfig
    # Expert servers of this host; and what keeps other instances from their cores while this plan lives.
    servers: tuple[ServerBinding, ...] = ()
    claims: CoreClaims | None = None


def plan_processes(config: MoebiusConfig) -> ServePlan:
    """Decides everything about the processes; cleans up what killed predecessors left on the way.

    Raises ConfigError (settings that cannot be served), CheckpointError (a model we do not know) and
    StartupError (state directory or port unusable, or a host that is too small); of a port and what the host
    lacks all at once.
    """
    model = read_served_geometry(config)
    refuse_data_parallel(config)
    chosen = config.supervisor.state_dir
    state_dir = own_state_directory(Path(chosen).absolute() if chosen else default_state_dir())
    # Before the port is tried: what a killed supervisor left may still hold it.
    clean_up_stale(state_dir)
    problems = Problems()
    with problems.collected():
        config = _with_port(config)
    directory = state_dir / f"serve-{config.gateway.port}"
    measures = _num_engines_on_gpus(config) > 0 and _starts_servers(config, model)
    with divided_cores(config.experts, measures) as division:
        cores, given = division.cores, config
        placements = expert_placements(config, model, cores)
        config = with_cold_experts(_shared_settings(config, directory, len(placements)), given, model)
        config = with_tables(with_prefix_memory(config, given, model), given, model)
        with problems.collected():
            refuse_shortages(given, config, model)
        problems.refuse()
        claims = division.hold(f"port {config.gateway.port} (pid {os.getpid()})", placements)
    members = _members(config, placements, place_ranks(config, find_gpus(), cores.nodes))
    return ServePlan(
        plan=Plan(
            directory=directory,
            processes=tuple(_process(member, directory) for member in members),
            segments=tuple(_mailbox(config, model, name) for name in mailbox_names(config)),
            weights=_weight_files(config, model, directory, placements),
            prefixes=_prefix_files(config, directory),
            files=tuple(
                (_settings_file(member, directory), effective_config(member.config)) for member in members
            ),
            json_logs=config.telemetry.log_format == "json",
        ),
        timing=_timing(config),
        base_url=base_url(config),
        config=config,
        servers=placements,
        claims=claims,
    )


def plan_ranks(config: MoebiusConfig) -> ServePlan:
    """Returns the ranks of this host alone (`moebius ranks`), for a Pod or a host whose other processes
    others start.

    Raises ConfigError for what ranks would refuse, StartupError for a state directory that cannot be used.
    """
    settings = config.parallel
    if settings.data_parallel_size > 1:
        raise ConfigError("data_parallel_size: `moebius serve` starts several engines, `ranks` those of one")
    if settings.num_ranks % settings.rank_hosts or settings.host_index >= settings.rank_hosts:
        raise ConfigError(
            f"{settings.num_ranks} ranks, rank_hosts {settings.rank_hosts} and host_index "
            f"{settings.host_index} do not fit: hosts have equally many ranks, and are numbered from 0"
        )
    chosen = config.supervisor.state_dir
    state_dir = own_state_directory(Path(chosen).absolute() if chosen else default_state_dir())
    clean_up_stale(state_dir)
    config = _replace(config, "parallel", rank=0, rank_address=rank_address(config))
    own, port = config.gpu.gpu_address, config.gpu.gpu_address.rpartition(":")[2]
    leader = own if settings.host_index == 0 else f"{config.parallel.rank_address.rpartition(':')[0]}:{port}"
    directory = state_dir / f"ranks-{settings.host_index}-{Path(port).stem}"
    config = _replace(
        config,
        "model",
        identity_file=config.model.identity_file or str(directory / IDENTITY_FILE),
        sleep_file=config.model.sleep_file or str(directory / SLEEP_FILE),
    )
    config = with_prefix_memory_of_engine(config)
    ranks = place_ranks(config, find_gpus(), known_cores(config.experts).nodes)
    probe = GrpcProbe(leader, ENGINE_HEALTH)
    members = [_rank_member(rank_settings(config, placed), placed, probe, "ranks") for placed in ranks]
    return ServePlan(
        plan=Plan(
            directory=directory,
            processes=tuple(
                replace(_process(member, directory), ends_with_leader=settings.host_index > 0)
                for member in members
            ),
            files=tuple(
                (_settings_file(member, directory), effective_config(member.config)) for member in members
            ),
            json_logs=config.telemetry.log_format == "json",
        ),
        timing=_timing(config),
        base_url="",
        config=config,
    )


@dataclass(frozen=True)
class _Member:
    """One process before it is a command line; filled by `_members`."""

    name: str
    # The `moebius` command it runs.
    role: str
    config: MoebiusConfig
    probe: Probe
    stop_stage: int
    cpus: tuple[int, ...] = ()
    group: str = ""
    liveness: Liveness | None = None


def _members(
    config: MoebiusConfig, placements: Sequence[ServerBinding], ranks: Sequence[RankBinding]
) -> list[_Member]:
    """Returns all processes in the order of their start: those that load most first."""
    members = []
    for index, placement in enumerate(placements):
        own = _expert_settings(config, index, placement)
        probe = GrpcProbe(own.experts.expert_address, EXPERT_HEALTH)
        mailbox = config.experts.mailbox
        life: Liveness | None = MailboxLiveness(mailbox, index, probe) if mailbox else probe
        name = f"expert-{index}"
        members.append(_Member(name, "expert", own, probe, STOP_EXPERTS, placement.cpus, liveness=life))
    # Rank 0 is ready once a step has gone through all ranks.
    group = "ranks" if config.parallel.num_ranks > 1 else ""
    for placed in ranks:
        own = rank_settings(config, placed)
        probe = GrpcProbe(own.gpu.gpu_address, ENGINE_HEALTH)
        members.append(_rank_member(own, placed, probe, group))
    host, port = _reachable(config.gateway.host), config.gateway.port
    if config.gateway.gateway_metrics_port:
        host, port = _reachable(config.telemetry.metrics_host), config.gateway.gateway_metrics_port
    ready, alive = HttpProbe(host, port, "/ready"), HttpProbe(host, port, "/health")
    return [*members, _Member("gateway", "gateway", config, ready, STOP_GATEWAY, liveness=alive)]


def _rank_member(own: MoebiusConfig, placed: RankBinding, engine_probe: GrpcProbe, group: str) -> _Member:
    stage = STOP_RANKS if placed.rank else STOP_GPU
    # The other ranks answer no probe; that one of them is silent is noticed by the group.
    life = None if placed.rank else engine_probe
    return _Member(placed.name, "gpu", own, engine_probe, stage, placed.cpus, group, life)


def _process(member: _Member, directory: Path) -> ProcessSpec:
    settings = str(_settings_file(member, directory))
    command = (sys.executable, "-P", "-m", "moebius", member.role, "--config", settings)
    return ProcessSpec(
        member.name,
        command,
        member.probe,
        member.stop_stage,
        member.cpus,
        member.group,
        member.liveness,
    )


def _settings_file(member: _Member, directory: Path) -> Path:
    return directory / f"{member.name}.yaml"


def default_state_dir() -> Path:
    """`/run/user/UID/moebius` where the system made that directory, else one in the temporary directory.

    Raises StartupError when there is neither.
    """
    runtime = Path(f"/run/user/{os.getuid()}")
    if runtime.is_dir() and os.access(runtime, os.W_OK):
        return runtime / "moebius"
    try:
        return Path(tempfile.gettempdir()) / f"moebius-{os.getuid()}"
    except FileNotFoundError:
        raise StartupError(
            "there is no temporary directory that can be written; give a directory with --state-dir"
        ) from None


def _with_port(config: MoebiusConfig) -> MoebiusConfig:
    """Port 0 becomes a free port, which every process and the user get; a taken one is refused."""
    host = config.gateway.host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, config.gateway.port))
        except OSError as error:
            where = f"{host}:{config.gateway.port}"
            out = "; --port 0 takes a free one" if error.errno == errno.EADDRINUSE else ""
            reason = f"{error.strerror}{out}"
            raise StartupError(f"cannot serve HTTP on {where} (--host, --port): {reason}") from None
        port = int(probe.getsockname()[1])
    config = _replace(config, "gateway", port=port)
    if http_files(config.security) is not None and not config.gateway.gateway_metrics_port:
        # Our own probes bring no certificate.
        where = config.telemetry.metrics_host
        own_port = _free_port(where)
        config = _replace(config, "gateway", gateway_metrics_port=own_port)
        url = f"http://{_bracketed(where)}:{own_port}/metrics"
        _log.info("with HTTPS metrics and probes have a port of their own (gateway_metrics_port)", url=url)
    return config


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def base_url(config: MoebiusConfig) -> str:
    """Returns where clients on this host reach the gateway."""
    scheme = "http" if http_files(config.security) is None else "https"
    return f"{scheme}://{_bracketed(_reachable(config.gateway.host))}:{config.gateway.port}"


def _bracketed(host: str) -> str:
    """Returns an address as URLs have it."""
    return f"[{host}]" if ":" in host else host


def _reachable(host: str) -> str:
    """Returns an address that reaches a server bound to `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def expert_placements(
    config: MoebiusConfig, model: MoeGeometry, cores: HostCores
) -> tuple[ServerBinding, ...]:
    """Returns one placement per expert server that `serve` starts on this host, which has `cores` for it.

    None where `_starts_servers` says so. Raises ConfigError for shares that do not fit.
    """
    return place_servers(config, cores) if _starts_servers(config, model) else ()


def _starts_servers(config: MoebiusConfig, model: MoeGeometry) -> bool:
    """Returns False where gpu_service computes the experts itself, or reaches servers that somebody else
    started.

    Raises ConfigError for addresses that are not used.
    """
    if _is_all_resident(config, model):
        return False
    experts = config.experts
    if experts.expert_addresses and experts.expert_transport != "grpc":
        raise ConfigError(
            "--expert-addresses names servers that run elsewhere; allowed with --expert-transport grpc only"
        )
    return experts.expert_transport != "local" and not experts.expert_addresses


def place_servers(config: MoebiusConfig, cores: HostCores) -> tuple[ServerBinding, ...]:
    """Returns the places of expert servers: as many servers as are set, else one per NUMA node.

    Raises ConfigError for shares that do not fit.
    """
    experts = config.experts
    count = experts.expert_servers or len(cores.nodes)
    if experts.split_shares and len(experts.split_shares) != count:
        raise ConfigError(
            f"--split-shares: {len(experts.split_shares)} shares for {count} expert servers; "
            "allowed: one share per server"
        )
    engines = _num_engines_on_gpus(config)
    return place_experts(cores.nodes, count, cores.quota, engines, experts.expert_threads)


def _num_engines_on_gpus(config: MoebiusConfig) -> int:
    settings = config.parallel
    on_gpus = runs_on_gpus(config, find_gpus())
    return settings.num_ranks * settings.data_parallel_size if on_gpus else 0


def _is_all_resident(config: MoebiusConfig, model: MoeGeometry) -> bool:
    """Returns whether the engine computes every expert itself.

    Raises UserError for a placement that cannot be.
    """
    from moebius.experts.placement import make_placement

    return make_placement(config.placement, model).covers_everything


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path else ""


def _shared_settings(config: MoebiusConfig, directory: Path, num_experts: int) -> MoebiusConfig:
    """Returns what all processes agree on: sockets, the mailbox's name, the served name."""
    model = Path(config.model.model).absolute()
    config = _replace(
        config,
        "model",
        model=str(model),
        identity_file=config.model.identity_file or str(directory / IDENTITY_FILE),
        sleep_file=config.model.sleep_file or str(directory / SLEEP_FILE),
        expert_checkpoint=_absolute(config.model.expert_checkpoint),
        served_model_name=config.model.served_model_name or served_name(model),
    )
    gpu_address = _socket(directory, "gpu")
    kept = config.gpu.kv_offload_dir or str(directory)
    head = _absolute(config.gpu.speculative_model)
    config = _replace(config, "gpu", gpu_address=gpu_address, kv_offload_dir=kept, speculative_model=head)
    config = _replace(config, "parallel", rank=0, rank_address=rank_address(config))
    numbers = range(1, config.parallel.data_parallel_size)
    others = tuple(_socket(directory, f"gpu-{number}") for number in numbers)
    config = _replace(
        config,
        "gateway",
        engine_address=gpu_address,
        engines=(gpu_address, *others) if others else config.gateway.engines,
        stored_responses_dir=config.gateway.stored_responses_dir or str(directory),
        batch_dir=batch_directory(config.gateway.batch_dir, config.model.served_model_name),
    )
    addresses = tuple(_socket(directory, f"expert-{index}") for index in range(num_experts))
    addresses = addresses or config.experts.expert_addresses
    wants_mailbox = config.experts.expert_transport == "mailbox" and num_experts > 0
    mailbox = config.experts.mailbox or f"moebius-{config.gateway.port}-{secrets.token_hex(4)}"
    return _replace(
        config,
        "experts",
        expert_servers=num_experts,
        split_count=max(1, len(addresses)),
        expert_addresses=addresses,
        mailbox=mailbox if wants_mailbox else "",
        expert_weights_dir=config.experts.expert_weights_dir or (str(directory) if num_experts else ""),
    )


def _expert_settings(config: MoebiusConfig, index: int, placement: ServerBinding) -> MoebiusConfig:
    """Returns the settings of one expert server."""
    experts = config.experts
    port = experts.expert_metrics_port
    shares = experts.split_shares or (1,) * experts.split_count
    return _replace(
        config,
        "experts",
        split_index=index,
        expert_address=experts.expert_addresses[index],
        numa_node=_server_node(config, placement),
        expert_threads=placement.threads,
        expert_memory_gib=experts.expert_memory_gib * shares[index] / sum(shares),
        expert_metrics_port=port + index if port else 0,
    )


def _server_node(config: MoebiusConfig, placement: ServerBinding) -> int:
    """What was set for all servers, or the place that was found for this one."""
    node = config.experts.numa_node
    return placement.numa_node if isinstance(node, str) or node < 0 else node


def _weight_files(
    config: MoebiusConfig, model: MoeGeometry, directory: Path, placements: Sequence[ServerBinding]
) -> tuple[WeightFile, ...]:
    """Returns the memory for every server's packed experts; none where the user gave a directory for it."""
    if config.experts.expert_weights_dir != str(directory):
        return ()
    sizes = [0] * len(placements)
    # Only then does it matter how much it will be, which takes a look at the checkpoint's headers.
    if placements and free_reserved_bytes() > 0:
        from app.planning.memory import segment_bytes

        sizes = segment_bytes(config, model, len(placements))
    return tuple(
        WeightFile(
            segment_path(str(directory), index),
            nbytes,
            _server_node(config, placement),
        )
        for index, (placement, nbytes) in enumerate(zip(placements, sizes, strict=True))
    )


def _prefix_files(config: MoebiusConfig, directory: Path) -> tuple[WeightFile, ...]:
    """Returns the memory for each engine's prefixes in RAM; none where the user gave a directory for it, or
    wants none, and for several ranks, whose parts end with them.
    """
    wants = config.gpu.kv_offload_bytes > 0 and config.parallel.num_ranks == 1
    if config.gpu.kv_offload_dir != str(directory) or not wants:
        return ()
    engines = range(config.parallel.data_parallel_size)
    return tuple(WeightFile(ram_tier_path(str(directory), engine), 0, -1) for engine in engines)


def _mailbox(config: MoebiusConfig, model: MoeGeometry, name: str) -> Segment:
    """Returns the shared memory between an engine and the expert servers; created here so that it outlives
    both.
    """

    def create() -> object:
        from moebius.mailbox import Mailbox, MailboxError
        from moebius.mailbox.plan import mailbox_geometry

        geometry = mailbox_geometry(config, model)
        try:
            return Mailbox.create(name, geometry)
        except MailboxError as error:
            found = read_volume(SHARED_MEMORY)
            shortage = shared_memory_shortage(geometry.regions().total, found, str(error))
            raise StartupError(str(shortage)) from None

    return Segment(name, create)


def _socket(directory: Path, name: str) -> str:
    path = directory / f"{name}.sock"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"--state-dir: the socket path {path} is longer than {MAX_SOCKET_PATH} bytes; "
            "allowed: a directory with a shorter name"
        )
    return f"unix:{path}"


def _timing(config: MoebiusConfig) -> Timing:
    settings = config.supervisor
    return Timing(
        ready_timeout_s=settings.ready_timeout_s,
        restart_backoff_s=settings.restart_backoff_s,
        restart_backoff_max_s=settings.restart_backoff_max_s,
        stop_timeout_s=settings.stop_timeout_s + STOP_MARGIN_S,
        hang_timeout_s=settings.hang_timeout_s,
    )


def _replace(config: MoebiusConfig, section: str, **values: object) -> MoebiusConfig:
    """The configuration with some leaves of one section set; values are of the leaves' types."""
    old: Section = getattr(config, section)
    return config.model_copy(update={section: old.model_copy(update=values)})


def process_names(plan: Plan) -> Sequence[str]:
    """Names for a progress display, in the order a request meets them."""
    return [spec.name for spec in reversed(plan.processes)]
