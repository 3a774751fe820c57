"""Uploaded files and the results of batches, on disk within a bound, each owner's for itself."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.batches.records import Records, new_id, write_facts
from gateway.schemas.batches import LONGEST_LIFE_S
from gateway.schemas.errors import ApiError
from moebius.config import GatewayConfig
from moebius.errors import ConfigError

DATA = "data"
_PREFIX = "file-"
_CHECK_EVERY = 16 * 2**20  # bytes of an upload between two looks at how much all files take
_FULL = (errno.ENOSPC, errno.EDQUOT)


def check_directory(settings: GatewayConfig) -> None:
    """Raises ConfigError when the configured directory cannot be used; the first file creates it."""
    directory = settings.batch_directory
    if directory is None:
        return
    nearest = next(place for place in (directory, *directory.parents) if place.exists())
    try:
        if nearest == directory:
            os.listdir(directory)
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise ConfigError(
            f"batch_dir: {settings.batch_dir} cannot be used: {error.strerror}; allowed: a directory that "
            "can be read and written, or off"
        ) from None


def storage_error(error: OSError) -> ApiError:
    """Returns what clients are sent when the disk is full or fails."""
    if error.errno in _FULL:
        return ApiError(507, "the server's disk for files and batches is full", code="storage_full")
    return ApiError(
        503,
        f"files and batches cannot be stored or read at the moment: {error.strerror}",
        code="storage_unavailable",
        retry_after_s=5,
    )


@contextlib.contextmanager
def storing() -> Iterator[None]:
    """Turns errors of the disk into answers."""
    try:
        yield
    except OSError as error:
        raise storage_error(error) from error


@dataclass(frozen=True)
class FileFacts:
    """What an upload says of its file besides the content; filled by the route."""

    filename: str
    purpose: str
    life_s: int = LONGEST_LIFE_S


class Upload:
    """A file that is being written; made by `FileStore.upload`."""

    def __init__(self, store: FileStore, file_id: str, directory: Path) -> None:
        self._store = store
        self.id = file_id
        self._directory = directory
        self._file = (directory / DATA).open("wb")
        self._unchecked = 0
        self.size = 0  # bytes

    def write(self, data: bytes) -> None:
        """Appends to the file. Raises ApiError 413 or 400 above the bounds, OSError."""
        self.size += len(data)
        self._unchecked += len(data)
        if self.size > self._store.most_file_bytes:
            raise self._store.too_large()
        if self._unchecked > _CHECK_EVERY:
            self._unchecked = 0
            self._store.check_room()
        self._file.write(data)

    def finish(self, facts: FileFacts) -> dict[str, Any]:
        """Completes the file, durably. Returns it as clients see it. Raises OSError."""
        self._file.flush()
        os.fsync(self._file.fileno())
        described = _described(self.id, self.size, facts)
        write_facts(self._directory, described)
        return described

    def close(self) -> None:
        """Closes the file; one that is not finished is removed by its context."""
        self._file.close()


class FileStore:
    """All files of a directory. Methods block on the disk."""

    def __init__(self, root: Path, most_bytes: int, most_file_bytes: int) -> None:
        """`most_bytes`: of everything below `root`; `most_file_bytes`: of an upload."""
        self._root = root
        self._most_bytes = most_bytes
        self.most_file_bytes = most_file_bytes
        self.records = Records(root, "files")

    def too_large(self) -> ApiError:
        """Returns the refusal of a file above the bound."""
        message = f"the file is larger than {self.most_file_bytes / 2**20:g} MiB (batch_file_mib)"
        return ApiError(413, message, param="file", code="file_too_large")

    def check_room(self, more: int = 0) -> None:
        """Raises ApiError 400 if `more` bytes would take all files and batches above the bound."""
        if used_bytes(self._root) + more > self._most_bytes:
            raise ApiError(
                400,
                f"files and batches of this server may take {self._most_bytes / 2**30:g} GiB "
                "(batch_dir_gib): delete some that are not needed any more",
                code="storage_limit_exceeded",
            )

    @contextlib.contextmanager
    def upload(self, owner: str) -> Iterator[Upload]:
        """Yields a file to write, which exists once it is finished and the context has ended.

        Raises ApiError 400 where there is no room, OSError.
        """
        self.check_room()
        file_id = new_id(_PREFIX)
        with self.records.new(owner, file_id) as directory:
            made = Upload(self, file_id, directory)
            try:
                yield made
            finally:
                made.close()

    def adopt(self, owner: str, file_id: str, source: Path, facts: FileFacts) -> None:
        """Makes a file of `source`, without copying it; does nothing where that was done before."""
        if self.records.facts(owner, file_id) is not None:
            return
        with self.records.new(owner, file_id) as directory:
            os.link(source, directory / DATA)
            write_facts(directory, _described(file_id, source.stat().st_size, facts))

    def find(self, owner: str, file_id: str) -> dict[str, Any] | None:
        """Returns a file as clients see it, or None if this owner has none of this id that is not expired."""
        facts = self.records.facts(owner, file_id)
        return None if facts is None or facts["expires_at"] <= time.time() else facts

    def data(self, owner: str, file_id: str) -> Path:
        """Returns where a file's bytes are."""
        return self.records.path(owner, file_id) / DATA

    def sweep(self) -> None:
        """Deletes expired files, and what killed processes have left."""
        self.records.sweep()
        for owner in self.records.owners():
            for file_id in self.records.ids(owner):
                if self.find(owner, file_id) is None:
                    self.records.delete(owner, file_id)


def new_file_id() -> str:
    """Returns an id for `FileStore.adopt`."""
    return new_id(_PREFIX)


def _described(file_id: str, size: int, facts: FileFacts) -> dict[str, Any]:
    now = int(time.time())
    return {
        "id": file_id,
        "object": "file",
        "bytes": size,
        "created_at": now,
        "expires_at": now + facts.life_s,
        "filename": facts.filename,
        "purpose": facts.purpose,
        "status": "processed",
        "status_details": None,
    }


def used_bytes(root: Path) -> int:
    """Returns the bytes of all files below a directory; one with several names counts once."""
    sizes: dict[int, int] = {}
    waiting = [str(root)]
    while waiting:
        try:
            for entry in os.scandir(waiting.pop()):
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                else:
                    found = entry.stat(follow_symlinks=False)
                    sizes[found.st_ino] = found.st_size
        except FileNotFoundError:
            continue  # deleted meanwhile
    return sum(sizes.values())
