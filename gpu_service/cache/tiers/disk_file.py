"""Files of the disk tier: blocks that are only ever appended, each with a checksum, and an index beside them.

    NAME.kv       header | record, payload | record, payload | …
    NAME.index    record | record | …              the same records again, so that a start reads few bytes
    NAME.kept     mark | mark | …                  what is kept for a time (`disk_marks`)

A record has a checksum of itself and one of its payload (that of packed experts, `weight_digest`). An index
that is torn, short or missing is built again from the records in front of the payloads; what follows the last
whole record is the end of a writer that was killed, and is not read. Payloads may be encrypted, each by
itself (`disk_cipher`); the header says by which key. Files are readable by their owner only. The writer of a
file holds an exclusive lock on it as long as it may append.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_service.cache.tiers.digests import DIGEST_BYTES, is_state, state_key
from gpu_service.cache.tiers.disk_cipher import NO_KEY, SALT_BYTES, DiskCipher
from moebius import _kernels

Bytes = npt.NDArray[np.uint8]
SUFFIX, INDEX_SUFFIX, KEPT_SUFFIX = ".kv", ".index", ".kept"
_MAGIC = b"moebius KV\0\0"
_VERSION = 2
_HEADER = np.dtype(
    [
        ("magic", "V12"),
        ("version", "<u4"),
        ("identity", "V32"),
        ("key", "V16"),  # which key encrypts payloads; zeros: none does
        ("salt", "V16"),
        ("checksum", "<u8"),
    ]
)
_RECORD = np.dtype(
    [
        ("digest", "V32"),
        ("parent", "V32"),
        ("is_state", "<u4"),
        ("tokens", "<u4"),
        ("offset", "<u8"),  # of the payload
        ("nbytes", "<u8"),
        ("payload_checksum", "<u8"),
        ("checksum", "<u8"),  # of the record up to here
    ]
)


class DiskRecord(NamedTuple):
    """Where a block lies; filled from a file's records."""

    path: Path
    key: bytes
    parent: bytes
    tokens: int
    offset: int
    nbytes: int
    checksum: int


class UnreadableBlock(OSError):
    """A payload is not what was written: the block is as good as absent."""


def record_checksum(record: npt.NDArray[np.void] | np.void) -> int:
    """Returns the checksum of a record, header or mark, whose last field is the place of it, 8 bytes."""
    return _kernels.weight_digest(record.tobytes()[:-8], 1)


def _packed(key: bytes, parent: bytes, tokens: int, offset: int, payload: Bytes) -> npt.NDArray[np.void]:
    record = np.zeros(1, _RECORD)
    checksum = _kernels.weight_digest(payload, 0)
    record[0] = (key[:DIGEST_BYTES], parent, is_state(key), tokens, offset, len(payload), checksum, 0)
    record["checksum"] = record_checksum(record)
    return record


def _parsed(path: Path, data: bytes) -> DiskRecord | None:
    """None: the bytes are no record."""
    record = np.frombuffer(data, _RECORD)
    if int(record["checksum"][0]) != record_checksum(record):
        return None
    found = record[0]
    digest = found["digest"].tobytes()
    key = state_key(digest) if found["is_state"] else digest
    numbers = (int(found[name]) for name in ("tokens", "offset", "nbytes", "payload_checksum"))
    return DiskRecord(path, key, found["parent"].tobytes(), *numbers)


class Header(NamedTuple):
    """Who can read a file; filled by `read_header`."""

    identity: bytes
    key: bytes
    salt: bytes


def read_header(path: Path) -> Header | None:
    """Returns what a file was written with; None: it is no file of this version. Raises OSError."""
    with path.open("rb") as file:
        data = file.read(_HEADER.itemsize)
    if len(data) < _HEADER.itemsize:
        return None
    header = np.frombuffer(data, _HEADER)
    is_ours = header["magic"][0].tobytes() == _MAGIC and int(header["version"][0]) == _VERSION
    if not is_ours or int(header["checksum"][0]) != record_checksum(header):
        return None
    return Header(*(header[name][0].tobytes() for name in Header._fields))


def is_locked(path: Path) -> bool:
    """Returns whether a living process may append to a file. Raises OSError."""
    # Open for writing, without which a network's file system has no exclusive lock.
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def file_bytes(path: Path) -> int:
    """Returns the bytes of a file and of what is beside it; 0 for one that has just gone."""
    total = 0
    for part in _parts(path):
        try:
            total += part.stat().st_size
        except FileNotFoundError:
            continue
    return total


def remove_file(path: Path) -> None:
    """Removes a file and what is beside it. Raises OSError."""
    for part in _parts(path):
        part.unlink(missing_ok=True)


