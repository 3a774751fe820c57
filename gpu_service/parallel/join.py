"""From the configuration to a rank's place in its group: rank 0 listens at `rank_address`, the others connect
and say who they are.
"""

from __future__ import annotations

import hashlib
import os
import socket
import ssl
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import structlog
import torch
from torch._C._distributed_c10d import TCPStore

from gpu_service.core.parallel import ParallelContext
from gpu_service.parallel.control import ConnectionLost, RankConnection, RankControl
from gpu_service.parallel.group import ProcessRankGroup, RankGroup, SoloGroup, make_process_groups
from gpu_service.parallel.nccl import set_up
from moebius.config import MoebiusConfig, ParallelConfig
from moebius.errors import PEER_LOST_EXIT, ConfigError, UserError
from moebius.models.identity import changes, identity_parts
from moebius.network.tls import active_tls
from protos import ranks_pb2

_log = structlog.get_logger(__name__)
_PROTOCOL = 5
# How long a connection may take to say what it is; scanners and health checks say nothing.
_HELLO_S = 3.0
_RETRY_S = 0.1
# An address that swallows packets, as that of a Pod that is gone, is not waited for to the end.
_ATTEMPT_S = 10.0


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """What all ranks must agree on; filled from the configuration."""

    rank: int
    size: int
    address: str
    timeout_s: float
    fingerprint: str  # Digest of all settings that every rank must share.
    # Longest wait for all ranks to be there; None: `timeout_s`.
    meet_timeout_s: float | None = None
    # Of the model's files as this rank reads them; empty: not compared.
    identity: str = ""

    @property
    def meet_s(self) -> float:
        """Seconds."""
        return self.timeout_s if self.meet_timeout_s is None else self.meet_timeout_s

    @property
    def host_port(self) -> tuple[str, int]:
        """Raises ConfigError for an address that is not host:port."""
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"rank_address: {self.address!r} is not allowed; allowed: host:port")
        return host.strip("[]"), int(port)


def meet(
    rendezvous: Rendezvous, welcome: ranks_pb2.Welcome
) -> tuple[dict[int, RankConnection], ranks_pb2.Welcome]:
    """Returns this rank's connections, by the other's rank, and rank 0's `welcome` (ignored from other
    ranks).

    Raises UserError when not all ranks are there within the time, or one does not fit.
    """
    if rendezvous.rank == 0:
        return _gather(rendezvous, welcome), welcome
    connection, welcome = _join(rendezvous)
    return {0: connection}, welcome


def _gather(rendezvous: Rendezvous, welcome: ranks_pb2.Welcome) -> dict[int, RankConnection]:
    host, port = rendezvous.host_port
    end = time.monotonic() + rendezvous.meet_s
    connections: dict[int, RankConnection] = {}
    tls = active_tls()
    context = None if tls is None else tls.server_context()
    try:
        listener = socket.create_server((host, port), family=_family(host), backlog=rendezvous.size)
    except OSError as error:
        raise UserError(f"rank_address: cannot listen on {rendezvous.address}: {error.strerror}") from error
    with listener:
        while len(connections) < rendezvous.size - 1:
            listener.settimeout(max(0.0, end - time.monotonic()) or 0.001)
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                missing = [rank for rank in range(1, rendezvous.size) if rank not in connections]
                raise UserError(
                    f"rank {', '.join(map(str, missing))} did not join at {rendezvous.address} within "
                    f"{rendezvous.meet_s:g} s (rank_timeout_s)"
                ) from None
            _admit(rendezvous, RankConnection(accepted, _HELLO_S), connections, context)
    for connection in connections.values():
        connection.send(ranks_pb2.Frame(welcome=welcome))
    return connections


def _admit(
    rendezvous: Rendezvous,
    connection: RankConnection,
    connections: dict[int, RankConnection],
    context: ssl.SSLContext | None,
) -> None:
    """Adds a rank that fits; sends one that does not the reason, and goes on waiting.

    `context`: of TLS, None: plain text.
    """
    try:
        if context is not None:
            connection.secure(context)
        hello = connection.receive_hello()
    except ConnectionLost as error:
        _log.warning("a connection to the ranks' address was no rank", reason=str(error))
        connection.close()
        return
    refusal = _refusal(rendezvous, hello, connections)
    if refusal:
        _log.warning("a rank was refused", reason=refusal)
        connection.try_send(ranks_pb2.Frame(refused=refusal))
        connection.close()
        return
    connection.set_timeout(rendezvous.timeout_s)
    connections[hello.rank] = connection


