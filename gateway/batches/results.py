"""The results of a batch: lines in a file that only grows, each durable before it counts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_BLOCK = 2**16


class ResultFile:
    """One file of results; used by the one process that runs the batch."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the file; a last line that a kill tore is removed. Raises OSError."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self.size = self._whole_bytes()  # bytes of complete lines
        os.ftruncate(self._descriptor, self.size)

    def _whole_bytes(self) -> int:
        """Returns the length up to the end of the last complete line."""
        end = os.fstat(self._descriptor).st_size
        while end:
            start = max(0, end - _BLOCK)
            found = os.pread(self._descriptor, end - start, start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
        return 0

    def append(self, lines: Sequence[bytes]) -> None:
        """Appends complete lines, durably. Raises OSError; then none of them is in the file."""
        data = memoryview(b"".join(lines))
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], self.size + written)
            os.fsync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, self.size)
            raise
        self.size += len(data)

    def values(self) -> Iterator[dict[str, Any]]:
        """Yields each line's value."""
        with self.path.open("rb") as lines:
            for line in lines:
                yield json.loads(line)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)
