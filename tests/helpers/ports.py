"""Ports for servers that are started later, none of which is given out twice meanwhile."""

from __future__ import annotations

import contextlib
import random
import socket

# Below the ports that Linux gives to connections and to servers that ask for any (32768 to 60999 unless
# somebody changed it): one found by asking for any may be taken by another test before its server starts.
_PORTS = range(20_000, 32_000)
_choice = random.SystemRandom()
# Held until this process ends. A name of the abstract namespace goes with the process, however it ends.
_reserved: dict[int, socket.socket] = {}


def free_port() -> int:
    """Returns a TCP port without a listener, given to no other caller while this process runs."""
    for _ in range(1000):
        port = _choice.choice(_PORTS)
        if port in _reserved or not _is_free(port):
            continue
        mark = socket.socket(socket.AF_UNIX)
        try:
            mark.bind(f"\0moebius-tests-port-{port}")
        except OSError:  # another process has it
            mark.close()
            continue
        _reserved[port] = mark
        return port
    raise RuntimeError(f"no free port between {_PORTS.start} and {_PORTS.stop}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return True
    return False
