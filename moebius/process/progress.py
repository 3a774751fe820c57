"""Phases of a start: what a process is doing, since when and how far it is, once it takes more than moments.

A phase that ends soon prints nothing. Of others there is a line after two seconds, then ever more rarely,
also while the work itself is inside one long call. `moebius serve` finds these lines in its processes' output
and shows them as what it waits for.
"""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import structlog

Item = TypeVar("Item")
_log = structlog.get_logger(__name__)

MARK = "in progress: "
"""What a phase's lines begin with."""
_END = "finished: "
# Ends a phase's text in a console line (the logger's name follows) and in a JSON object.
_TEXT = re.compile(re.escape(MARK) + r'([^\["]+)')
_AMOUNTS = re.compile(r", ([\d.]+) of ([\d.]+)")
# Seconds until the first line, and between two: twice as many each time, up to the longest.
_FIRST_S, _LONGEST_S = 2.0, 10.0
_BYTES = "GB"
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class Progress:
    """One phase; `advance` may be called by any thread."""

    def __init__(self, what: str, total: int = 0, unit: str = "") -> None:
        """`total` 0: how much there is to do is not known. The unit "GB" counts bytes."""
        self._what, self._total, self._unit = what, total, unit
        self._done = 0
        self._lock = threading.Lock()
        self._begin = time.monotonic()

    def advance(self, count: int = 1) -> None:
        """Counts `count` more as done."""
        with self._lock:
            self._done += count

    @property
    def seconds(self) -> float:
        """Since the phase began."""
        return time.monotonic() - self._begin

    def __str__(self) -> str:
        parts = [self._what]
        if self._total:
            parts.append(f"{self._amount(self._done)} of {self._amount(self._total)} {self._unit}".rstrip())
        return ", ".join([*parts, f"{self.seconds:.0f} s"])

    def _amount(self, count: int) -> str:
        return f"{count / 1e9:.1f}" if self._unit == _BYTES else str(count)


class _Phases:
    """Seconds of the phases that have ended, by what was done, in their order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}

    def add(self, what: str, seconds: float) -> None:
        with self._lock:
            self._seconds[what] = self._seconds.get(what, 0.0) + seconds

    def take(self) -> dict[str, float]:
        with self._lock:
            taken, self._seconds = self._seconds, {}
        return {what: round(seconds, 3) for what, seconds in taken.items()}


_phases = _Phases()


def take_phases() -> dict[str, float]:
    """Returns the seconds of this process's phases since the last call, those of one name added up."""
    return _phases.take()


@contextmanager
def phase(what: str, total: int = 0, unit: str = "", first_s: float = _FIRST_S) -> Iterator[Progress]:
    """Logs the phase while the context is open; `what` names it to people, as in "loading dense weights"."""
    progress, ended = Progress(what, total, unit), threading.Event()
    reporter = threading.Thread(target=_report, args=(progress, ended, first_s), name="progress", daemon=True)
    reporter.start()
    try:
        yield progress
    finally:
        ended.set()
        reporter.join()
        _phases.add(what, progress.seconds)


def counted(items: Iterable[Item], what: str, total: int, unit: str = "") -> Iterator[Item]:
    """Yields the items, counted as they are done with, in a phase of their own."""
    with phase(what, total, unit) as progress:
        for item in items:
            yield item
            progress.advance()


def _report(progress: Progress, ended: threading.Event, first_s: float) -> None:
    pause_s = first_s
    while not ended.wait(pause_s):
        _log.info(f"{MARK}{progress}")
        pause_s = min(2 * pause_s, _LONGEST_S)
    if pause_s != first_s:
        _log.info(f"{_END}{progress}")


def text_of_line(line: str) -> str | None:
    """Returns the text of a process's log line: how far its phase is; None for other lines."""
    found = _TEXT.search(line)
    return None if found is None else found[1].strip()


def amounts_of_text(text: str) -> tuple[float, float] | None:
    """Returns the amounts of such a text: how much is done and how much there is; None where it
    does not say.
    """
    found = _AMOUNTS.search(text)
    return None if found is None else (float(found[1]), float(found[2]))


def is_end_of_phase(line: str) -> bool:
    """Returns whether a process's log line says that its phase is over."""
    return _END in line


def end_imports() -> None:
    """Modules are imported, whose objects stay until the end: Python's collector, off until now, has no need
    to look at them.
    """
    gc.freeze()
    gc.enable()


def note_imports() -> None:
    """A phase of what came before: from the kernel's start of this process, its interpreter, imports."""
    end_imports()
    _phases.add("starting Python", _process_age_s())


def _process_age_s() -> float:
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    with open("/proc/uptime") as file:
        uptime_s = float(file.read().split()[0])
    return uptime_s - ticks / _CLOCK_TICKS
