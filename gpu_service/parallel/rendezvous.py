"""How ranks find one another: rank 0 listens at `rank_address`, the others connect and say who they are."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from dataclasses import dataclass

import structlog

from gpu_service.parallel.wire import Connection, Kind, WireError
from moebius.errors import ConfigError, UserError

_log = structlog.get_logger(__name__)
_PROTOCOL = 1
# How long a connection may take to say what it is; scanners and health checks say nothing.
_HELLO_S = 3.0
_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Meeting:
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


def meet(meeting: Meeting, welcome: dict[str, int]) -> tuple[dict[int, Connection], dict[str, int]]:
    """This rank's connections, by the other's rank, and rank 0's `welcome` (ignored from other ranks).

    Raises UserError when not all ranks are there within the time, or one does not fit.
    """
    if meeting.rank == 0:
        return _gather(meeting, welcome), welcome
    connection, told = _join(meeting)
    return {0: connection}, told


def _gather(meeting: Meeting, welcome: dict[str, int]) -> dict[int, Connection]:
    host, port = meeting.host_port
    end = time.monotonic() + meeting.timeout_s
    connections: dict[int, Connection] = {}
    try:
        listener = socket.create_server((host, port), family=_family(host), backlog=meeting.size)
    except OSError as error:
        raise UserError(f"rank_address: can not listen on {meeting.address}: {error.strerror}") from error
    with listener:
        while len(connections) < meeting.size - 1:
            listener.settimeout(max(0.0, end - time.monotonic()) or 0.001)
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                missing = [rank for rank in range(1, meeting.size) if rank not in connections]
                raise UserError(
                    f"rank {', '.join(map(str, missing))} did not join at {meeting.address} within "
                    f"{meeting.timeout_s:g} s (rank_timeout_s)"
                ) from None
            _admit(meeting, Connection(accepted, _HELLO_S), connections)
    for connection in connections.values():
        connection.send_json(Kind.WELCOME, welcome)
    return connections


def _admit(meeting: Meeting, connection: Connection, connections: dict[int, Connection]) -> None:
    """Adds a rank that fits; tells one that does not why, and goes on waiting."""
    try:
        kind, payload = connection.receive()
        hello = json.loads(payload) if kind is Kind.HELLO else None
    except (WireError, ValueError) as error:
        _log.warning("a connection to the ranks' address was no rank", reason=str(error))
        connection.close()
        return
    refusal = _refusal(meeting, hello, connections)
    if refusal:
        _log.warning("a rank was refused", reason=refusal)
        with contextlib.suppress(WireError):  # it may be gone; that changes nothing
            connection.send_json(Kind.REFUSED, refusal)
        connection.close()
        return
    assert isinstance(hello, dict)
    connection.set_timeout(meeting.timeout_s)
    connections[int(hello["rank"])] = connection


def _refusal(meeting: Meeting, hello: object, connections: dict[int, Connection]) -> str:
    """Why a rank may not join; empty: it may."""
    if not isinstance(hello, dict) or hello.get("protocol") != _PROTOCOL:
        return f"another version of Moebius (protocol {_PROTOCOL} is spoken here)"
    rank = hello.get("rank")
    if hello.get("size") != meeting.size:
        return f"it is one of {hello.get('size')} ranks, this group has {meeting.size}"
    if not isinstance(rank, int) or not 0 < rank < meeting.size:
        return f"rank: {rank!r} is not allowed; allowed: 1 to {meeting.size - 1}"
    if rank in connections:
        return f"rank {rank} has joined already"
    if hello.get("fingerprint") != meeting.fingerprint:
        return f"the settings of rank {rank} differ from those of rank 0"
    return ""


def _join(meeting: Meeting) -> tuple[Connection, dict[str, int]]:
    end = time.monotonic() + meeting.timeout_s
    connection = Connection(_connect(meeting, end), meeting.timeout_s)
    hello = {
        "protocol": _PROTOCOL,
        "rank": meeting.rank,
        "size": meeting.size,
        "fingerprint": meeting.fingerprint,
    }
    try:
        connection.send_json(Kind.HELLO, hello)
        kind, payload = connection.receive()
    except WireError as error:
        raise UserError(f"rank {meeting.rank}: rank 0 at {meeting.address}: {error}") from error
    if kind is not Kind.WELCOME:
        why = json.loads(payload) if kind is Kind.REFUSED else f"it sent {kind.name}"
        raise UserError(f"rank {meeting.rank} was refused by rank 0 at {meeting.address}: {why}")
    welcome: dict[str, int] = json.loads(payload)
    return connection, welcome


def _connect(meeting: Meeting, end: float) -> socket.socket:
    """Tries until rank 0 listens: processes start in any order."""
    while True:
        try:
            return socket.create_connection(meeting.host_port, timeout=max(0.001, end - time.monotonic()))
        except OSError as error:
            if time.monotonic() + _RETRY_S > end:
                raise UserError(
                    f"rank {meeting.rank}: rank 0 is not reachable at {meeting.address} within "
                    f"{meeting.timeout_s:g} s (rank_timeout_s): {error.strerror or error}"
                ) from error
            time.sleep(_RETRY_S)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
