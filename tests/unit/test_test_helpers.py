"""Invariant: what tests share does not fail on a machine that is busy."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import httpx

from tests.helpers import ports
from tests.helpers.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
FEW = "from tests.helpers import ports; ports._PORTS = range(*{}); print(ports.free_port())"


def test_a_port_is_given_once() -> None:
    """Between the answer and the server's start it is not given out again: not here, not in another process,
    and not by the kernel, which gives connections and unnamed servers others."""
    given = [free_port() for _ in range(50)]
    assert len(set(given)) == len(given)
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not set(ports._PORTS) & set(range(first, last + 1))
    program = FEW.format((given[0], given[0] + 1))
    other = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert "no free port" in other.stderr


def test_a_port_with_a_listener_is_not_given() -> None:
    """What listens there need not be one of our processes."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert not ports._is_free(taken.getsockname()[1])


def test_answers_over_http_are_waited_for() -> None:
    """httpx gives up after five seconds, which a gateway that waits for a processor may take."""
    assert httpx.Client().timeout == httpx.Timeout(60.0)


def test_certificates_of_authorities_are_read_once() -> None:
    """Clients without certificates of their own share a context; a client that names one has its own."""
    contexts = [httpx.HTTPTransport()._pool._ssl_context for _ in range(2)]
    assert contexts[0] is contexts[1]
    own = httpx.create_ssl_context()
    assert httpx.HTTPTransport(verify=own)._pool._ssl_context is own
    assert httpx.HTTPTransport(verify=False)._pool._ssl_context.check_hostname is False
