"""Blocks on a disk, in a directory that engines share: they outlive every process.

Each engine appends to a file of its own and reads those of all others with its identity. A directory has a
budget: where a new file needs room, files that nothing appends to go, those of other models or versions
first, then the least recently used, and at last, while they are no more than half of the budget, those that
hold prefixes which are kept. What goes wrong with the disk costs time only: a block that cannot be
read is computed again, and after an error of writing nothing is written for a while; one log line says so.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from gpu_service.cache.tiers.block_reader import BlockReader
from gpu_service.cache.tiers.digests import DIGEST_BYTES, ENGINE_BYTES
from gpu_service.cache.tiers.disk_cipher import NO_KEY, DiskCipher, FileCipher
from gpu_service.cache.tiers.disk_file import (
    SUFFIX,
    Bytes,
    DiskRecord,
    FileReader,
    FileWriter,
    UnreadableBlock,
    file_bytes,
    is_locked,
    read_header,
    remove_file,
)
from gpu_service.cache.tiers.disk_marks import append_mark, read_marks
from moebius.errors import UserError

_log = structlog.get_logger(__name__)
# A file is at most this part of the budget, and so large: what goes at once when room is needed.
_FILE_PART, _LARGEST_FILE = 8, 2**30
# After an error nothing is written for so long, seconds; and how old the time of a file's last use, or until
# when it is kept, may be.
_PAUSE_S, _USED_S = 60.0, 10.0
# Errors of a file that was removed: on this host, and on another one that shares the directory.
_GONE = (errno.ENOENT, errno.ESTALE)


class DiskTier:
    """Any thread may call `record` and `kept_until`, one thread calls `append` and `keep`, and one `read` and
    `refresh`.
    """

    def __init__(
        self,
        directory: Path,
        identity: bytes,
        budget: int,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        num_writers: int = 1,
        cipher: DiskCipher | None = None,
    ) -> None:
        """`budget`: bytes of all files of the directory. `wall_clock`: seconds since the epoch.

        `num_writers`: ranks of an engine, each of which has a file open; their identities begin alike
        (`digests.rank_identity`). `cipher`: None: payloads are not encrypted.

        Raises UserError when the directory cannot be used.
        """
        self._directory, self._identity, self.budget = directory, identity, budget
        self._file_bytes = min(_LARGEST_FILE, budget // (_FILE_PART * num_writers))
        self._clock, self._wall_clock, self._cipher = clock, wall_clock, cipher
        self._ciphers: dict[Path, FileCipher] = {}
        self._records: dict[bytes, DiskRecord] = {}
        self._readers: dict[Path, FileReader] = {}
        self._blocks = BlockReader()
        self._used: dict[Path, float] = {}
        # Until when pages are kept, by digest, seconds since the epoch; marks of each file that were read.
        self._kept: dict[bytes, float] = {}
        self._num_marks: dict[Path, int] = {}
        self._writer: FileWriter | None = None
        self._paused_until = 0.0
        # Grows with every `drop`: what was begun before it is not kept.
        self.generation = 0
        self.written_bytes = self.read_bytes = self.num_errors = 0
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_unknown()
            self.refresh()
        except OSError as error:
            raise UserError(f"kv_disk_dir: {directory} cannot be used: {error.strerror or error}") from None

    def record(self, key: bytes) -> DiskRecord | None:
        """Returns where a block is; None: it is not here."""
        return self._records.get(key)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def keys(self) -> list[bytes]:
        """The keys of all blocks."""
        return list(self._records)

    @property
    def kept_keys(self) -> list[bytes]:
        """The keys of the pages that are kept. Any thread may ask."""
        now = self._wall_clock()
        return [key for key, until in list(self._kept.items()) if until > now and key in self._records]

    @property
    def held_bytes(self) -> int:
        """Bytes of the blocks that can be read."""
        return sum(record.nbytes for record in list(self._records.values()))

    @property
    def reads_directly(self) -> bool:
        """Whether reads go past the page cache, as far as is known."""
        return self._blocks.is_direct

    @property
    def accepts(self) -> bool:
        """Whether blocks may be written now."""
        return self._clock() >= self._paused_until

    def append(self, key: bytes, parent: bytes, tokens: int, payload: Bytes) -> bool:
        """Writes a block; False: it was not written, and after an error nothing is for a while."""
        generation = self.generation
        if not self.accepts or key in self._records:
            return False
        try:
            record = self._file_for(len(payload)).append(key, parent, tokens, payload)
        except OSError as error:
            self._paused_until = self._clock() + _PAUSE_S
            self._note("KV blocks are not written to disk for a while", error, seconds=_PAUSE_S)
            return False
        if generation == self.generation:
            self._records[key] = record
            self.written_bytes += record.nbytes
            until = self.kept_until(key[:DIGEST_BYTES])
            if until > self._wall_clock():
                self._mark(record.path, key[:DIGEST_BYTES], until)
        return True

    def keep(self, digests: Sequence[bytes], until: float) -> None:
        """The files of these pages, which are a prefix, go after others until a time, seconds since the
        epoch; pages that are not here yet will be kept, too.
        """
        last: dict[Path, bytes] = {}
        for digest in digests:
            if until < self.kept_until(digest) + _USED_S:
                continue
            self._kept[digest] = until
            record = self._records.get(digest)
            if record is not None:
                last[record.path] = digest
        for path, digest in last.items():
            self._mark(path, digest, until)

    def kept_until(self, digest: bytes) -> float:
        """Returns until when a page and the state after it are kept, seconds since the epoch; 0: not kept."""
        return self._kept.get(digest, 0.0)

    def read(self, record: DiskRecord, into: Bytes) -> bool:
        """Reads a block into uint8 `[nbytes]`; False: it cannot be read and is forgotten."""
        try:
            self._used_now(record.path)
            self._blocks.read(record, into, self._cipher_of(record.path))
        except OSError as error:
            if error.errno in _GONE:  # Another engine needed the room.
                self._forget(record.path)
                return False
            self._records.pop(record.key, None)
            self._note("a KV block on disk cannot be read and is computed again", error)
            return False
        self.read_bytes += record.nbytes
        return True

    def announce(self, keys: Iterable[bytes]) -> None:
        """These are going to be read, in this order: those that lie together are read at once."""
        records = [self._records.get(key) for key in keys]
        with suppress(OSError):  # `read` meets it again
            self._blocks.announce(record for record in records if record is not None)

    def refresh(self) -> None:
        """Takes in what other engines have written. Raises OSError."""
        generation, own = self.generation, None if self._writer is None else self._writer.path
        for path in self._files():
            if path == own:
                continue
            try:
                if path not in self._readers and not self._is_readable(path):
                    continue
                reader = self._readers.setdefault(path, FileReader(path))
                for record in reader.new_records():
                    if generation == self.generation:
                        self._records.setdefault(record.key, record)
            except FileNotFoundError:
                self._forget(path)
        for path in [*self._readers, *([own] if own else [])]:
            marks, self._num_marks[path] = read_marks(path, self._num_marks.get(path, 0))
            for digest, until in marks:
                if generation == self.generation:
                    self._take_in_mark(digest, until)
        for path in [path for path in self._blocks.paths if not path.exists()]:
            self._blocks.forget(path)

    def drop(self) -> None:
        """Forgets all blocks and removes their files, but for those that other engines append to."""
        self.generation += 1
        self._records, self._kept = {}, {}
        own = None if self._writer is None else self._writer.path
        try:
            for path in self._files():
                if path == own or (self._is_readable(path) and not is_locked(path)):
                    remove_file(path)
        except OSError as error:
            self._note("KV blocks on disk are forgotten, but their files are left", error)

    def close(self) -> None:
        """Ends this engine's file. To be called when no other thread uses the tier."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._blocks.close()

    def _files(self) -> list[Path]:
        return sorted(self._directory.glob(f"*{SUFFIX}"))

    def _file_for(self, nbytes: int) -> FileWriter:
        """The file to append to, a new one if the last is full or was removed. Raises OSError."""
        size = max(nbytes, self._file_bytes)
        writer = self._writer
        if writer is not None and (writer.nbytes + nbytes > size or not writer.path.exists()):
            writer.close()
            self._writer = writer = None
        if writer is None:
            with self._alone():
                self._make_room(size)
                self._writer = writer = FileWriter(self._directory, self._identity, self._cipher)
        return writer

    def _make_room(self, nbytes: int) -> None:
        """Removes files until a new one has room. Raises OSError where those that remain are in use."""
        paths, kept = self._files(), self._kept_files()
        files = [(path in kept, self._is_ours(path), path.stat().st_mtime, path) for path in paths]
        total = sum(file_bytes(path) for path in paths)
        for *_, path in sorted(files):
            if total + nbytes <= self.budget:
                return
            if not is_locked(path):
                total -= file_bytes(path)
                remove_file(path)
                self._forget(path)
        if total + nbytes > self.budget:
            raise OSError(f"kv_disk_gib: {total} of {self.budget} bytes are in use by other engines")

    def _kept_files(self) -> set[Path]:
        """The files that hold something that is kept, without those of too many whose time ends first."""
        now, times = self._wall_clock(), dict[Path, float]()
        for digest, until in list(self._kept.items()):
            if until <= now:
                self._kept.pop(digest, None)
        for path in self._files():
            until = max((until for _, until in read_marks(path)[0]), default=0.0)
            if until > now:
                times[path] = until
        total, kept = sum(file_bytes(path) for path in times), set(times)
        for path in sorted(times, key=lambda path: times[path]):
            if total <= self.budget // 2:
                break
            total -= file_bytes(path)
            kept.remove(path)
        return kept

    def _mark(self, path: Path, digest: bytes, until: float) -> None:
        try:
            append_mark(path, digest, until)
        except OSError as error:
            self._note("how long KV blocks are kept is not written to disk", error)

    def _take_in_mark(self, digest: bytes, until: float) -> None:
        """A page is kept, and all before it."""
        record = self._records.get(digest)
        while record is not None and until > self.kept_until(digest):
            self._kept[digest] = until
            digest = record.parent
            record = self._records.get(digest)

    def _is_ours(self, path: Path) -> bool:
        """Whether an engine of this kind wrote a file, whichever rank of it."""
        found = read_header(path)
        return found is not None and found.identity[:ENGINE_BYTES] == self._identity[:ENGINE_BYTES]

    def _is_readable(self, path: Path) -> bool:
        """Whether a file is of this rank and has its key. Raises OSError."""
        found = read_header(path)
        return found is not None and found.identity == self._identity and found.key == self._key_name

    @property
    def _key_name(self) -> bytes:
        return NO_KEY if self._cipher is None else self._cipher.name

    def _cipher_of(self, path: Path) -> FileCipher | None:
        """Raises OSError."""
        if self._cipher is not None and path not in self._ciphers:
            header = read_header(path)
            if header is None:
                raise UnreadableBlock(f"{path.name} has lost its header")
            self._ciphers[path] = self._cipher.of_file(header.salt)
        return self._ciphers.get(path)

    def _remove_unknown(self) -> None:
        """Files of another version of this format are of no use to any engine that runs; those of another
        key may be.
        """
        num_skipped = 0
        with self._alone():
            for path in self._files():
                header = read_header(path)
                if header is None and not is_locked(path):
                    _log.info("a KV file of another version is removed", path=str(path))
                    remove_file(path)
                num_skipped += header is not None and header.key != self._key_name
        if num_skipped:
            _log.warning(
                "KV files with another key, or none, are skipped",
                directory=str(self._directory),
                files=num_skipped,
            )

    def _forget(self, path: Path) -> None:
        """A file has gone."""
        self._readers.pop(path, None)
        self._ciphers.pop(path, None)
        self._num_marks.pop(path, None)
        for key in [key for key, record in list(self._records.items()) if record.path == path]:
            self._records.pop(key, None)

    def _used_now(self, path: Path) -> None:
        """Keeps a file's time of last use up to date. Raises OSError."""
        now = self._clock()
        if now - self._used.get(path, -_USED_S) >= _USED_S:
            self._used[path] = now
            os.utime(path)

    def _note(self, event: str, error: OSError, **fields: float) -> None:
        self.num_errors += 1
        _log.warning(event, directory=str(self._directory), because=error.strerror or str(error), **fields)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While no other engine makes room in the directory."""
        with (self._directory / "lock").open("ab") as lock:
            os.fchmod(lock.fileno(), 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