def _parts(path: Path) -> tuple[Path, ...]:
    return path, path.with_suffix(INDEX_SUFFIX), path.with_suffix(KEPT_SUFFIX)


class FileReader:
    """Follows the records of one file, which another process may be writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Bytes of the index that were read, and of the file that they cover.
        self._indexed, self._covered = 0, _HEADER.itemsize

    def new_records(self) -> Iterator[DiskRecord]:
        """Yields the records that were appended since the last call. Raises OSError."""
        yield from self._from_index()
        if not is_locked(self.path):
            yield from self._from_file()

    def _from_index(self) -> Iterator[DiskRecord]:
        try:
            with self.path.with_suffix(INDEX_SUFFIX).open("rb") as file:
                file.seek(self._indexed)
                data = file.read()
        except FileNotFoundError:
            return
        for begin in range(0, len(data) - _RECORD.itemsize + 1, _RECORD.itemsize):
            record = _parsed(self.path, data[begin : begin + _RECORD.itemsize])
            if record is None or record.offset != self._covered + _RECORD.itemsize:
                return
            self._indexed += _RECORD.itemsize
            self._covered = record.offset + record.nbytes
            yield record

    def _from_file(self) -> Iterator[DiskRecord]:
        """Yields what the index lacks though its writer has ended: appends it there, as far as it
        is whole.
        """
        with self.path.open("rb") as file:
            size, found = os.fstat(file.fileno()).st_size, []
            while self._covered + _RECORD.itemsize <= size:
                data = os.pread(file.fileno(), _RECORD.itemsize, self._covered)
                record = _parsed(self.path, data)
                begin = self._covered + _RECORD.itemsize
                if record is None or record.offset != begin or begin + record.nbytes > size:
                    break
                found.append(data)
                self._covered = record.offset + record.nbytes
                yield record
        if found:
            with self.path.with_suffix(INDEX_SUFFIX).open("r+b" if self._indexed else "wb") as index:
                os.fchmod(index.fileno(), 0o600)
                index.truncate(self._indexed)
                index.seek(self._indexed)
                index.write(b"".join(found))
            self._indexed += len(found) * _RECORD.itemsize


class FileWriter:
    """A new file, locked until `close`. A write that fails leaves the file as it was before."""

    def __init__(self, directory: Path, identity: bytes, cipher: DiskCipher | None = None) -> None:
        """`cipher`: None: payloads are not encrypted. Raises OSError."""
        salt = secrets.token_bytes(SALT_BYTES)
        self._cipher = None if cipher is None else cipher.of_file(salt)
        self.path = directory / f"{identity.hex()[:16]}-{secrets.token_hex(8)}{SUFFIX}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.open(self.path, flags, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        header = np.zeros(1, _HEADER)
        header[0] = (_MAGIC, _VERSION, identity, NO_KEY if cipher is None else cipher.name, salt, 0)
        header["checksum"] = record_checksum(header)
        try:
            _write(self._file, [header.tobytes()], 0)
            self._index = os.open(self.path.with_suffix(INDEX_SUFFIX), flags, 0o600)
        except OSError:
            os.close(self._file)
            remove_file(self.path)
            raise
        self.nbytes = _HEADER.itemsize
        self._indexed = 0

    def append(self, key: bytes, parent: bytes, tokens: int, payload: Bytes) -> DiskRecord:
        """Writes a block, uint8 `[n]`. Raises OSError."""
        if self._cipher is not None:
            payload = self._cipher.seal(key, payload)
        record = _packed(key, parent, tokens, self.nbytes + _RECORD.itemsize, payload)
        try:
            end = _write(self._file, [record.tobytes(), payload.data], self.nbytes)
            _write(self._index, [record.tobytes()], self._indexed)
        except OSError:
            os.ftruncate(self._file, self.nbytes)
            os.ftruncate(self._index, self._indexed)
            raise
        # Read again only after a restart, or once memory has evicted the block. The system begins to write
        # what is new, and gives up what it has written since the last calls.
        os.posix_fadvise(self._file, 0, end, os.POSIX_FADV_DONTNEED)
        self.nbytes, self._indexed = end, self._indexed + _RECORD.itemsize
        found = _parsed(self.path, record.tobytes())
        assert found is not None
        return found

    def close(self) -> None:
        """Ends the file; others may remove it from now on."""
        os.close(self._index)
        os.close(self._file)


def _write(descriptor: int, parts: list[bytes | memoryview], offset: int) -> int:
    """Writes all parts at a place; returns their end. Raises OSError, ENOSPC for one."""
    for part in parts:
        left = memoryview(part)
        while left:
            written = os.pwrite(descriptor, left, offset)
            left, offset = left[written:], offset + written
    return offset
