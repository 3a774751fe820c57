"""Digests that are kept for as long as nothing writes to their file, so that none is computed twice.

A file is the same while its place, size and times are. Its times say nothing of a write that comes right
after another one (file systems count in milliseconds, those of servers in seconds, and memory that a process
has mapped is written back within half a minute): so what was written recently is read each time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable

# Longer than Linux keeps changed memory before it writes it back (`vm.dirty_expire_centisecs`).
_SETTLED_S = 60.0
_Signature = tuple[int, int, int, int, int]


class SettledFiles:
    """The digests of one process. Any thread may ask."""

    def __init__(self, settled_s: float = _SETTLED_S) -> None:
        """`settled_s`: seconds for which nothing may have written to a file whose digest is kept."""
        self._settled_s = settled_s
        self._lock = threading.Lock()
        # By file and what was asked of it: the file as it was then, and the digest.
        self._known: dict[tuple[str, Hashable], tuple[_Signature, str]] = {}

    def digest(self, path: str, descriptor: int, asked: Hashable, read: Callable[[], str]) -> str:
        """Returns what `read` does, or did for the same file; `asked`: what else the digest depends on.

        `descriptor`: of the file, opened now, since servers of files are asked at that moment whether they
        have changed.
        """
        key, status = (path, asked), os.fstat(descriptor)
        signature = (
            *(status.st_dev, status.st_ino, status.st_size),
            *(status.st_mtime_ns, status.st_ctime_ns),
        )
        with self._lock:
            known = self._known.get(key)
        if known is not None and known[0] == signature:
            return known[1]
        is_settled = max(status.st_mtime, status.st_ctime) + self._settled_s < time.time()
        digest = read()
        with self._lock:
            if is_settled:
                self._known[key] = signature, digest
            else:
                self._known.pop(key, None)
        return digest
