"""Reads blocks of the disk tier past the page cache of the system, whose memory experts need more.

A direct read (O_DIRECT) goes into a buffer whose address, like the place in the file and the length, is a
multiple of `_ALIGNMENT`; blocks lie anywhere, so that they are copied from there. Blocks that follow one
another in a file are read together, as far as they were announced: the system reads nothing ahead then. Where
a file system has no direct reads, its page cache is used, which one log line says.
"""

from __future__ import annotations

import errno
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog

from gpu_service.cache.tiers.disk_cipher import FileCipher
from gpu_service.cache.tiers.disk_file import DiskRecord, UnreadableBlock
from moebius import _kernels

Bytes = npt.NDArray[np.uint8]
_log = structlog.get_logger(__name__)
# Disks have blocks of 512 or 4096 bytes; a file system that wants more refuses, and is read with its cache.
_ALIGNMENT = 4096
# Bytes of the buffer, and of one read: large enough that a disk works on several parts of it at once.
_BUFFER_BYTES = 4 * 2**20
# Between blocks that were written one after the other lies a record, and nothing else.
_MOST_BETWEEN = 4096


class BlockReader:
    """Open files, and the bytes that were read last. Used by one thread."""

    def __init__(self) -> None:
        # Whether reads go past the page cache; it stays so until a file system refuses.
        self.is_direct = True
        self._descriptors: dict[Path, int] = {}
        self._buffer: Bytes | None = None
        # What the buffer holds: a file, and its bytes from here to there. Used where it was announced.
        self._held: tuple[Path, int, int] | None = None
        # Of each file the begin and end of what is announced, ascending.
        self._runs: dict[Path, list[tuple[int, int]]] = {}

    @property
    def paths(self) -> list[Path]:
        """The files that are open."""
        return list(self._descriptors)

    def announce(self, records: Iterable[DiskRecord]) -> None:
        """These blocks are going to be read, in this order, in place of what was announced before.

        Raises OSError.
        """
        self._runs, self._held = {}, None
        for record in records:
            self._open(record.path)
            runs, end = self._runs.setdefault(record.path, []), record.offset + record.nbytes
            if runs and 0 <= record.offset - runs[-1][1] <= _MOST_BETWEEN:
                runs[-1] = (runs[-1][0], end)
            else:
                runs.append((record.offset, end))
        for path, runs in self._runs.items():
            runs.sort()
            if not self.is_direct:
                for begin, end in runs:
                    os.posix_fadvise(self._open(path), begin, end - begin, os.POSIX_FADV_WILLNEED)

    def read(self, record: DiskRecord, into: Bytes, cipher: FileCipher | None = None) -> None:
        """Reads a block into uint8 `[n]`. `cipher`: of its file, None: it is not encrypted.

        Raises UnreadableBlock, or OSError of the system.
        """
        stored = into if cipher is None else np.empty(record.nbytes, np.uint8)
        self._fill(record, stored)
        if _kernels.weight_digest(stored, 0) != record.checksum:
            raise UnreadableBlock(
                f"{record.path.name}: a block at byte {record.offset} differs from its checksum"
            )
        if cipher is not None and not cipher.open(record.key, stored, into):
            raise UnreadableBlock(f"{record.path.name}: a block at byte {record.offset} cannot be decrypted")

    def forget(self, path: Path) -> None:
        """Closes a file that has gone."""
        if self._held is not None and self._held[0] == path:
            self._held = None
        descriptor = self._descriptors.pop(path, None)
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        """Closes all files."""
        for path in self.paths:
            self.forget(path)

    def _open(self, path: Path) -> int:
        """Returns the descriptor of an open file. Raises OSError."""
        if path not in self._descriptors:
            flags = os.O_RDONLY | os.O_CLOEXEC
            try:
                descriptor = os.open(path, flags | (os.O_DIRECT if self.is_direct else 0))
            except OSError as error:
                if not self._refused(path, error):
                    raise
                descriptor = os.open(path, flags)
            if not self.is_direct:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            self._descriptors[path] = descriptor
        return self._descriptors[path]

    def _refused(self, path: Path, error: OSError) -> bool:
        """Returns whether an error means that there are no direct reads here: then all files are opened
        again, without.
        """
        if not self.is_direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        self.is_direct = False
        self.close()
        _log.info(
            "the file system has no direct reads: KV blocks come through the page cache, which takes RAM",
            directory=str(path.parent),
            because=error.strerror,
        )
        return True

    def _fill(self, record: DiskRecord, into: Bytes) -> None:
        """Reads the bytes of a block, whatever they are. Raises UnreadableBlock, OSError."""
        done = 0
        while done < len(into):
            begin, end = record.offset + done, record.offset + len(into)
            try:
                count = self._copy(record.path, begin, end, into[done:])
            except OSError as error:
                if not self._refused(record.path, error):
                    raise
                continue
            if count == 0:
                raise UnreadableBlock(f"{record.path.name} ends before byte {end}")
            done += count

    def _copy(self, path: Path, begin: int, end: int, into: Bytes) -> int:
        """Copies bytes from `begin` on, up to `end`; returns how many, 0 where the file ends before.

        Raises OSError.
        """
        if self.is_direct:
            # May find that there are no direct reads.
            descriptor = self._open(path)
        if not self.is_direct:
            return os.preadv(self._open(path), [into.data], begin)
        held = self._held if self._announced_end(path, begin) else None
        if held is None or held[0] != path or not held[1] <= begin < held[2]:
            held = self._held = self._read_direct(path, descriptor, begin, end)
        _, first, last = held
        count = max(0, min(last, end) - begin)
        assert self._buffer is not None
        into[:count] = self._buffer[begin - first : begin - first + count]
        return count

    def _read_direct(self, path: Path, descriptor: int, begin: int, end: int) -> tuple[Path, int, int]:
        """Fills the buffer with a file's bytes from `begin` on: up to `end`, further if what follows is
        announced. Returns what it holds. Raises OSError.
        """
        if self._buffer is None:
            # A mapping begins at a page.
            self._buffer = np.frombuffer(mmap.mmap(-1, _BUFFER_BYTES), np.uint8)
        first = begin - begin % _ALIGNMENT
        # What lies behind may be about to be written, and is not kept.
        last = min(max(end, self._announced_end(path, begin)), first + _BUFFER_BYTES)
        length, found = -(-(last - first) // _ALIGNMENT) * _ALIGNMENT, 0
        while first + found < last:
            aligned = found - found % _ALIGNMENT
            count = os.preadv(descriptor, [self._buffer[aligned:length].data], first + aligned)
            if aligned + count <= found:  # the end of the file
                break
            found = aligned + count
        return path, first, min(first + found, last)

    def _announced_end(self, path: Path, place: int) -> int:
        """Returns where what is announced around a place of a file ends; 0: it was not."""
        runs = self._runs.get(path, [])
        index = bisect_right(runs, place, key=lambda run: run[0]) - 1
        return runs[index][1] if index >= 0 and place < runs[index][1] else 0
