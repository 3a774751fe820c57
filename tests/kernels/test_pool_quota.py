"""Under a CPU quota the pool takes no more threads than the quota feeds and does not spin; idle it sleeps."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lab.bench.quota import cpu_quota_group
from moebius import _kernels_testing as testing
from moebius.errors import UserError
from moebius.host.topology import Topology

JOIN_AND_ASK = """
import json, os, pathlib, sys
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
from moebius import _kernels_testing as testing
spins = [testing.pool_default_spin_microseconds(threads) for threads in (1, 2, 8)]
run = testing.pool_stress(threads=4, runs=2000, spin_microseconds=-1, throw_every=0, pause_every=0)
print(json.dumps([testing.pool_default_threads([]), testing.pool_default_threads([0] * 64), spins, run[0]]))
"""


def ask_within(quota: float) -> tuple[int, int, list[int], int]:
    """Returns default threads, those for 64 cpus, spins for 1, 2 and 8 threads, tasks of a stress in such a
    group.
    """
    try:
        with cpu_quota_group(quota) as procs:
            command = [sys.executable, "-c", JOIN_AND_ASK, str(procs)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=60).stdout
    except UserError as error:
        pytest.skip(str(error))
    threads, many, spins, tasks = json.loads(output)
    return threads, many, spins, tasks


def test_quota_of_one_cpu() -> None:
    """One thread, as many as the quota feeds; more on request, but none of them spins."""
    threads, many, spins, tasks = ask_within(1.0)
    assert (threads, many) == (1, 1)
    assert spins[0] > 0
    assert spins[1:] == [0, 0]
    assert tasks > 0


def test_quota_below_one_cpu() -> None:
    """Never zero threads, and even a single one has nothing to spend on spinning."""
    threads, many, spins, _ = ask_within(0.5)
    assert (threads, many) == (1, 1)
    assert spins == [0, 0, 0]


def test_wide_quota_changes_nothing() -> None:
    """A quota above the cpus leaves affinity as the limit."""
    threads, _, spins, _ = ask_within(64.0)
    assert threads == len(os.sched_getaffinity(0))
    assert min(spins) > 0


def test_without_quota() -> None:
    """One thread per usable cpu, or per cpu given."""
    if Topology.detect().cpu_quota is not None:
        pytest.skip("this process runs under a quota")
    assert testing.pool_default_threads([]) == len(os.sched_getaffinity(0))
    assert testing.pool_default_threads([0, 0, 0]) == 3


def test_no_group_is_said_clearly(tmp_path: Path) -> None:
    """Where no quota can be set the reason is named for every place tried, and nothing is left behind."""
    (tmp_path / "cpu").mkdir()
    wanted = r"no cgroup with a CPU quota.*cpu: No such file.*cpu,cpuacct"
    with pytest.raises(UserError, match=wanted), cpu_quota_group(1.0, root=tmp_path):
        pytest.fail("a plain directory is no cgroup")
    assert [path.name for path in tmp_path.rglob("*")] == ["cpu"]


def test_paused_pool_sleeps() -> None:
    """A pool whose caller pauses most of the time costs a fraction of a cpu, not one per thread."""
    usage, begin = cpu_seconds(), time.monotonic()
    testing.pool_stress(threads=8, runs=2000, spin_microseconds=0, throw_every=0, pause_every=1)
    assert cpu_seconds() - usage < 0.8 * (time.monotonic() - begin)


def cpu_seconds() -> float:
    """Returns user and system time of this process and its threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