def _refusal(rendezvous: Rendezvous, hello: ranks_pb2.Hello, connections: dict[int, RankConnection]) -> str:
    """Why a rank may not join; empty: it may."""
    if hello.protocol != _PROTOCOL:
        return f"another version of Moebius (protocol {hello.protocol}; {_PROTOCOL} is spoken here)"
    if hello.size != rendezvous.size:
        return f"it is one of {hello.size} ranks, this group has {rendezvous.size}"
    if not 0 < hello.rank < rendezvous.size:
        return f"rank: {hello.rank} is not allowed; allowed: 1 to {rendezvous.size - 1}"
    if hello.rank in connections:
        return f"rank {hello.rank} has joined already"
    if hello.fingerprint != rendezvous.fingerprint:
        return f"the settings of rank {hello.rank} differ from those of rank 0"
    changed = changes(identity_parts(rendezvous.identity), identity_parts(hello.identity))
    if changed:
        return f"rank {hello.rank} reads other files of the model than rank 0: {changed}"
    return ""


def _join(rendezvous: Rendezvous) -> tuple[RankConnection, ranks_pb2.Welcome]:
    end = time.monotonic() + rendezvous.meet_s
    # Rank 0 answers when the last one is there.
    connection = RankConnection(_connect(rendezvous, end), rendezvous.meet_s)
    hello = ranks_pb2.Hello(
        protocol=_PROTOCOL,
        rank=rendezvous.rank,
        size=rendezvous.size,
        fingerprint=rendezvous.fingerprint,
        identity=rendezvous.identity,
    )
    tls = active_tls()
    try:
        if tls is not None:
            host, _ = rendezvous.host_port
            connection.secure(tls.client_context(), tls.server_name or host)
        connection.send(ranks_pb2.Frame(hello=hello))
        answer = connection.receive()
    except ConnectionLost as error:
        raise UserError(
            f"rank {rendezvous.rank}: rank 0 at {rendezvous.address}: {error} "
            f"(here grpc_tls is {'off' if tls is None else 'on'})"
        ) from error
    kind = answer.WhichOneof("content")
    if kind != "welcome":
        why = answer.refused if kind == "refused" else f"it sent {kind}"
        raise UserError(f"rank {rendezvous.rank} was refused by rank 0 at {rendezvous.address}: {why}")
    connection.set_timeout(rendezvous.timeout_s)
    return connection, answer.welcome


def _connect(rendezvous: Rendezvous, end: float) -> socket.socket:
    """Tries until rank 0 listens: processes start in any order."""
    while True:
        try:
            left = max(0.001, min(_ATTEMPT_S, end - time.monotonic()))
            return socket.create_connection(rendezvous.host_port, timeout=left)
        except OSError as error:
            if time.monotonic() + _RETRY_S > end:
                raise UserError(
                    f"rank {rendezvous.rank}: rank 0 is not reachable at {rendezvous.address} within "
                    f"{rendezvous.meet_s:g} s (rank_timeout_s): {error.strerror or error}"
                ) from error
            time.sleep(_RETRY_S)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


# torch's own limit of a collective, in times of that of heartbeats: a rank may compile kernels inside its
# first steps while the others wait. While requests are served `RankControl.judge_waits` is faster, and names
# the rank.
_COLLECTIVE_PATIENCE = 5
# Settings that ranks of one group may differ in: a rank's own, and what only rank 0 uses.
_OWN_LEAVES = {
    "model": {"identity_file", "sleep_file"},
    "parallel": {"rank", "host_index"},
    # Hosts may leave different RAM for prefixes: the least counts.
    "gpu": {"gpu_metrics_port", "gpu_address", "gpu_threads", "kv_offload_gib"},
}
_OWN_SECTIONS = {"gateway", "supervisor", "telemetry", "security"}


