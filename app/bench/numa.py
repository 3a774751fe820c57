"""`moebius bench numa`: what a machine of several NUMA nodes gives, and whether its expert servers use it.

Read bandwidth by where threads and memory are; all nodes at once against one of them; and of every expert
server that runs here, how much of its memory lies on its own node. What lies elsewhere is read over the link
between the sockets in every step, so that the share of pages is the share of the bytes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from app.bench.limits import cache_bytes
from app.bench.output import BenchTable, Column, write_json
from moebius.config.loader import load_config
from moebius.errors import UserError
from moebius.host.kernel_times import cpu_name
from moebius.host.topology import Topology, bind_memory
from moebius.process.limits import available_memory

# More of a server's bytes on another node are a finding.
MOST_ELSEWHERE = 0.02
_SMALLEST_BYTES, _CACHES, _PASSES = 64 * 2**20, 3, 5
_MEMORY_SHARE = 8  # Of the memory that is free, for the buffers of all nodes together.
# Files that are memory: what supervisors make, what is in /dev/shm, and packed experts in a user's directory.
_SHARED = ("memfd:", "/dev/shm/", ".weights")
_PAGES = re.compile(r" N(\d+)=(\d+)")
_PAGE_KIB = re.compile(r" kernelpagesize_kB=(\d+)")


@dataclass(frozen=True)
class ReadRow:
    """Threads of one node that read memory of one node; filled by `measure_reads`."""

    cpus_of: int
    memory_of: int
    threads: int
    bytes_per_second: float


@dataclass(frozen=True)
class ServerPages:
    """Where one expert server's memory lies; filled by `audit`. Bytes by NUMA node."""

    name: str
    node: int  # Its own; -1: it is bound to none.
    nbytes: dict[int, int]

    @property
    def elsewhere(self) -> float:
        """Returns the share of its bytes that are on other nodes than its own, 0 to 1."""
        total = sum(self.nbytes.values())
        return 0.0 if self.node < 0 or not total else 1 - self.nbytes.get(self.node, 0) / total


def run(state_dir: Path, json_file: Path | None) -> None:
    """Measures, prints and writes. Raises UserError where memory cannot be bound to a node."""
    topology = Topology.detect()
    cores = {node: [core[0] for core in topology.cores(node)] for node in topology.server_nodes()}
    print(f"{cpu_name()}, {len(cores)} NUMA nodes, cores by node: {[len(cpus) for cpus in cores.values()]}")
    pairs = [(cpus_of, memory_of) for cpus_of in cores for memory_of in cores]
    reads = [row for pair in pairs for row in measure_reads([pair], cores)]
    table = BenchTable[ReadRow](
        Column("threads of node", lambda row: str(row.cpus_of)),
        Column("memory of node", lambda row: str(row.memory_of)),
        Column("threads", lambda row: str(row.threads)),
        Column("GB/s", lambda row: f"{row.bytes_per_second / 1e9:.1f}", 8),
    )
    table.print_all(reads)
    together = measure_reads([(node, node) for node in cores], cores)
    total = sum(row.bytes_per_second for row in together)
    alone = max(row.bytes_per_second for row in reads if row.cpus_of == row.memory_of)
    print(f"all nodes at once, each its own memory: {total / 1e9:.1f} GB/s, {total / alone:.2f} x one node")
    servers = audit(state_dir)
    for server in servers:
        print(_line(server))
    if not servers:
        print("no expert server runs here: start `moebius serve` to see where its experts lie")
    document = {"processor": cpu_name(), "reads": [vars(row) for row in reads], "together": total}
    placed = [vars(server) | {"elsewhere": server.elsewhere} for server in servers]
    write_json(document | {"servers": placed}, json_file)


def _line(server: ServerPages) -> str:
    held = ", ".join(f"node {node} {size / 2**30:.2f} GiB" for node, size in sorted(server.nbytes.items()))
    if server.node < 0:
        return f"{server.name}: bound to no node; {held}"
    verdict = "more" if server.elsewhere > MOST_ELSEWHERE else "not more"
    return (
        f"{server.name}: node {server.node}; {held}; {server.elsewhere:.2%} of its bytes are elsewhere, "
        f"{verdict} than {MOST_ELSEWHERE:.0%}"
    )


def measure_reads(pairs: Sequence[tuple[int, int]], cores: dict[int, list[int]]) -> list[ReadRow]:
    """Returns the speeds of pairs (node of the threads, node of the memory) that read at the same time.

    `cores`: one CPU of each core by node. Raises UserError where memory cannot be bound to a node.
    """
    largest = max(cache_bytes(cpus) for cpus in cores.values())
    allowed = available_memory() // _MEMORY_SHARE // len(cores)
    nbytes = min(max(_SMALLEST_BYTES, _CACHES * largest), allowed)
    # A policy of memory is a thread's own and of those that it starts: each pair has a process.
    with ProcessPoolExecutor(len(pairs), mp_context=get_context("spawn")) as pool:
        found = [pool.submit(_speed, cores[cpus_of], memory_of, nbytes) for cpus_of, memory_of in pairs]
        speeds = [each.result() for each in found]
    return [
        ReadRow(cpus_of, memory_of, len(cores[cpus_of]), speed)
        for (cpus_of, memory_of), speed in zip(pairs, speeds, strict=True)
    ]


def _speed(cpus: Sequence[int], node: int, nbytes: int) -> float:
    """Bytes per second of the best pass. Raises UserError where memory cannot be bound to the node."""
    from moebius import _kernels_testing

    bound = bind_memory(node)
    if not bound.applied:
        raise UserError(f"memory of node {node}: {bound.message}")
    probe = _kernels_testing.BandwidthProbe(isa="auto", cpus=list(cpus), nbytes=nbytes, huge_pages=True)
    return probe.measure(block_bytes=64 * 1024, prefetch_bytes=2048, hint="t0", passes=_PASSES)


def audit(state_dir: Path, proc: Path = Path("/proc")) -> list[ServerPages]:
    """Returns where the memory of every expert server lies that runs below a state directory."""
    found = []
    for run_file in sorted(state_dir.glob("*/run.json")):
        try:
            processes = json.loads(run_file.read_text(encoding="utf-8"))["processes"]
            experts = [each for each in processes if each["name"].startswith("expert-")]
            for each in experts:
                pages = pages_by_node((proc / str(each["pid"]) / "numa_maps").read_text().splitlines())
                settings = load_config(run_file.with_name(f"{each['name']}.yaml"))
                node = settings.experts.numa_node
                found.append(ServerPages(each["name"], node if isinstance(node, int) else -1, pages))
        except (OSError, ValueError, KeyError, TypeError):  # it has ended, or is just being started
            continue
    return found


def pages_by_node(lines: Iterable[str]) -> dict[int, int]:
    """Returns bytes by node from the lines of `/proc/PID/numa_maps`, files that are only read left out."""
    found: dict[int, int] = {}
    for line in lines:
        size = _PAGE_KIB.search(line)
        each = int(size[1]) * 1024 if size else os.sysconf("SC_PAGE_SIZE")
        is_memory = " file=" not in line or any(kind in line for kind in _SHARED)
        for node, count in _PAGES.findall(line) if is_memory else ():
            found[int(node)] = found.get(int(node), 0) + int(count) * each
    return found
