"""What the first gateway process and the others say to one another, and the port that they share."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from gateway.workers.metrics import Samples
from moebius.config import MoebiusConfig
from moebius.model_identity import Parts

BEAT_S = 1.0  # between two signs of life


@dataclass(frozen=True)
class MemberSetup:
    """The first message to a process; filled by `group.py`."""

    config: MoebiusConfig  # with the port that all of them share
    index: int  # its place in `Places`
    count: int  # of these
    places: int  # descriptor of their memory
    listens_when_ready: bool  # another one serves meanwhile
    files: Parts = field(default_factory=dict)  # digests of what all of them have to read


@dataclass(frozen=True)
class Beat:
    """A sign of life; filled by `member.py`."""

    is_ready: bool  # the model is known: requests would be answered
    samples: Samples | None  # now and then: what it has counted
    refusal: str = ""  # which files of the model have changed, so that it cannot serve, or parts of it


def bound_socket(host: str, port: int) -> socket.socket:
    """Returns a socket on the common port: the kernel divides new connections among those that listen."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind((host, port))
    return made
