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
# Where the next program of this process finds names and numbers of open files.
_VARIABLE = "MOEBIUS_HANDED_OVER"
# By name: what the next program has, too, and what this one has of the former.
_handed_over: dict[str, int] = {}
_adopted: dict[str, int] = {}


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
    _handed_over[name] = descriptor


def hand_over_text(name: str, text: str) -> None:
    """Leaves a text to that program; a later one takes the place of an earlier one. Raises OSError."""
    former = _handed_over.pop(name, None)
    if former is not None:
        os.close(former)
    descriptor = os.memfd_create(f"moebius-{name}", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as stream:
        stream.write(text.encode())
    hand_over(name, descriptor)


def take_over_text(name: str) -> str:
    """Returns the text of that name that the former program has left, once; empty: there is none."""
    descriptor = take_over(name)
    if descriptor is None:
        return ""
    with open(descriptor, "rb") as stream:
        stream.seek(0)  # both programs have one place in it
        return stream.read().decode(errors="replace")


def adopt_files() -> None:
    """Takes what the former program of this process has left, so that no child inherits it; the first thing
    that a program does which may have been started over.
    """
    for entry in filter(None, os.environ.pop(_VARIABLE, "").split(",")):
        name, _, number = entry.partition("=")
        try:
            is_memory = os.readlink(_FD / number).startswith("/memfd:")
        except OSError:
            is_memory = False
        if is_memory:  # else the variable was handed down to another process
            os.set_inheritable(int(number), False)
            _adopted[name] = int(number)


def take_over(name: str) -> int | None:
    """Returns the file of that name that was adopted, once: the caller closes it. None: there is none."""
    return _adopted.pop(name, None)


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
                os.set_inheritable(int(name), int(name) in _handed_over.values())
            except OSError:  # that of the listing itself
                continue
    if _handed_over:
        os.environ[_VARIABLE] = ",".join(f"{name}={number}" for name, number in _handed_over.items())
    os.sched_setaffinity(0, cpus)
    command = list(sys.orig_argv)
    command[0] = sys.executable
    os.execv(sys.executable, command)