def place_of(settings: ParallelConfig) -> ParallelContext:
    """Returns which part this rank holds, without collectives yet.

    Raises ConfigError for a rank out of range.
    """
    size = settings.num_ranks
    check_hosts(settings)
    if settings.rank >= size:
        raise ConfigError(f"rank: {settings.rank} is not allowed; allowed: 0 to {size - 1}")
    if size > 1 and not settings.rank_address:
        raise ConfigError(f"rank_address: empty, but {size} ranks have to meet; allowed: host:port")
    return ParallelContext.place(settings, settings.rank)


def check_hosts(settings: ParallelConfig) -> None:
    """Raises ConfigError where the ranks cannot be divided over the hosts as is set."""
    hosts = settings.rank_hosts
    if settings.num_ranks % hosts:
        raise ConfigError(
            f"rank_hosts: {settings.num_ranks} ranks cannot be divided equally over {hosts} hosts"
        )
    if settings.host_index >= hosts:
        raise ConfigError(f"host_index: {settings.host_index} is not allowed; allowed: 0 to {hosts - 1}")
    wanted = settings.small_all_reduce
    if hosts > 1 and wanted != "nccl":
        raise ConfigError(f"small_all_reduce: {wanted} is for ranks of one host; allowed with several: nccl")


def end_process(reason: str, own: bool) -> None:
    """The end of a rank whose group is lost: other threads may be inside a collective that never ends."""
    _log.error("the group of ranks ends", reason=reason)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if own else PEER_LOST_EXIT)


def join_group(
    config: MoebiusConfig,
    device: torch.device,
    on_lost: Callable[[str, bool], None] = end_process,
    identity: str = "",
    has_lane: bool = False,
) -> RankGroup:
    """Meets the other ranks and makes the process groups; the null object for one rank.

    `identity` of the model's files as this rank reads them; a rank that reads others is refused. `has_lane`:
    as `make_process_groups`.

    Raises ConfigError for settings that contradict each other, UserError when ranks do not meet in time.
    """
    settings = config.parallel
    place = place_of(settings)
    if place.size == 1:
        return SoloGroup()
    rendezvous = Rendezvous(
        rank=place.rank,
        size=place.size,
        address=settings.rank_address,
        timeout_s=settings.rank_timeout_s,
        fingerprint=_fingerprint(config),
        # Processes of other hosts are started by somebody else, who may have to fetch an image first.
        meet_timeout_s=None if settings.rank_hosts == 1 else config.supervisor.ready_timeout_s,
        identity=identity,
    )
    host, _ = rendezvous.host_port
    set_up(host, settings.rank_hosts)
    listener = _store_listener(host) if place.rank == 0 else None
    own = ranks_pb2.Welcome(store_port=listener.getsockname()[1] if listener is not None else 0)
    connections, welcome = meet(rendezvous, own)
    control = RankControl(place.rank, place.size, connections, settings.rank_timeout_s, on_lost)
    store = _store(host, welcome.store_port, place.size, listener, settings.rank_timeout_s)
    parallel, agreement = make_process_groups(
        place,
        store,
        device,
        settings.rank_timeout_s * _COLLECTIVE_PATIENCE,
        settings.small_all_reduce,
        has_lane,
        control.waits,
    )
    _log.info("joined the group of ranks", rank=place.rank, ranks=place.size, device=str(device))
    return ProcessRankGroup(parallel, control, agreement, device)


def _store_listener(host: str) -> socket.socket:
    """On the ranks' own interface: the store itself would listen on all of them."""
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _store(host: str, port: int, size: int, listener: socket.socket | None, timeout_s: float) -> TCPStore:
    """Returns where process groups exchange addresses; rank 0 serves it."""
    return TCPStore(
        host,
        port,
        size,
        listener is not None,
        timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _fingerprint(config: MoebiusConfig) -> str:
    """Digest of what all ranks must have alike, or their schedulers would part ways."""
    shared = config.model_copy(
        update={
            section: getattr(config, section).model_copy(update=dict.fromkeys(names))
            for section, names in _OWN_LEAVES.items()
        }
    )
    text = shared.model_dump_json(exclude=_OWN_SECTIONS, warnings=False)
    return hashlib.sha256(text.encode()).hexdigest()
