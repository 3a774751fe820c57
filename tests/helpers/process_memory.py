"""Changes private memory of another process, as faulty memory does: through /proc."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def places_in(pid: int, content: bytes) -> list[int]:
    """Addresses at which the process has these bytes in memory of its own that it may write.

    Raises OSError for a process that has ended, or is not the caller's.
    """
    return [
        address for address in _candidates(pid, content[:256]) if read(pid, address, len(content)) == content
    ]


def read(pid: int, address: int, count: int) -> bytes:
    """Fewer bytes where the memory ends. Raises OSError."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(count)


def write(pid: int, address: int, content: bytes) -> None:
    """Raises OSError."""
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        memory.seek(address)
        memory.write(content)


def _candidates(pid: int, pattern: bytes) -> Iterator[int]:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw-p .* 0 +(\[heap\])?$", line)
        if found is None:
            continue
        begin, end = int(found[1], 16), int(found[2], 16)
        try:
            content = read(pid, begin, end - begin)
        except OSError:  # it was unmapped meanwhile
            continue
        at = content.find(pattern)
        while at >= 0:
            yield begin + at
            at = content.find(pattern, at + 1)
