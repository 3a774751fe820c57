"""Guards reads of the disk tier past the page cache: the same bytes as with it, of harmed files, too."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from structlog.testing import capture_logs

from gpu_service.cache.tiers import block_reader
from gpu_service.cache.tiers.block_reader import BlockReader
from gpu_service.cache.tiers.digests import identity_digest, page_digests, root_digest
from gpu_service.cache.tiers.disk_cipher import DiskCipher
from gpu_service.cache.tiers.disk_tier import DiskTier

IDENTITY = identity_digest("a model")
# Around the alignment, and larger than the buffer.
SIZES = (1, 4095, 4096, 4097, 100_000, 5 * 2**20, 7)
NAMES = page_digests(root_digest(IDENTITY, ""), np.arange(256), 2)
REFUSED = "the file system has no direct reads: KV blocks come through the page cache, which takes RAM"
UNREADABLE = "a KV block on disk cannot be read and is computed again"
Bytes = npt.NDArray[np.uint8]


def payloads(sizes: Sequence[int]) -> list[Bytes]:
    """Returns blocks of drawn bytes."""
    draw = np.random.default_rng(7)
    return [draw.integers(0, 256, nbytes, np.uint8) for nbytes in sizes]


def written(directory: Path, blocks: Sequence[Bytes], cipher: DiskCipher | None = None) -> Path:
    """Returns the file with these blocks, the names of which are `NAMES`."""
    writer = DiskTier(directory, IDENTITY, 2**30, cipher=cipher)
    for name, block in zip(NAMES, blocks, strict=False):
        assert writer.append(name, b"p" * 32, 2, block)
    writer.close()
    (path,) = directory.glob("*.kv")
    return path


def read(tier: DiskTier, index: int, nbytes: int) -> Bytes | None:
    """Returns the bytes of a block; None: it cannot be read."""
    record, into = tier.record(NAMES[index]), np.zeros(nbytes, np.uint8)
    assert record is not None
    return into if tier.read(record, into) else None


def is_direct(descriptor: int) -> bool:
    """Returns whether a file was opened for direct reads."""
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def cached_pages(descriptor: int) -> int:
    """Returns how many pages of a file the page cache holds (mincore)."""
    nbytes = os.fstat(descriptor).st_size
    with mmap.mmap(descriptor, nbytes) as pages:
        view = ctypes.c_char.from_buffer(pages)
        found = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
        status = ctypes.CDLL(None).mincore(ctypes.byref(view), ctypes.c_size_t(nbytes), found)
        del view
    assert status == 0
    return sum(page & 1 for page in found)


class Reads:
    """Reads of the system, at most `most` bytes each; counts them and, if asked, refuses direct ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int = 2**30, refuses: str = "") -> None:
        self.count, self._most, self._refuses = 0, most, refuses
        self._preadv, self._open = os.preadv, os.open
        monkeypatch.setattr(block_reader.os, "preadv", self.preadv)  # type: ignore[attr-defined]
        monkeypatch.setattr(block_reader.os, "open", self.open)  # type: ignore[attr-defined]

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.count += 1
        if self._refuses == "read" and is_direct(descriptor):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return self._preadv(descriptor, [buffers[0][: self._most]], offset)

    def open(self, path: Any, flags: int, *mode: int) -> int:
        if self._refuses == "open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return self._open(path, flags, *mode)


