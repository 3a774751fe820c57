"""The messages between the first gateway process and the others, and the port that they share."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from gateway.telemetry.combined import Samples
from moebius.config import MoebiusConfig
from moebius.model_identity import Parts

HEARTBEAT_S = 1.0  # between two heartbeats


@dataclass(frozen=True)
class MemberSetup:
    """The first message to a process; filled by `group.py`."""

    config: MoebiusConfig  # with the port that all of them share
    index: int  # its place in `Places`
    count: int  # number of places
    places: int  # descriptor of the places' memory
    listens_when_ready: bool  # another process serves meanwhile
    files: Parts = field(default_factory=dict)  # digests of the files that all processes must read


@dataclass(frozen=True)
class Heartbeat:
    """A heartbeat; filled by `member.py`."""

    is_ready: bool  # the model is known: requests can be answered
    samples: Samples | None  # in some beats: its counters
    refusal: str = ""  # changed model files that keep it, or parts of it, from serving


def bound_socket(host: str, port: int) -> socket.socket:
    """Returns a socket on the common port: the kernel distributes new connections among those that listen."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind((host, port))
    return made
