"""State and run directory: who runs here, and what to clean up if that supervisor was killed.

A run directory holds `lock` (flock held while the supervisor lives), `run.json` (children and shared
memory) and the processes' sockets and settings. The kernel drops the lock with its holder, so "the lock
is free but run.json exists" means leftovers, and nothing else does.

What a run file lists is killed and deleted, so it is believed only where no other user can have written it:
in a directory (mode 0700) and a file of our own, reached through no link of somebody else's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from moebius.errors import StartupError
from moebius.mailbox import MAGIC
from moebius.replace_file import replace_file

OTHERS = stat.S_IRWXG | stat.S_IRWXO
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def own_state_directory(path: Path) -> Path:
    """Makes the directory unless it exists. Raises StartupError when others could replace what we put there.

    A directory shared by many, such as /tmp, is fine when only owners may rename what is in it (sticky).
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        link, found = path.lstat(), path.stat()
    except OSError as error:
        raise unusable(path, error) from None
    if {link.st_uid, found.st_uid} - {os.getuid(), 0}:
        owner = found.st_uid if found.st_uid not in (os.getuid(), 0) else link.st_uid
        raise StartupError(f"the state directory {path} belongs to user {owner}; give another --state-dir")
    # Where every user has a group of their own, new directories are open to it.
    alone_in_group = found.st_uid == found.st_gid == os.getuid()
    open_to = stat.S_IWOTH if alone_in_group else OTHERS_WRITE
    if found.st_mode & open_to and not found.st_mode & stat.S_ISVTX:
        raise StartupError(
            f"others may write in the state directory {path} (mode {stat.S_IMODE(found.st_mode):04o}) and so "
            f"exchange its sockets and settings; give one of your own: --state-dir {path / 'moebius'}"
        )
    return path


def write_private(path: Path, text: str) -> None:
    """Writes a file that no other user can read, all of it or nothing. Raises StartupError without room."""
    try:
        replace_file(path, text)
    except OSError as error:
        raise unusable(path.parent, error) from None


def check_private(path: Path) -> None:
    """Raises StartupError unless the path is a directory, no link, that we own and only we can enter."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise StartupError(f"{path} is not a directory; delete it, or give another --state-dir")
    if found.st_uid != os.getuid():
        raise StartupError(f"{path} belongs to user {found.st_uid}; give another --state-dir")
    if found.st_mode & OTHERS:
        raise StartupError(
            f"{path} is open to others (mode {stat.S_IMODE(found.st_mode):04o}), so its run file is not "
            "trusted; check its contents, then delete it or `chmod 700` it, or give another --state-dir"
        )


def unusable(path: Path, error: OSError) -> StartupError:
    """Names directory, need and remedy."""
    return StartupError(
        f"cannot use the state directory {path}: {error.strerror}; it has to take sockets, settings and "
        "2 MiB of log lines: free room there, or give a directory that can be written with --state-dir"
    )


SHARED_MEMORY = Path("/dev/shm")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
KILL_WAIT_S = 5.0
MAX_RUN_FILE_BYTES = 1 << 20
# As kernels/mailbox/segment.cc allows them.
_SEGMENT_NAME = re.compile(r"[^/.\0][^/\0]{0,199}")

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class RunRecord:
    """A run file whose every word was checked; filled by `_read_record`."""

    # (pid, start in clock ticks) of processes that were started; empty when the machine has restarted since.
    processes: tuple[tuple[int, int], ...]
    # Names under /dev/shm.
    segments: tuple[str, ...]


def start_ticks(pid: int) -> int | None:
    """Returns when the process started, in clock ticks since boot (proc_pid_stat(5), field 22); None: no such
    one.

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
    """An exclusively owned run directory. Raises StartupError when somebody else owns it or could."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            check_private(path)
            lock = _try_lock(path)
        except OSError as error:
            raise unusable(path, error) from None
        if lock is None:
            raise StartupError(f"another supervisor (pid {_owner(path)}) is running in {path}")
        self._lock = lock
        try:
            _remove_leftovers(path)
        except BaseException:
            os.close(lock)
            raise

    def record(self, processes: Iterable[tuple[str, int]], segments: Iterable[str]) -> None:
        """Writes the run file: (name, pid) of every child that runs and the shared-memory names.

        Raises StartupError when there is no room.
        """
        known = [(name, pid, start_ticks(pid)) for name, pid in processes]
        document = {
            "supervisor": {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())},
            "boot_id": _boot_id(),
            "processes": [
                {"name": name, "pid": pid, "start_ticks": ticks}
                for name, pid, ticks in known
                if ticks is not None
            ],
            "segments": list(segments),
        }
        write_private(self.path / "run.json", json.dumps(document, indent=1))

    def remove(self) -> None:
        """Removes the shared memory in the run file, the directory, and the claim on it."""
        try:
            _remove_leftovers(self.path)
        except StartupError as error:  # somebody changed the run file; why we end is what has to be heard
            log.error("left over", error=str(error))
        else:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def clean_up_stale(state_dir: Path) -> list[str]:
    """Removes what killed supervisors left in any run directory of `state_dir`; returns those names.

    Directories of other users are left alone. Raises StartupError for one of ours that others could write to.
    """
    cleaned = []
    for run_file in sorted(state_dir.glob("*/run.json")):
        directory = run_file.parent
        try:
            owner = directory.lstat().st_uid
            if owner != os.getuid():
                log.warning("left alone, it belongs to another user", path=str(directory), user=owner)
                continue
            check_private(directory)
            lock = _try_lock(directory)
        except OSError as error:
            raise unusable(directory, error) from None
        if lock is None:
            continue
        try:
            _remove_leftovers(directory)
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(lock)
        cleaned.append(directory.name)
    return cleaned


def _try_lock(directory: Path) -> int | None:
    """Returns a locked file descriptor, or None when a live process holds the lock."""
    while True:
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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
        return str(json.loads((directory / "run.json").read_text(encoding="utf-8"))["supervisor"]["pid"])
    return "unknown"


def _boot_id() -> str:
    """Changes whenever the machine starts; empty where the system does not say."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _remove_leftovers(directory: Path) -> None:
    """Kills the recorded processes that still run and unlinks the recorded shared memory."""
    record = _read_record(directory / "run.json")
    if record is None:
        return
    segments = [path for name in record.segments if (path := _own_segment(name, directory)) is not None]
    for pid, ticks in record.processes:
        _kill(pid, ticks)
    for segment in segments:
        try:
            segment.unlink(missing_ok=True)
        except OSError as error:
            log.error("shared memory is left over", path=str(segment), error=error.strerror)
    _clear(directory)


