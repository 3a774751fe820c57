"""Mailboxes, echo servers in other processes and the answers they must give."""

from __future__ import annotations

import random
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moebius import _kernels
from moebius._kernels_testing import EchoBackend
from moebius.mailbox import Mailbox, MailboxGeometry, MailboxServer

ROOT = Path(__file__).resolve().parents[2]


def geometry(num_servers: int = 1, **changes: Any) -> MailboxGeometry:
    """Returns a small geometry of distinct sizes."""
    sizes: dict[str, Any] = {
        "num_layers": 5,
        "hidden_size": 48,
        "top_k": 3,
        "num_slots": 2,
        "max_rows": 7,
        "dtype": "float32",
    }
    return MailboxGeometry(num_servers=num_servers, **(sizes | changes))


def header_word(content: bytes, field: str) -> int:
    """Returns a field of the Header, of a segment's content, as an unsigned integer."""
    offset, nbytes = _kernels.mailbox_layout()["Header"][1][field]
    return int.from_bytes(content[offset : offset + nbytes], "little")


@contextmanager
def new_mailbox(shape: MailboxGeometry) -> Iterator[Mailbox]:
    """A mailbox of a fresh name, shut down and removed at the end."""
    box = Mailbox.create(f"moebius-test-{secrets.token_hex(6)}", shape)
    try:
        yield box
    finally:
        box.shut_down()
        Mailbox.unlink(box.name)


@contextmanager
def served_mailbox(shape: MailboxGeometry, **backend: Any) -> Iterator[Mailbox]:
    """A mailbox whose echo servers (scale 1, 2, 3...) run as threads of this process."""
    with new_mailbox(shape) as box:
        servers = []
        for index in range(shape.num_servers):
            echo = EchoBackend(shape.hidden_size, scale=1.0 + index, **backend)
            servers.append(MailboxServer(box.name, index, echo))
            servers[-1].start()
        try:
            yield box
        finally:
            for server in servers:
                server.stop()


def spawn_server(
    box: Mailbox, index: int, scale: float = 1.0, identity: str = "", delay_us: int = 0
) -> subprocess.Popen[bytes]:
    """Returns an echo server in a process of its own, which serves until it is killed or the mailbox shut
    down.
    """
    program = (
        "import sys, time\n"
        "from moebius._kernels import MailboxServer\n"
        "from moebius._kernels_testing import EchoBackend\n"
        "name, index, hidden, scale, identity, delay_us = sys.argv[1:]\n"
        "backend = EchoBackend(int(hidden), scale=float(scale), delay_us=int(delay_us))\n"
        "server = MailboxServer(name, int(index), backend, attach_timeout_s=60, heartbeat_s=0.1, spin_ns=-1,"
        " num_threads=1, identity=identity)\n"
        "server.start()\n"
        "while server.is_running: time.sleep(0.2)\n"
    )
    arguments = [box.name, str(index), str(box.geometry.hidden_size), str(scale), identity, str(delay_us)]
    return subprocess.Popen([sys.executable, "-c", program, *arguments], cwd=ROOT)


class Killer(threading.Thread):
    """Kills servers at random moments and starts successors, until enough have died."""

    def __init__(self, box: Mailbox, crashes: int) -> None:
        """Starts one process per server."""
        super().__init__()
        self.box, self.crashes, self.random, self.killed = box, crashes, random.Random(7), 0
        self.enough = threading.Event()
        self.servers = [self.spawn(index) for index in range(box.geometry.num_servers)]

    def spawn(self, index: int) -> subprocess.Popen[bytes]:
        """Returns a server of the index."""
        return spawn_server(self.box, index, scale=1.0 + index)

    def run(self) -> None:
        """One crash about every 0.15 s, over all phases of a round trip."""
        while self.killed < self.crashes and not self.enough.is_set():
            self.box.wait_servers_ready(60)
            time.sleep(self.random.uniform(0.05, 0.25))
            index = self.random.randrange(len(self.servers))
            self.servers[index].kill()
            self.servers[index].wait()
            self.servers[index] = self.spawn(index)
            self.killed += 1

    def end(self) -> None:
        """Leaves no process behind."""
        self.enough.set()
        self.join()
        for server in self.servers:
            server.kill()
            server.wait()


class Call:
    """One request with whole-number inputs, so that its answer is exact."""

    def __init__(self, box: Mailbox, rows: int, layer: int = 0, seed: int = 0) -> None:
        """Draws the inputs."""
        shape, random = box.geometry, np.random.default_rng(seed)
        self.box, self.rows, self.layer = box, rows, layer
        self.values = random.integers(-64, 65, (rows, shape.hidden_size)).astype(np.float32)
        bits = (self.values.view(np.uint32) >> 16).astype(np.uint16)
        typed = {"float32": self.values, "bfloat16": bits, "float16": self.values.astype(np.float16)}
        self.hidden_states: NDArray[Any] = typed[shape.dtype]  # type: ignore[assignment]
        self.topk_ids = random.integers(-1, 32, (rows, shape.top_k)).astype(np.int32)
        self.topk_weights = random.integers(0, 5, (rows, shape.top_k)).astype(np.float32) / 4
        self.output = np.full((rows, shape.hidden_size), np.nan, np.float32)

    def submit(self, slot: int = 0) -> int:
        """Returns the epoch."""
        arrays = (self.hidden_states, self.topk_ids, self.topk_weights)
        return self.box.submit(slot, self.layer, *(array.ctypes.data for array in arrays), self.rows)

    def collect(self, epoch: int, slot: int = 0, deadline_ms: int = 60_000) -> NDArray[np.float32]:
        """Returns the summed answer."""
        times = self.box.collect(slot, epoch, self.output.ctypes.data, deadline_ms)
        assert len(times) == self.box.geometry.num_servers
        return self.output

    def expected(self) -> NDArray[np.float32]:
        """What servers of scale 1, 2, 3... must sum to."""
        servers = self.box.geometry.num_servers
        scale = servers * (servers + 1) / 2
        routed = (self.topk_weights * (self.topk_ids + 1)).sum(axis=1, keepdims=True) * (self.layer + 1)
        return (scale * self.values + servers * routed).astype(np.float32)
