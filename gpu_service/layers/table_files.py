"""Tables of embeddings that stay in the checkpoint's files: a step's rows are read ahead of their use.

Which rows a step reads depends on its tokens alone. So the reads of all layers begin with the step, by the
threads of kernels/files, and a layer waits for its own. What it gets is a small table of the distinct rows,
by the same conversion that a loaded table went through, so that results are equal bit for bit
(docs/decisions/0060).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from moebius import _kernels
from moebius.checkpoint.errors import CheckpointError

# A thread waits for one read at a time, so that a disk has this many to work on.
READ_THREADS = 16
# Rows of a table that are kept in memory once they were read: some n-grams are far more frequent than others.
KEPT_BYTES = 64 * 2**20

Decode = Callable[[NDArray[np.uint8]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class FileRows:
    """Consecutive rows of a tensor in a file; filled by the loader."""

    file: Path
    offset: int  # Of the first row, bytes.
    rows: int


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A rank's rows of one tensor as they lie in files; filled by the loader."""

    row_bytes: int
    parts: tuple[FileRows, ...]
    # From rows as they are stored, uint8 `[n, row_bytes]`, to those of the parameter, `[n, columns]`. Raises
    # CheckpointError for values that loading would refuse.
    decode: Decode

    @property
    def num_rows(self) -> int:
        """Rows of all parts."""
        return sum(part.rows for part in self.parts)


class FoundRows(NamedTuple):
    """A step's rows of a table."""

    rows: torch.Tensor  # int64 [T, n], which rows of the tensors the step asked for, -1: none of this rank.
    tensors: list[torch.Tensor]  # Its distinct rows, [distinct, columns], of codes and their scales.


class TableRead:
    """A step's rows of one table on their way."""

    def __init__(self, files: TableFiles, rows: torch.Tensor) -> None:
        """`rows`: int64 `[T, n]` on the host, counted from the rank's first one."""
        self._files, self._shape = files, rows.shape
        self._fetch = _kernels.RowFetch(files.reader, rows.reshape(-1).numpy())

    def found(self) -> FoundRows:
        """Waits for the rows; called once.

        Raises CheckpointError naming the file that could not be read, or a tensor with values that are not
        finite.
        """
        try:
            places, tensors = self._fetch.wait()
        except _kernels.ReadError as error:
            raise CheckpointError(str(error)) from error
        decoded = [stored.decode(rows) for stored, rows in zip(self._files.tensors, tensors, strict=True)]
        return FoundRows(torch.from_numpy(places).view(self._shape), decoded)


@lru_cache(maxsize=1)
def _threads() -> _kernels.ReadThreads:
    """Returns the threads that read for all tables of the process."""
    return _kernels.ReadThreads(READ_THREADS)


class TableFiles:
    """One table in files: its rows, and beside them those of scales where it has some."""

    def __init__(self, tensors: Sequence[StoredRows], kept_bytes: int = KEPT_BYTES) -> None:
        """Raises CheckpointError naming a file that can not be opened or is too short."""
        self.tensors = tuple(tensors)
        stored = [
            (one.row_bytes, [(str(part.file), part.offset, part.rows) for part in one.parts])
            for one in tensors
        ]
        try:
            self.reader = _kernels.RowReader(_threads(), stored, kept_bytes)
        except _kernels.ReadError as error:
            raise CheckpointError(str(error)) from error

    def begin(self, rows: torch.Tensor) -> TableRead:
        """Begins to read rows int64 `[T, n]`, each once, however often they are asked for."""
        return TableRead(self, rows)


# Of a row that is kept: a place in the order of use, and in the map from numbers of rows.
_FOUND_BYTES = 96


def kept_memory(row_bytes: int, num_rows: int) -> int:
    """Returns the bytes of RAM that a table in files takes: of rows that are kept, and of what finds them.

    `row_bytes`: of a row with its scales.
    """
    return min(KEPT_BYTES // row_bytes, num_rows) * (row_bytes + _FOUND_BYTES)