def _clear(directory: Path) -> None:
    """Removes its files, but not the lock that we hold."""
    for path in directory.iterdir():
        if path.name != "lock" and (path.is_symlink() or not path.is_dir()):
            path.unlink()


def _read_record(run_file: Path) -> RunRecord | None:
    """Returns the run file; None when there is none.

    Raises StartupError when it is not ours, or not a run file.
    """
    try:
        descriptor = os.open(run_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise StartupError(f"the run file {run_file} is not trusted: {reason}; delete it") from None
    with os.fdopen(descriptor, encoding="utf-8") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & OTHERS_WRITE:
            raise StartupError(
                f"the run file {run_file} is not trusted: owner {found.st_uid}, mode "
                f"{stat.filemode(found.st_mode)}: others could write it; check what it lists, then delete it"
            )
        try:
            return _checked(json.loads(file.read(MAX_RUN_FILE_BYTES)))
        except (ValueError, KeyError, TypeError):
            reason = "stop its processes and delete it"
            raise StartupError(f"the run file {run_file} is damaged; {reason}") from None


def _checked(document: Any) -> RunRecord:
    """Raises ValueError, KeyError or TypeError for what `RunDirectory.record` cannot have written."""
    processes = tuple((entry["pid"], entry["start_ticks"]) for entry in document["processes"])
    for number in (number for pair in processes for number in pair):
        if type(number) is not int or number < 1:
            raise ValueError(number)
    segments = tuple(document["segments"])
    if not all(isinstance(name, str) and _SEGMENT_NAME.fullmatch(name) for name in segments):
        raise ValueError(segments)
    same_boot = document.get("boot_id", "") in ("", _boot_id())
    return RunRecord(processes if same_boot else (), segments)


def _own_segment(name: str, directory: Path) -> Path | None:
    """Returns where that shared memory is; None: there is none.

    Raises StartupError when it is no mailbox of ours.
    """
    path = SHARED_MEMORY / name
    try:
        found = path.lstat()
        ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()
        if ours:
            with path.open("rb") as segment:
                # Zeros: its creator died before it was complete.
                ours = int.from_bytes(segment.read(8), "little") in (0, MAGIC)
    except FileNotFoundError:
        return None
    if not ours:
        run_file = directory / "run.json"
        raise StartupError(f"{run_file} lists {path}, which is not a Moebius mailbox; delete that run file")
    return path


def _kill(pid: int, ticks: int) -> None:
    """Kills exactly the process that was recorded, and waits until it is gone (its ports are free)."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:  # there is none
        return
    try:
        # Checked with the descriptor open: from here on the number cannot become another process's.
        if start_ticks(pid) != ticks or Path(f"/proc/{pid}").stat().st_uid != os.getuid():
            return
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        end = time.monotonic() + KILL_WAIT_S
        while start_ticks(pid) == ticks and time.monotonic() < end:
            time.sleep(0.01)
    except (ProcessLookupError, FileNotFoundError):
        return
    finally:
        os.close(descriptor)
