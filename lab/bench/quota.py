"""`moebius bench quota`: what an MoE layer keeps of its speed under a cgroup's CPU quota.

Every measurement is a process of its own, because threads and spinning are settled when an engine is made.
With half of the CPUs' time a server should keep half of its speed; a pool that spins would spend that time
waiting.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from app.bench.output import BenchTable, Column, write_json
from moebius import _kernels_testing
from moebius.errors import UserError
from moebius.host.topology import Topology
from moebius.kernels import ExpertEngine

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2048, 768, 32, 8
ROWS = (1, 16)
GOAL = 0.45
WORKER = "import sys; from lab.bench.quota import worker; worker(sys.argv[1:])"


@dataclass(frozen=True)
class QuotaRow:
    """One measurement; filled by `worker` in its own process, `of_full` by `run`."""

    rows: int  # token rows per call
    quota: float  # CPUs' worth of time; 0: no quota
    threads: int  # of the engine
    spin_us: int  # how long a waiting thread of the pool spins before it sleeps
    calls_per_second: float
    cpu_seconds_per_second: float  # CPU time of the process during the calls
    of_full: float  # calls per second over those without a quota and with a thread per CPU


_TABLE = BenchTable[QuotaRow](
    Column("rows", lambda row: f"{row.rows}"),
    Column("quota", lambda row: f"{row.quota or 'none'}", 6),
    Column("threads", lambda row: f"{row.threads}"),
    Column("spin us", lambda row: f"{row.spin_us}", 8),
    Column("calls/s", lambda row: f"{row.calls_per_second:.1f}", 9),
    Column("CPU s/s", lambda row: f"{row.cpu_seconds_per_second:.2f}"),
    Column("of full", lambda row: f"{row.of_full:.2f}"),
)


def run(share: float = 0.5, seconds: float = 3.0, json_file: Path | None = None) -> list[QuotaRow]:
    """Measures and prints full speed, then `share` of the CPUs with the pool's own threads and with all.

    Raises:
        UserError: `share` is not within (0, 1], or no cgroup can be made here.
    """
    if not 0 < share <= 1:
        raise UserError(f"--share: {share} is not allowed; allowed: above 0, at most 1")
    cpus = len(Topology.detect().usable_cpus())
    print(f"MoE layer {HIDDEN}x{INTERMEDIATE}, {EXPERTS} experts, top {TOP_K}, bfloat16; {cpus} CPUs")
    _TABLE.print_header()
    results = []
    for rows in ROWS:
        full = measure(rows, 0.0, cpus, seconds, full=None)
        limited = [measure(rows, share * cpus, threads, seconds, full) for threads in (0, cpus)]
        for row in (full, *limited):
            results.append(row)
            _TABLE.print_row(row)
    worst = min(row.of_full for row in results)
    print(f"goal at half of the CPUs: {GOAL:.2f} of full; lowest here: {worst:.2f}")
    write_json(results, json_file)
    return results


def measure(rows: int, quota: float, threads: int, seconds: float, full: QuotaRow | None) -> QuotaRow:
    """One process inside a group of that quota (0: none). Raises UserError when no group can be made."""
    with cpu_quota_group(quota) if quota else nullcontext(Path()) as procs:
        arguments = [str(procs) if quota else "", str(rows), str(threads), str(seconds)]
        command = [sys.executable, "-P", "-c", WORKER, *arguments]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(output)
    of_full = found["calls_per_second"] / full.calls_per_second if full else 1.0
    return QuotaRow(rows=rows, quota=quota, of_full=of_full, **found)


def worker(arguments: list[str]) -> None:
    """Joins the group, makes an engine and prints its speed as JSON.

    `arguments`: the group's cgroup.procs (empty: none), rows, threads, seconds.
    """
    procs, rows, threads, seconds = arguments[0], int(arguments[1]), int(arguments[2]), float(arguments[3])
    if procs:
        Path(procs).write_text(str(os.getpid()))
    engine = ExpertEngine(HIDDEN, INTERMEDIATE, EXPERTS, 1, weight_format="bfloat16", num_threads=threads)
    _kernels_testing.fill_random(engine.backend, 0, seed=1)
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((rows, HIDDEN), dtype=np.float32)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(rows)]).astype(np.int32)
    weights = np.full((rows, TOP_K), 1 / TOP_K, np.float32)
    engine.forward(0, hidden, ids, weights)
    calls, begin, cpu_begin = 0, time.perf_counter(), time.process_time()
    while (elapsed := time.perf_counter() - begin) < seconds:
        engine.forward(0, hidden, ids, weights)
        calls += 1
    found = {
        "threads": engine.num_threads,
        "spin_us": _kernels_testing.pool_default_spin_microseconds(engine.num_threads),
        "calls_per_second": calls / elapsed,
        "cpu_seconds_per_second": (time.process_time() - cpu_begin) / elapsed,
    }
    print(json.dumps(found))


CGROUP_ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000


@contextmanager
def cpu_quota_group(cpus: float, root: Path = CGROUP_ROOT) -> Iterator[Path]:
    """The `cgroup.procs` file of a new group that may use `cpus` CPUs' worth of time; removed at the end.

    A process joins by writing its id there and has to be gone when the block ends.

    Raises:
        UserError: this machine does not let us make one; says what was tried.
    """
    quota = str(int(cpus * PERIOD_US))
    version_2 = {"cpu.max": f"{quota} {PERIOD_US}"}
    version_1 = {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": quota}
    tried = []
    for parent, settings in (
        (root / own_group(), version_2),
        (root / "cpu", version_1),
        (root / "cpu,cpuacct", version_1),
    ):
        try:
            group = make_group(parent, settings)
        except OSError as error:
            tried.append(f"{parent}: {error.strerror}")
            continue
        try:
            yield group / "cgroup.procs"
        finally:
            group.rmdir()
        return
    raise UserError(
        "no cgroup with a CPU quota can be made here; it needs root and a writable cgroup file system. Tried "
        + "; ".join(tried)
    )


def own_group() -> str:
    """Returns this process's version 2 group relative to the mount; empty for the root."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::") and "/.." not in line:
            return line[3:].strip("/")
    return ""


def make_group(parent: Path, settings: dict[str, str]) -> Path:
    """Returns a child of `parent` with these files written.

    Raises OSError when the system refuses any of it.
    """
    group = parent / f"moebius-quota-{os.getpid()}"
    group.mkdir()
    try:
        for name, value in settings.items():
            # Opened without O_CREAT: where the controller is missing nothing may be left behind.
            with (group / name).open("r+") as file:
                file.write(value)
    except OSError:
        group.rmdir()
        raise
    return group
