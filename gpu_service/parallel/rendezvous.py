"""How ranks find one another: rank 0 listens at `rank_address`, the others connect and say who they are."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

import structlog

from gpu_service.parallel.connection import ConnectionLost, RankConnection
from moebius.errors import ConfigError, UserError
from protos import ranks_pb2

_log = structlog.get_logger(__name__)
_PROTOCOL = 2
# How long a connection may take to say what it is; scanners and health checks say nothing.
_HELLO_S = 3.0
_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """What all ranks must agree on; filled from the configuration."""

    rank: int
    size: int
    address: str
    timeout_s: float
    # Digest of all settings that every rank must share.
    fingerprint: str

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
    """This rank's connections, by the other's rank, and rank 0's `welcome` (ignored from other ranks).

    Raises UserError when not all ranks are there within the time, or one does not fit.
    """
    if rendezvous.rank == 0:
        return _gather(rendezvous, welcome), welcome
    connection, welcome = _join(rendezvous)
    return {0: connection}, welcome


def _gather(rendezvous: Rendezvous, welcome: ranks_pb2.Welcome) -> dict[int, RankConnection]:
    host, port = rendezvous.host_port
    end = time.monotonic() + rendezvous.timeout_s
    connections: dict[int, RankConnection] = {}
    try:
        listener = socket.create_server((host, port), family=_family(host), backlog=rendezvous.size)
    except OSError as error:
        raise UserError(f"rank_address: can not listen on {rendezvous.address}: {error.strerror}") from error
    with listener:
        while len(connections) < rendezvous.size - 1:
            listener.settimeout(max(0.0, end - time.monotonic()) or 0.001)
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                missing = [rank for rank in range(1, rendezvous.size) if rank not in connections]
                raise UserError(
                    f"rank {', '.join(map(str, missing))} did not join at {rendezvous.address} within "
                    f"{rendezvous.timeout_s:g} s (rank_timeout_s)"
                ) from None
            _admit(rendezvous, RankConnection(accepted, _HELLO_S), connections)
    for connection in connections.values():
        connection.send(ranks_pb2.Frame(welcome=welcome))
    return connections


def _admit(
    rendezvous: Rendezvous, connection: RankConnection, connections: dict[int, RankConnection]
) -> None:
    """Adds a rank that fits; tells one that does not why, and goes on waiting."""
    try:
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
    return ""


def _join(rendezvous: Rendezvous) -> tuple[RankConnection, ranks_pb2.Welcome]:
    end = time.monotonic() + rendezvous.timeout_s
    connection = RankConnection(_connect(rendezvous, end), rendezvous.timeout_s)
    hello = ranks_pb2.Hello(
        protocol=_PROTOCOL, rank=rendezvous.rank, size=rendezvous.size, fingerprint=rendezvous.fingerprint
    )
    try:
        connection.send(ranks_pb2.Frame(hello=hello))
        answer = connection.receive()
    except ConnectionLost as error:
        raise UserError(f"rank {rendezvous.rank}: rank 0 at {rendezvous.address}: {error}") from error
    kind = answer.WhichOneof("content")
    if kind != "welcome":
        why = answer.refused if kind == "refused" else f"it sent {kind}"
        raise UserError(f"rank {rendezvous.rank} was refused by rank 0 at {rendezvous.address}: {why}")
    return connection, answer.welcome


def _connect(rendezvous: Rendezvous, end: float) -> socket.socket:
    """Tries until rank 0 listens: processes start in any order."""
    while True:
        try:
            return socket.create_connection(rendezvous.host_port, timeout=max(0.001, end - time.monotonic()))
        except OSError as error:
            if time.monotonic() + _RETRY_S > end:
                raise UserError(
                    f"rank {rendezvous.rank}: rank 0 is not reachable at {rendezvous.address} within "
                    f"{rendezvous.timeout_s:g} s (rank_timeout_s): {error.strerror or error}"
                ) from error
            time.sleep(_RETRY_S)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