@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.parametrize("refuses", ["", "open", "read"])
def test_blocks_are_the_same_however_they_are_read(
    refuses: str, is_encrypted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directly or, after one log line, through the page cache; of any size, in any order, announced or
    not.
    """
    cipher = DiskCipher(b"k" * 32) if is_encrypted else None
    blocks = payloads(SIZES)
    written(tmp_path, blocks, cipher)
    Reads(monkeypatch, refuses=refuses)
    tier = DiskTier(tmp_path, IDENTITY, 2**30, cipher=cipher)
    with capture_logs() as logs:
        for order in ([*range(len(SIZES))], [3, 0, 5, 1, 6, 2, 4]):
            for announced in ([], order, order[::2]):
                tier.announce(NAMES[index] for index in announced)
                for index in order:
                    found = read(tier, index, SIZES[index])
                    assert found is not None
                    assert np.array_equal(found, blocks[index])
    assert [log["event"] for log in logs] in ([[REFUSED]] if refuses else [[], [REFUSED]])
    assert tier.num_errors == 0
    tier.close()


@pytest.mark.parametrize("most", [4096, 4096 + 700])
def test_short_reads_are_continued(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that return less than was asked for lose nothing; what follows an odd number of bytes is read
    from an aligned place again.
    """
    sizes = (10_000, 3, 9000)
    blocks = payloads(sizes)
    written(tmp_path, blocks)
    reads = Reads(monkeypatch, most)
    tier = DiskTier(tmp_path, IDENTITY, 2**30)
    for index, nbytes in enumerate(sizes):
        found = read(tier, index, nbytes)
        assert found is not None
        assert np.array_equal(found, blocks[index])
    assert reads.count > len(sizes)
    tier.close()


def test_announced_neighbours_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that follow one another take one read, if they are announced: nothing is read ahead else."""
    sizes = (10_000,) * 64
    written(tmp_path, payloads(sizes))
    tier = DiskTier(tmp_path, IDENTITY, 2**30)
    reads = Reads(monkeypatch)
    tier.announce(NAMES[:64])
    assert all(read(tier, index, 10_000) is not None for index in range(64))
    if not tier.reads_directly:
        pytest.skip("the file system of temporary files has no direct reads")
    assert reads.count == 1
    tier.announce([NAMES[1]])
    assert read(tier, 1, 10_000) is not None
    assert reads.count == 2
    tier.close()


def test_what_is_written_behind_a_read_is_read_later(tmp_path: Path) -> None:
    """The bytes behind a block, which one read had in its buffer before they were written, are not kept."""
    writer, reader = (DiskTier(tmp_path, IDENTITY, 2**30) for _ in range(2))
    blocks = payloads((50, 60, 70))
    for index, block in enumerate(blocks):
        assert writer.append(NAMES[index], b"p" * 32, 2, block)
        reader.refresh()
        found = read(reader, index, len(block))
        assert found is not None
        assert np.array_equal(found, block)
    assert reader.num_errors == 0


@pytest.mark.parametrize("harm", ["torn", "short", "changed"])
def test_harmed_files_give_what_is_whole(harm: str, tmp_path: Path) -> None:
    """A block whose end is missing, that lies behind the end, or that was changed is computed again, with one
    line each; those before it come back.
    """
    sizes = (5000, 5000, 5000)
    blocks = payloads(sizes)
    path = written(tmp_path, blocks)
    tier = DiskTier(tmp_path, IDENTITY, 2**30)
    records = [tier.record(NAMES[index]) for index in range(3)]
    assert records[1] is not None
    assert records[2] is not None
    if harm == "changed":
        with path.open("r+b") as file:
            file.seek(records[2].offset + 17)
            file.write(bytes([int(blocks[2][17]) ^ 1]))
    else:
        end = records[2].offset + 4000 if harm == "torn" else records[1].offset + records[1].nbytes
        os.truncate(path, end)
    tier.announce(NAMES[:3])
    with capture_logs() as logs:
        found = [read(tier, index, 5000) for index in range(3)]
    events = [log["event"] for log in logs if log["event"] != REFUSED]
    assert events == [UNREADABLE]
    for one, block in zip(found[:2], blocks[:2], strict=True):
        assert one is not None
        assert np.array_equal(one, block)
    assert found[2] is None
    assert tier.record(NAMES[2]) is None
    tier.close()


def test_direct_reads_leave_nothing_in_the_page_cache(tmp_path: Path) -> None:
    """What they read is not in the system's memory afterwards; through the cache it is."""
    nbytes = 2**20
    path = written(tmp_path, payloads((nbytes,)))
    tier = DiskTier(tmp_path, IDENTITY, 2**30)
    record = tier.record(NAMES[0])
    assert record is not None
    reader = BlockReader()
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if cached_pages(file.fileno()) > 2:
            pytest.skip("the file system of temporary files keeps its pages")
        reader.read(record, np.empty(nbytes, np.uint8))
        if not reader.is_direct:
            pytest.skip("the file system of temporary files has no direct reads")
        assert cached_pages(file.fileno()) <= 2
        reader.is_direct = False
        reader.close()
        reader.read(record, np.empty(nbytes, np.uint8))
        assert cached_pages(file.fileno()) > 2
        reader.close()
