"""Guards reading without copies: the same values as reading with copies, errors instead of signals."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.index import CheckpointIndex
from moebius.checkpoint.mapped_reader import MappedReader
from moebius.checkpoint.reader import SliceReader
from moebius.models.checkpoint import open_index
from tests.helpers.checkpoints import write_safetensors

ROWS, COLS, STACKED = 48, 40, 3


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> CheckpointIndex:
    """Returns a matrix, a stack, and one that lies at an odd byte."""
    directory = tmp_path_factory.mktemp("mapped")
    rng = np.random.default_rng(0)
    tensors = {
        "matrix": rng.standard_normal((ROWS, COLS)).astype(np.float32),
        "byte": np.ones(1, np.uint8),
        "odd": rng.standard_normal((ROWS, COLS)).astype(np.float32),
        "stack": rng.integers(0, 255, (STACKED, ROWS, COLS), np.uint8),
    }
    write_safetensors(directory / "model.safetensors", tensors)
    return open_index(directory)


@given(data=st.data())
@settings(deadline=None)
def test_views_equal_copies(index: CheckpointIndex, data: st.DataObject) -> None:
    """Any rows, steps and columns, of whole tensors and of matrices; also where alignment forces a copy."""
    name = data.draw(st.sampled_from(["matrix", "odd", "stack"]))
    stack_index = data.draw(st.integers(0, STACKED - 1)) if name == "stack" else None
    begin, end = sorted(data.draw(st.tuples(st.integers(0, ROWS), st.integers(0, ROWS))))
    rows = slice(begin, end, data.draw(st.integers(1, 3)))
    left, right = sorted(data.draw(st.tuples(st.integers(0, COLS), st.integers(0, COLS))))
    cols = data.draw(st.sampled_from([None, slice(left, right)]))
    with SliceReader() as copies, MappedReader() as views:
        wanted = copies.read_slice(index[name], rows, cols, stack_index)
        found = views.read_slice(index[name], rows, cols, stack_index)
        np.testing.assert_array_equal(found, wanted)
        assert found.dtype == wanted.dtype


def test_results_are_views(index: CheckpointIndex) -> None:
    """Aligned tensors are not copied, and the file cannot be written through them."""
    with MappedReader() as reader:
        found = reader.read_slice(index["matrix"], slice(0, 8))
        assert not found.flags.owndata
        assert not found.flags.writeable


def resident_file_kib() -> int:
    found = re.search(r"RssFile:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def test_reset_gives_pages_back(tmp_path: Path) -> None:
    """Resident memory grows by what is read, and shrinks by as much."""
    big = np.ones((4096, 4096), np.float32)
    write_safetensors(tmp_path / "model.safetensors", {"big": big})
    info = open_index(tmp_path)["big"]
    with MappedReader() as reader:
        before = resident_file_kib()
        assert reader.read_slice(info).shape == big.shape
        assert resident_file_kib() - before >= 60 * 1024
        reader.reset()
        assert resident_file_kib() - before <= 8 * 1024


def cached_bytes(path: Path, size: int) -> int:
    """Returns how much of the file the system keeps in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    with path.open("rb") as file:
        area = np.frombuffer(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ), np.uint8)
    assert libc.mincore(area.ctypes.data, size, pages.ctypes.data) == 0
    return int((pages & 1).sum()) * mmap.PAGESIZE


def test_what_does_not_fit_is_dropped_from_the_page_cache(tmp_path: Path) -> None:
    """The newest stays, for a server that reads the same rows a little later; without a limit all does."""
    tensors = {f"t{number}": np.ones((1024, 1024), np.float32) for number in range(8)}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    index, path = open_index(tmp_path), tmp_path / "model.safetensors"
    size, each = path.stat().st_size, tensors["t0"].nbytes

    def read_all(limit: int | None) -> int:
        with MappedReader(limit) as reader:
            for name in tensors:
                reader.reset()
                np.testing.assert_array_equal(reader.read_slice(index[name]), tensors[name])
        return cached_bytes(path, size)

    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_bytes(path, size) > each:
        pytest.skip("this file system keeps all files in memory")
    assert read_all(None) > 7 * each
    assert each < read_all(2 * each) < 4 * each


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    """Truncated before and after it was mapped: named with the tensor, and the process lives."""
    path = tmp_path / "model.safetensors"
    tensors = {name: np.ones((1024, 1024), np.float32) for name in ("first", "second")}
    write_safetensors(path, tensors)
    index = open_index(tmp_path)
    with MappedReader() as reader:
        reader.read_slice(index["first"])
        os.truncate(path, index["second"].offset + 4096)
        with pytest.raises(CheckpointError, match=r"model\.safetensors .* tensor 'second' .*truncated"):
            reader.read_slice(index["second"])
    with (
        MappedReader() as reader,
        pytest.raises(CheckpointError, match=r"ended at byte .* 'second' was read"),
    ):
        reader.read_slice(index["second"])


def test_kernels_that_can_not_populate(index: CheckpointIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies take the place of views."""
    from moebius.checkpoint import mapped_reader

    monkeypatch.setattr(mapped_reader, "MADV_POPULATE_READ", 9999)
    with SliceReader() as copies, MappedReader() as reader:
        for _ in range(2):
            found = reader.read_slice(index["matrix"], slice(8, 16))
            np.testing.assert_array_equal(found, copies.read_slice(index["matrix"], slice(8, 16)))
            assert found.flags.writeable


def test_a_disk_that_fails_is_an_error_of_the_checkpoint(
    index: CheckpointIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies, too, name file and tensor: the user reads one line."""

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with (
        SliceReader() as reader,
        pytest.raises(CheckpointError, match=r"could not be read .* 'matrix' lies: Input/output error"),
    ):
        reader.read(index["matrix"])
