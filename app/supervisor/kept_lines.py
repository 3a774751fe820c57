"""The last lines of a system, in its run directory: what `moebius logs` shows.

They are what the processes print, as it is passed on to stderr, and what the supervisor logs. The run
directory may be in memory, so that no more than two files of 1 MiB are kept.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

from app.supervisor.lines import ForwardedLines

FILE, EARLIER_FILE = "lines.log", "lines.log.1"
FILE_BYTES = 1 << 20
_LOOK_S = 0.2  # between two looks for new lines
# Of a supervisor on a terminal, as ECMA-48 has them.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class _Files(RotatingFileHandler):
    """Two files; what cannot be written is an error of who writes."""

    def handleError(self, record: logging.LogRecord) -> None:
        raise


class KeptLines(logging.Handler):
    """Keeps lines, from any thread, until it is closed; as a handler of loggers it keeps what they log."""

    def __init__(self, directory: Path, json_logs: bool) -> None:
        """Raises OSError when the file cannot be made."""
        super().__init__()
        self._files = _Files(
            directory / FILE, maxBytes=FILE_BYTES, backupCount=1, encoding="utf-8", errors="replace"
        )
        self._own = ForwardedLines("supervisor", json_logs)
        self._is_open = True
        self._writing = threading.Lock()

    def write(self, line: str) -> None:
        """Keeps one line. Once there is no room for one, that is said on stderr, where all lines go, and no
        more are kept.
        """
        with self._writing:
            if not self._is_open:
                return
            try:
                self._files.emit(logging.makeLogRecord({"msg": line}))
            except OSError as error:
                self._is_open = False
                print(f"no more lines are kept for `moebius logs`: {error}", file=sys.stderr, flush=True)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps what a logger of this process writes, as it writes it to stderr."""
        for text in _COLOURS.sub("", self.format(record)).splitlines():
            if (line := self._own.forwarded(text)) is not None:
                self.write(line)

    def close(self) -> None:
        """Ends it; later lines are dropped."""
        with self._writing:
            self._is_open = False
            with contextlib.suppress(OSError):  # of a line that there was no room for
                self._files.close()
        super().close()


@contextlib.contextmanager
def last_lines(directory: Path, count: int | None) -> Iterator[tuple[list[str], TextIO]]:
    """Yields the last `count` lines (None: all), with their line ends, and the file, which has been read to
    its end.

    Raises FileNotFoundError where the system keeps none.
    """
    with (directory / FILE).open(encoding="utf-8", errors="replace") as file:
        lines = deque[str](maxlen=count)
        with (
            contextlib.suppress(FileNotFoundError),
            (directory / EARLIER_FILE).open(encoding="utf-8", errors="replace") as earlier,
        ):
            if not os.path.samestat(os.fstat(earlier.fileno()), os.fstat(file.fileno())):
                lines.extend(earlier)
        lines.extend(file)
        yield list(lines), file


def following(directory: Path, file: TextIO, has_ended: Callable[[], bool]) -> Iterator[str]:
    """Yields what is added after the place that `file` has been read to, until the system has ended."""
    with contextlib.ExitStack() as opened:
        while True:
            ended = has_ended()
            if text := file.read():
                yield text
                continue
            if ended:
                return
            with contextlib.suppress(FileNotFoundError):
                if not os.path.samestat(os.stat(directory / FILE), os.fstat(file.fileno())):
                    if text := file.read():  # written between that read and the rotation
                        yield text
                    file = opened.enter_context((directory / FILE).open(encoding="utf-8", errors="replace"))
                    continue
            time.sleep(_LOOK_S)
