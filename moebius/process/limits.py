"""Limits of the system (ulimit, cgroups) below which a process of ours ends in the middle of its start.

They are checked before it begins, by name; what depends on the model is explained when it runs out
(`errors.report_failure`).
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from moebius.errors import UserError

Role = Literal["gateway", "expert", "gpu"]
"""What a process does; "gpu" also for commands that start all of them."""

# Of a process and its libraries, without any client.
FEWEST_FILES = 128
# Clients' connections are files. What is allowed is taken, as other servers do, but not without a bound.
MOST_FILES = 65536
# Of address space, without the model: what the libraries and their threads' stacks reserve (bytes).
FEWEST_BYTES: dict[Role, int] = {"gateway": 1280 << 20, "expert": 1536 << 20, "gpu": 2816 << 20}
# Of a process's threads; those that compute come on top, as many as CPUs.
_THREADS: dict[Role, int] = {"gateway": 40, "expert": 40, "gpu": 120}


def check_limits(role: Role, root: Path = Path("/")) -> None:
    """Takes as many open files as are allowed. Raises UserError naming the limit that is too low."""
    _check_files()
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if 0 <= address_space < FEWEST_BYTES[role]:
        model = "" if role == "gateway" else " and the size of the model"
        raise UserError(
            f"ulimit -v: a process may use {address_space >> 20} MiB of address space; needed: unlimited, or "
            f"{FEWEST_BYTES[role] >> 20} MiB{model} (batch systems: ask for more memory)"
        )
    needed = _THREADS[role] + len(os.sched_getaffinity(0))
    for limit, left, fix in _thread_limits(root):
        if left < needed:
            raise UserError(f"{limit}: {max(0, left)} more threads may be started; needed: {needed}. {fix}")


def _check_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if 0 <= soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < FEWEST_FILES:
        raise UserError(
            f"ulimit -n: a process may open {wanted} files; needed: {FEWEST_FILES}, better 65536: each "
            "client is one (systemd: LimitNOFILE=65536; docker, podman: --ulimit nofile=65536:65536)"
        )


def _thread_limits(root: Path) -> Iterator[tuple[str, int, str]]:
    """Yields each limit that there is: its name, how many threads are left, and how it is raised."""
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if processes >= 0 and os.geteuid() != 0:  # root is exempt
        left = processes - _threads_of(root / "proc", os.getuid())
        yield "ulimit -u", left, "systemd: LimitNPROC=, docker, podman: --ulimit nproc="
    for directory in _groups(root, "pids"):
        most, now = _number(directory / "pids.max"), _number(directory / "pids.current")
        if most is not None and now is not None:
            fix = "docker, podman: --pids-limit; systemd: TasksMax=; Kubernetes: the kubelet's podPidsLimit"
            yield f"{directory / 'pids.max'} is {most}", most - now, fix


def _threads_of(proc: Path, user: int) -> int:
    """Returns the threads of all processes of a user."""
    count = 0
    for process in proc.glob("[0-9]*"):
        try:
            if process.stat().st_uid == user:
                count += len(os.listdir(process / "task"))
        except OSError:  # it has ended
            continue
    return count


def _groups(root: Path, controller: str) -> list[Path]:
    """Returns this process's groups of both versions, each with all above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    base, found = root / "sys/fs/cgroup", []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        top = base if number == "0" else base / controller
        place = top / path.lstrip("/")
        found += [directory for directory in (place, *place.parents) if directory.is_relative_to(top)]
    return found


def total_memory(root: Path = Path("/")) -> int:
    """Bytes of the machine, whatever a container may use of them."""
    total = _table(root / "proc/meminfo").get("MemTotal:", 0) * 1024
    return total or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_memory(root: Path = Path("/")) -> int:
    """Returns the bytes that can be allocated without swapping: the kernel's estimate, at most what this
    process's cgroups leave, version 2 or 1.

    Pages of files that the kernel can drop are available in both.
    """
    available = _table(root / "proc/meminfo").get("MemAvailable:", 0) * 1024
    available = available or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for group in dict.fromkeys((root / "sys/fs/cgroup", *_groups(root, "memory"))):
        parts = _table(group / "memory.stat")
        # Not "file" and "cache", which count shared memory, too. Of version 1 "total" has groups below.
        cached = [parts.get(f"total_{name}", parts.get(name, 0)) for name in ("active_file", "inactive_file")]
        for limit, used in (("max", "current"), ("limit_in_bytes", "usage_in_bytes")):
            most = _number(group / f"memory.{limit}")
            if most is not None:
                left = most - (_number(group / f"memory.{used}") or 0) + sum(cached)
                available = min(available, max(0, left))
    return available


def is_on_windows(root: Path = Path("/")) -> bool:
    """Returns whether this Linux runs below Windows (WSL2)."""
    try:
        return "microsoft" in (root / "proc/version").read_text().lower()
    except OSError:
        return False


def lockable_memory(root: Path = Path("/")) -> int | None:
    """Returns the bytes that GPUs' drivers page-lock at most, as far as it is known without asking one: half
    of the RAM below Windows. None: there is no such limit.
    """
    return total_memory(root) // 2 if is_on_windows(root) else None


def _table(path: Path) -> dict[str, int]:
    """Returns the first number of each line, by its first word; empty where there is no such file."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}


def out_of_memory_kills(root: Path = Path("/")) -> int:
    """Returns the processes that the kernel has killed because memory, or a group's, ran out; 0: it does not
    say.
    """
    try:
        counters = (root / "proc/vmstat").read_text().split()
    except OSError:
        return 0
    return int(counters[counters.index("oom_kill") + 1]) if "oom_kill" in counters else 0


def _number(path: Path) -> int | None:
    """Returns the number in a file; None: there is no such file, or it says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
