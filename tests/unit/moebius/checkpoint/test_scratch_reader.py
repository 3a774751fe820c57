"""Guards reading into memory that is used again: the same values as reading into new memory, and errors."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.index import CheckpointIndex, TensorInfo
from moebius.checkpoint.reader import SliceReader
from moebius.checkpoint.scratch_reader import ScratchReader
from moebius.models.checkpoint import open_index
from tests.helpers.checkpoints import write_safetensors

ROWS, COLS, STACKED = 24, 40, 3
MATRICES = [("matrix", None), ("odd", None), ("other", None), *(("stack", index) for index in range(STACKED))]


def write(directory: Path) -> CheckpointIndex:
    """Returns matrices side by side, one of which lies at an odd byte, and a stack."""
    rng = np.random.default_rng(0)
    write_safetensors(
        directory / "model.safetensors",
        {
            "matrix": rng.standard_normal((ROWS, COLS)).astype(np.float32),
            "byte": np.ones(1, np.uint8),
            "odd": rng.standard_normal((ROWS, COLS)).astype(np.float32),
            "other": rng.integers(0, 9, (ROWS, COLS), np.int64),
            "stack": rng.integers(0, 255, (STACKED, ROWS, COLS), np.uint8),
        },
    )
    return open_index(directory)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> CheckpointIndex:
    """Returns the same for all tests."""
    return write(tmp_path_factory.mktemp("scratch"))


@given(data=st.data())
@settings(deadline=None)
def test_values_are_the_same(index: CheckpointIndex, data: st.DataObject) -> None:
    """Rows, steps and columns of tensors and of matrices, expected or not, before and after the memory has
    its size: what was read stays until `reset`.
    """
    with SliceReader() as plain, ScratchReader() as reader:
        for _ in range(3):
            reader.reset()
            expected = data.draw(st.lists(st.sampled_from(MATRICES)))
            reader.expect((index[name], stack_index) for name, stack_index in expected)
            found, wanted = [], []
            for name, stack_index in data.draw(st.lists(st.sampled_from(MATRICES), max_size=6)):
                begin, end = sorted(data.draw(st.tuples(st.integers(0, ROWS), st.integers(0, ROWS))))
                left, right = sorted(data.draw(st.tuples(st.integers(0, COLS), st.integers(0, COLS))))
                rows = slice(begin, end, data.draw(st.integers(1, 3)))
                cols = data.draw(st.sampled_from([None, slice(left, right)]))
                wanted.append(plain.read_slice(index[name], rows, cols, stack_index))
                found.append(reader.read_slice(index[name], rows, cols, stack_index))
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(one, other)
                assert one.dtype == other.dtype


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the bytes of each call that reads."""
    found: list[int] = []
    real = os.preadv

    def noting(descriptor: int, buffers: list[memoryview], position: int) -> int:
        count = real(descriptor, buffers, position)
        found.append(count)
        return count

    monkeypatch.setattr(os, "preadv", noting)
    return found


def test_neighbours_are_read_by_one_call(index: CheckpointIndex, calls: list[int]) -> None:
    """All tensors of the file, whatever their order; reading them afterwards calls nothing, unless elements
    lie at odd bytes.
    """
    with ScratchReader() as reader:
        reader.expect((index[name], stack_index) for name, stack_index in reversed(MATRICES))
        assert len(calls) == 1
        for name, stack_index in MATRICES:
            info = index[name]
            before = len(calls)
            reader.read_slice(info, None, None, stack_index)
            assert len(calls) - before == (info.offset % info.numpy_dtype.itemsize != 0)


def test_memory_is_used_again(index: CheckpointIndex) -> None:
    """From the second round on results lie where the first ones did, and none over another."""
    with ScratchReader() as reader:
        seen = []
        for _ in range(3):
            reader.reset()
            results = [reader.read_slice(index[name]) for name in ("matrix", "other")]
            assert not np.shares_memory(*results)
            seen.append([result.__array_interface__["data"][0] for result in results])
    assert seen[1] == seen[2]


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    """What ends too early is an error of the checkpoint, also where it is read ahead."""
    found = write(tmp_path)
    matrix: TensorInfo = found["stack"]
    os.truncate(matrix.file, matrix.offset + 10)
    with ScratchReader() as reader, pytest.raises(CheckpointError, match=r"ended at byte .*'stack'"):
        reader.expect([(matrix, 0)])
