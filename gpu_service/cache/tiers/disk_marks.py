"""Until when prefixes of a file of the disk tier are kept: marks beside the file, which any engine may add.

    NAME.kept     mark | mark | …

A mark names the last page of a prefix and a time; it counts for all pages before that one, too. Marks are
appended with one write each. One that is torn, or another program's, does not count.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from gpu_service.cache.tiers.disk_file import KEPT_SUFFIX, record_checksum

_MARK = np.dtype([("digest", "V32"), ("until", "<f8"), ("checksum", "<u8")])


def append_mark(path: Path, digest: bytes, until: float) -> None:
    """Keeps a prefix of a file until a time, seconds since the epoch. Raises OSError."""
    mark = np.zeros(1, _MARK)
    mark[0] = (digest, until, 0)
    mark["checksum"] = record_checksum(mark[0])
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    descriptor = os.open(path.with_suffix(KEPT_SUFFIX), flags, 0o600)
    try:
        os.write(descriptor, mark.tobytes())
    finally:
        os.close(descriptor)


def read_marks(path: Path, first: int = 0) -> tuple[list[tuple[bytes, float]], int]:
    """Returns digests and times of the marks of a file from the `first` on, and how many there are.

    Raises OSError.
    """
    try:
        with path.with_suffix(KEPT_SUFFIX).open("rb") as file:
            file.seek(first * _MARK.itemsize)
            data = file.read()
    except FileNotFoundError:
        return [], 0
    marks = np.frombuffer(data[: len(data) // _MARK.itemsize * _MARK.itemsize], _MARK)
    whole = [mark for mark in marks if int(mark["checksum"]) == record_checksum(mark)]
    return [(mark["digest"].tobytes(), float(mark["until"])) for mark in whole], first + len(marks)
