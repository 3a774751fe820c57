"""What the kernel knows of a process without asking it: whether it computes, wants to, or stands still."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
# proc_pid_stat(5): running or waiting for a CPU; inside the kernel, mostly for a disk; stopped by a debugger.
_OCCUPIED = frozenset("RDt")
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Activity:
    """One look at all threads of a process; filled by `read_activity`."""

    # By SIGSTOP or the like, so that nothing runs until SIGCONT.
    stopped: bool
    # At this moment a thread runs, wants to run, waits inside the kernel or is held by a debugger.
    occupied: bool
    # Seconds since its start that its threads used a CPU, or were ready to and waited for one.
    demand_s: float


def read_activity(pid: int) -> Activity | None:
    """Reads it from /proc; None when the process has ended."""
    try:
        own = _fields(PROC / str(pid) / "stat")
        threads = os.listdir(PROC / str(pid) / "task")
    except OSError:
        return None
    # utime and stime, of threads that have ended, too.
    demand_s = (int(own[11]) + int(own[12])) / _CLOCK_TICKS
    occupied = False
    for thread in threads:
        try:
            directory = PROC / str(pid) / "task" / thread
            occupied = occupied or _fields(directory / "stat")[0] in _OCCUPIED
            demand_s += int((directory / "schedstat").read_text().split()[1]) * 1e-9
        except OSError:  # the thread has ended, or the kernel is one without CONFIG_SCHED_INFO
            continue
    return Activity(own[0] == "T", occupied, demand_s)


def _fields(path: Path) -> list[str]:
    """Those after the program's name, which stands in parentheses and may hold anything; first the state."""
    return path.read_text().rpartition(")")[2].split()
