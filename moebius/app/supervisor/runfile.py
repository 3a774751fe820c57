"""The run directory: who runs here, and what to clean up if that supervisor was killed.

A run directory holds `lock` (flock held while the supervisor lives), `run.json` (children and shared
memory) and the processes' sockets and settings. The kernel drops the lock with its holder, so "the lock
is free but run.json exists" means leftovers, and nothing else does.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moebius.errors import StartupError

SHARED_MEMORY = Path("/dev/shm")
KILL_WAIT_S = 5.0


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot (proc_pid_stat(5), field 22); None: no such one.

    Together with the pid it names a process for ever: pids are reused, pairs are not.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in parentheses and may hold anything.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


class RunDirectory:
    """An exclusively owned run directory. Raises StartupError when a live supervisor owns it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StartupError(f"cannot create the state directory {path}: {error.strerror}") from None
        lock = _try_lock(path)
        if lock is None:
            raise StartupError(f"another supervisor (pid {_owner(path)}) is running in {path}")
        self._lock = lock
        _remove_leftovers(path)

    def record(self, processes: Iterable[tuple[str, int]], segments: Iterable[str]) -> None:
        """Writes the run file: (name, pid) of every child that runs and the shared-memory names."""
        known = [(name, pid, start_ticks(pid)) for name, pid in processes]
        document = {
            "supervisor": {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())},
            "processes": [
                {"name": name, "pid": pid, "start_ticks": ticks}
                for name, pid, ticks in known
                if ticks is not None
            ],
            "segments": list(segments),
        }
        temporary = self.path / "run.json.new"
        temporary.write_text(json.dumps(document, indent=1))
        temporary.replace(self.path / "run.json")

    def remove(self) -> None:
        """Removes the shared memory in the run file, the directory, and the claim on it."""
        _remove_leftovers(self.path)
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def clean_up_stale(state_dir: Path) -> list[str]:
    """Removes what killed supervisors left in any run directory of `state_dir`; returns those names."""
    cleaned = []
    for run_file in sorted(state_dir.glob("*/run.json")):
        lock = _try_lock(run_file.parent)
        if lock is None:
            continue
        _remove_leftovers(run_file.parent)
        shutil.rmtree(run_file.parent, ignore_errors=True)
        os.close(lock)
        cleaned.append(run_file.parent.name)
    return cleaned


def _try_lock(directory: Path) -> int | None:
    """A locked file descriptor, or None when a live process holds the lock."""
    while True:
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        # Its former owner may have removed the directory between our open and our lock.
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == (directory / "lock").stat().st_ino:
                return descriptor
        os.close(descriptor)
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)


def _owner(directory: Path) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError):
        return str(json.loads((directory / "run.json").read_text())["supervisor"]["pid"])
    return "unknown"


def _remove_leftovers(directory: Path) -> None:
    """Kills the recorded processes that still run and unlinks the recorded shared memory."""
    run_file = directory / "run.json"
    try:
        document: dict[str, Any] = json.loads(run_file.read_text())
    except FileNotFoundError:
        return
    except ValueError:
        raise StartupError(f"the run file {run_file} is damaged; stop its processes and delete it") from None
    for process in document["processes"]:
        _kill(process["pid"], process["start_ticks"])
    for name in document["segments"]:
        (SHARED_MEMORY / name).unlink(missing_ok=True)
    for path in directory.iterdir():
        if path.name != "lock" and not path.is_dir():
            path.unlink()


def _kill(pid: int, ticks: int) -> None:
    """Kills exactly the process that was recorded, and waits until it is gone (its ports are free)."""
    if start_ticks(pid) != ticks:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + KILL_WAIT_S
    while start_ticks(pid) == ticks and time.monotonic() < end:
        time.sleep(0.01)
