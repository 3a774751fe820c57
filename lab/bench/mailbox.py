"""`moebius bench mailbox`: microseconds per round trip, and the limit measured in the same run.

Every server is a process of its own that echoes; the client is this process, in C++ without the GIL. The
limit is a ping-pong between two processes on one cache line, with nothing to copy or compute. Where every
process has a core to itself both sides spin; where not, a hand-off must pass through the scheduler, and the
ping-pong sleeps in a futex too.
"""

from __future__ import annotations

import mmap
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof, c_char
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from app.bench.output import BenchTable, Column, write_json
from moebius import _kernels_testing
from moebius.host.topology import Topology
from moebius.mailbox import Mailbox, MailboxGeometry

ROWS = (1, 8, 64)
SERVERS = (1, 2, 4)
HIDDEN_SIZE = 2048
TOP_K = 8
# Enough for the scheduler to have moved client and server to cores of their own.
WARMUP = 5000
DEADLINE_MS = 10_000
READY_TIMEOUT_S = 30.0
SPIN_NS = 500_000

Wait = Literal["spin", "sleep"]

ECHO_SERVER = """
import os, sys, time
from moebius._kernels_testing import EchoBackend
from moebius.mailbox import MailboxServer
server = MailboxServer(sys.argv[1], int(sys.argv[2]), EchoBackend(int(sys.argv[3])))
server.start()
while server.is_running and os.getppid() == int(sys.argv[4]):
    time.sleep(0.1)
"""
ECHO_LINE = """
import sys
from lab.bench.mailbox import one_side
one_side(sys.argv[1], False, int(sys.argv[2]), int(sys.argv[3]))
"""


@dataclass(frozen=True)
class MailboxRow:
    """One measurement; filled by `run`."""

    rows: int  # token rows per request
    servers: int  # echo processes
    hidden_size: int  # elements per row, bfloat16 out and float32 back
    cores: int  # cores this process may use
    median_us: float  # microseconds per submit + collect
    p99_us: float
    wait: Wait  # how the limit waits: spin when every process has a core
    limit_us: float  # median ping-pong of one cache line between two processes
    ratio: float  # median_us / limit_us


_TABLE = BenchTable[MailboxRow](
    Column("rows", lambda row: f"{row.rows}"),
    Column("servers", lambda row: f"{row.servers}"),
    Column("median", lambda row: f"{row.median_us:.1f}", 9),
    Column("p99", lambda row: f"{row.p99_us:.1f}", 9),
    Column("limit", lambda row: f"{row.limit_us:.2f}", 9),
    Column("ratio", lambda row: f"{row.ratio:.1f}", 7),
    Column("limit waits", lambda row: row.wait, left=True),
)


def run(json_file: Path | None = None, rounds: int = 2000) -> list[MailboxRow]:
    """Measures and prints every (rows, servers); also writes JSON rows to `json_file` when given.

    Raises:
        MailboxError: an echo process did not start or died.
    """
    cores = Topology.detect().recommended_threads()
    print(f"mailbox round trip, {HIDDEN_SIZE} wide, {cores} cores, {rounds} rounds each (microseconds)")
    _TABLE.print_header()
    results = []
    for servers in SERVERS:
        wait: Wait = "spin" if cores >= 1 + servers else "sleep"
        limit = statistics.median(ping_pong(rounds, SPIN_NS if wait == "spin" else 0))
        with echo_mailbox(servers) as box:
            for rows in ROWS:
                results.append(measure(box, rows, rounds, cores, wait, limit))
                _TABLE.print_row(results[-1])
    print("limit: one cache line to another process and back, nothing copied or computed")
    write_json(results, json_file)
    return results


def measure(box: Mailbox, rows: int, rounds: int, cores: int, wait: Wait, limit_us: float) -> MailboxRow:
    """Returns one row of the table."""
    times = sorted(
        _kernels_testing.mailbox_round_trips(
            box.kernel, rows=rows, rounds=rounds, warmup=WARMUP, deadline_ms=DEADLINE_MS
        )
    )
    median = statistics.median(times)
    return MailboxRow(
        rows=rows,
        servers=box.geometry.num_servers,
        hidden_size=box.geometry.hidden_size,
        cores=cores,
        median_us=median,
        p99_us=times[int(0.99 * (len(times) - 1))],
        wait=wait,
        limit_us=limit_us,
        ratio=median / limit_us,
    )


@contextmanager
def echo_mailbox(servers: int, rows: Sequence[int] = ROWS) -> Iterator[Mailbox]:
    """Yields a mailbox with that many echo processes, for these row counts; removed, with them, at
    the end.
    """
    geometry = MailboxGeometry(
        num_layers=1,
        hidden_size=HIDDEN_SIZE,
        top_k=TOP_K,
        num_slots=2,
        max_rows=max(rows),
        num_servers=servers,
        dtype="bfloat16",
    )
    box = Mailbox.create(f"moebius-bench-{os.getpid()}-{secrets.token_hex(6)}", geometry)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(servers):
            arguments = [box.name, str(index), str(HIDDEN_SIZE), str(os.getpid())]
            processes.append(subprocess.Popen([sys.executable, "-P", "-c", ECHO_SERVER, *arguments]))
        box.wait_servers_ready(READY_TIMEOUT_S)
        yield box
    finally:
        box.shut_down()
        for process in processes:
            process.wait()
        Mailbox.unlink(box.name)


def ping_pong(rounds: int, spin_ns: int) -> list[float]:
    """Returns the microseconds of each round trip of one cache line between this process and another."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix=f"moebius-bench-{os.getpid()}-") as line:
        line.write(bytes(mmap.PAGESIZE))
        line.flush()
        command = [sys.executable, "-P", "-c", ECHO_LINE, line.name, str(WARMUP + rounds), str(spin_ns)]
        other = subprocess.Popen(command)
        try:
            return one_side(line.name, True, WARMUP + rounds, spin_ns)[WARMUP:]
        finally:
            other.wait()


def one_side(path: str, asks: bool, rounds: int, spin_ns: int) -> list[float]:
    """Returns one process's part of the ping-pong; empty for the side that answers."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE) as page:
        word = c_char.from_buffer(page)
        try:
            return _kernels_testing.ping_pong(addressof(word), asks=asks, rounds=rounds, spin_ns=spin_ns)
        finally:
            del word
