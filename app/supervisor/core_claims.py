"""Which cores the instances of one host compute on, so that a later one takes others.

Each instance has a file in a directory that all users of the host share, and keeps it locked (flock) while
it lives. The kernel drops the lock with its holder, so a file without a lock means nothing and is deleted by
the next instance. What a file says is a hint: one that lies about cores makes others share them, no more.

Containers with a /dev/shm of their own do not see each other's files.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from moebius.host.topology import format_cpu_list, parse_cpu_list

DIRECTORY = Path("/dev/shm/moebius-cores")
# Another instance that starts measures for a second or two, and holds the directory meanwhile.
_WAIT_S, _POLL_S = 15.0, 0.02
_MAX_FILE_BYTES, _MAX_NAME = 1 << 16, 80

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OtherInstance:
    """A living instance; filled by `CoreClaims.others`."""

    # "port 8000 (pid 4711)": as it calls itself.
    name: str
    cpus: frozenset[int]


class CoreClaims:
    """The claims of this host; `hold` adds ours, which lasts until `release` or the end of the process."""

    def __init__(self, directory: Path) -> None:
        """Makes the directory unless it exists. Raises OSError when it cannot be used."""
        self._path = directory
        with contextlib.suppress(FileExistsError):
            directory.mkdir()
            # For all users, each of whom can delete their own files only.
            directory.chmod(0o1777)
        self._directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._directory)
        self._held: weakref.finalize[..., object] | None = None

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Holds the directory while no other instance claims cores.

        Raises TimeoutError when one keeps it locked.
        """
        deadline = time.monotonic() + _WAIT_S
        while not _try_flock(self._directory, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._path} stays locked by another process")
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            fcntl.flock(self._directory, fcntl.LOCK_UN)

    def others(self) -> tuple[OtherInstance, ...]:
        """Returns the instances that live now; deletes the files of those that do not, in `exclusive`."""
        found = []
        for name in sorted(os.listdir(self._directory)):
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                other = self._read(name)
                if other is not None:
                    found.append(other)
        return tuple(found)

    def _read(self, name: str) -> OtherInstance | None:
        """Returns the instance; None: its holder is gone.

        Raises OSError, ValueError or RuntimeError for what is no claim.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=self._directory)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            if _try_flock(descriptor, fcntl.LOCK_SH):
                os.unlink(name, dir_fd=self._directory)
                return None
            document = json.loads(file.read(_MAX_FILE_BYTES))
        if not isinstance(document, dict):
            raise ValueError(f"{name} is no claim of cores")
        # Another user's text, which is going to be printed.
        printable = "".join(filter(str.isprintable, str(document.get("name", name))))[:_MAX_NAME]
        return OtherInstance(printable, frozenset(parse_cpu_list(str(document.get("cpus")))))

    def hold(self, name: str, cpus: Sequence[int]) -> None:
        """Claims `cpus` for this process, in `exclusive`. Raises OSError."""
        file = f"{os.getpid()}-{os.urandom(4).hex()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(file, flags, 0o644, dir_fd=self._directory)
        self._held = weakref.finalize(self, _end_claim, self._path / file, descriptor)
        os.fchmod(descriptor, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, json.dumps({"name": name, "cpus": format_cpu_list(cpus)}).encode())

    def release(self) -> None:
        """Gives back what is held."""
        if self._held is not None:
            self._held()


def open_claims(directory: Path) -> CoreClaims | None:
    """Returns the claims; None, after a warning, where the directory cannot be used: then other instances are
    not seen.
    """
    try:
        return CoreClaims(directory)
    except OSError as error:
        log.warning("other instances of this host are not seen", directory=str(directory), why=error.strerror)
        return None


def _try_flock(descriptor: int, kind: int) -> bool:
    """Whether the lock was free."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _end_claim(path: Path, descriptor: int) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
    os.close(descriptor)
