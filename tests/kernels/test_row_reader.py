"""Guards rows of tables in files: each is the file's, or there is an error and no row."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from moebius import _kernels

ROWS, WIDTH, SCALES = 300, 37, 3


@pytest.fixture(scope="module")
def threads() -> _kernels.ReadThreads:
    return _kernels.ReadThreads(3)


def _written(directory: Path) -> tuple[np.ndarray, np.ndarray, list[tuple[int, list[tuple[str, int, int]]]]]:
    """Codes in two files and scales in the second one, at offsets that are no blocks'."""
    generator = np.random.default_rng(3)
    codes = generator.integers(0, 256, (ROWS, WIDTH), np.uint8)
    scales = generator.integers(0, 256, (ROWS, SCALES), np.uint8)
    first, second = directory / "first", directory / "second"
    first.write_bytes(b"x" * 11 + codes[:120].tobytes())
    second.write_bytes(b"y" * 5000 + codes[120:].tobytes() + scales.tobytes())
    after = 5000 + (ROWS - 120) * WIDTH
    parts = [(str(first), 11, 120), (str(first), 11, 0), (str(second), 5000, ROWS - 120)]
    return codes, scales, [(WIDTH, parts), (SCALES, [(str(second), after, ROWS)])]


def test_rows_are_those_of_the_files(tmp_path: Path, threads: _kernels.ReadThreads) -> None:
    """Also the last ones, those across blocks, and those that were kept; each is read once."""
    codes, scales, tensors = _written(tmp_path)
    reader = _kernels.RowReader(threads, tensors, 40 * (WIDTH + SCALES))
    assert reader.num_rows == ROWS
    generator, distinct = np.random.default_rng(4), 0
    for count in (1, 7, 200, 2000, 3, 0):
        wanted = generator.integers(-5, ROWS + 5, count)
        places, (found, found_scales) = _kernels.RowFetch(reader, wanted).wait()
        held = (wanted >= 0) & (wanted < ROWS)
        assert (places[~held] == -1).all()
        assert len(found) == len(found_scales) == len(np.unique(wanted[held]))
        assert (found[places[held]] == codes[wanted[held]]).all()
        assert (found_scales[places[held]] == scales[wanted[held]]).all()
        distinct += len(found)
    assert sum(reader.counters) == distinct


def test_rows_that_were_used_lately_are_not_read(tmp_path: Path, threads: _kernels.ReadThreads) -> None:
    """The least recently used one leaves first."""
    codes, _, tensors = _written(tmp_path)
    reader = _kernels.RowReader(threads, tensors, 2 * (WIDTH + SCALES))
    reads = []
    for row in (1, 2, 1, 3, 1, 2):
        places, (found, _) = _kernels.RowFetch(reader, np.array([row, row])).wait()
        assert places.tolist() == [0, 0]
        assert (found == codes[row]).all()
        reads.append(reader.counters[0])
    assert reads == [1, 2, 2, 3, 3, 4]


def test_what_can_not_be_read_is_an_error_that_names_the_file(
    tmp_path: Path, threads: _kernels.ReadThreads
) -> None:
    """No row is made up for one that lies behind the end of a file, and others are read as before."""
    codes, _, tensors = _written(tmp_path)
    reader = _kernels.RowReader(threads, tensors, 0)
    (tmp_path / "missing").unlink(missing_ok=True)
    with pytest.raises(_kernels.ReadError, match=r"missing cannot be opened: No such file"):
        _kernels.RowReader(threads, [(4, [(str(tmp_path / "missing"), 0, 1)])], 0)
    os.truncate(tmp_path / "second", 5000 + 10 * WIDTH + 5)
    fetch = _kernels.RowFetch(reader, np.arange(ROWS))
    with pytest.raises(_kernels.ReadError, match=r"second at byte \d+, where rows of a table lie, ended"):
        fetch.wait()
    with pytest.raises(_kernels.ReadError, match=r"second has 5375 bytes, but rows of a table end"):
        _kernels.RowReader(threads, tensors, 0)
    os.truncate(tmp_path / "second", 0)
    with pytest.raises(ValueError, match="300 and 120 rows; they must have equally many"):
        _kernels.RowReader(threads, [(1, [(str(tmp_path / "first"), 0, 300)]), (1, [tensors[0][1][0]])], 0)
    codes_alone = _kernels.RowReader(threads, [(WIDTH, [tensors[0][1][0]])], 0)
    _, (found,) = _kernels.RowFetch(codes_alone, np.array([119, 0])).wait()
    assert (found == codes[[119, 0]]).all()


def test_a_fetch_may_be_given_up(tmp_path: Path, threads: _kernels.ReadThreads) -> None:
    """A step that fails before a layer has waited leaves reads under way; later ones are right."""
    codes, _, tensors = _written(tmp_path)
    reader = _kernels.RowReader(threads, tensors, 0)
    for _ in range(20):
        del_me = _kernels.RowFetch(reader, np.arange(ROWS))
        del del_me
    places, (found, _) = _kernels.RowFetch(reader, np.arange(ROWS)).wait()
    assert (found[places] == codes).all()
