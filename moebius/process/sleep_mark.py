"""The file that exists while an engine sleeps, by which its gateway and its successor after a kill know it.

It is written before the engine stops taking calls and removed when it begins to load, so that a reader
may expect a refused call to be answered later.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from moebius.replace_file import replace_file

ASLEEP = "the engine is asleep: POST /wake_up or `moebius wake` wakes it"
FORCED = "the engine was put to sleep, which ended this call"
"""The end of a call that was not waited for: it is not to be repeated, which would wake the engine."""
_FD = Path("/proc/self/fd")
# Descriptors that the next program of this process has, too.
_handed_over: set[int] = set()


class SleepMark:
    """The mark at one path; without a path there is never one."""

    def __init__(self, path: str) -> None:
        self._path = path

    @property
    def has_place(self) -> bool:
        """Whether a mark can be made at all."""
        return bool(self._path)

    @property
    def exists(self) -> bool:
        """Whether the engine sleeps, or lets its last calls end before it does."""
        return bool(self._path) and os.path.exists(self._path)

    def write(self, text: str) -> None:
        """Makes the mark with what a sleeping engine has to know. Raises OSError."""
        replace_file(Path(self._path), text)

    def read(self) -> str:
        """Returns what was written. Raises OSError."""
        return Path(self._path).read_text(encoding="utf-8")

    def clear(self) -> None:
        """Removes the mark if there is one. Raises OSError."""
        if self._path:
            Path(self._path).unlink(missing_ok=True)


def hand_over(name: str, descriptor: int) -> None:
    """Leaves an open file to the program that `start_over` runs, which finds it by its name."""
    os.environ[name] = str(descriptor)
    _handed_over.add(descriptor)


def take_over(name: str) -> int | None:
    """Returns the file that this process's former program left under a name, once; None: it left none."""
    text = os.environ.pop(name, "")
    if not text.isdecimal():
        return None
    try:
        is_memory = os.readlink(_FD / text).startswith("/memfd:")
    except OSError:
        return None
    if not is_memory:  # of an environment that was handed down to another process
        return None
    os.set_inheritable(int(text), False)
    return int(text)


def start_over(cpus: set[int]) -> NoReturn:
    """Runs this process's own command line in its place, which gives back everything but its number and what
    was handed over.

    The system frees all memory, and a driver that of its device, as at the process's end; parents,
    supervisors and containers see none. `cpus` are those that the new program may use: a thread that calls
    this may be bound to fewer.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    for name in os.listdir(_FD):
        if int(name) > sys.stderr.fileno():
            try:
                os.set_inheritable(int(name), int(name) in _handed_over)
            except OSError:  # that of the listing itself
                continue
    os.sched_setaffinity(0, cpus)
    command = list(sys.orig_argv)
    command[0] = sys.executable
    os.execv(sys.executable, command)
