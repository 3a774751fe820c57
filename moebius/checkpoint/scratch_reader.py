"""Reads tensors into memory that is used again and again, what lies side by side by one call.

Threads that pack experts wait for one another wherever they take Python's lock, or change what the process
has mapped: for new memory, whose pages come one by one, and for mapped files. This asks for neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moebius.checkpoint.index import TensorInfo
from moebius.checkpoint.reader import Array, SliceReader

# Starts of results, from a file's begin or the memory's.
_ALIGNMENT = 64
# Bytes between two parts of a file that are read for nothing rather than by another call.
_GAP = 4096
_Part = tuple[int, int, TensorInfo]


class ScratchReader(SliceReader):
    """Like `SliceReader`, but results are valid until `reset`, and may be read-only and strided. Not thread
    safe.
    """

    def __init__(self) -> None:
        super().__init__()
        self._memory = np.zeros(0, np.uint8)
        # Bytes that are in use, and that were asked for, since the last `reset`.
        self._used = self._wanted = 0
        # By file, what was read as a whole: first byte, end, and the bytes.
        self._read: dict[Path, list[tuple[int, int, npt.NDArray[np.uint8]]]] = {}

    def reset(self) -> None:
        """Results are needed no more."""
        if self._wanted > self._memory.size:
            self._memory = np.empty(self._wanted + self._wanted // 4, np.uint8)
        self._used = self._wanted = 0
        self._read.clear()

    def expect(self, matrices: Iterable[tuple[TensorInfo, int | None]]) -> None:
        wanted: dict[Path, list[_Part]] = {}
        for info, index in matrices:
            if info.derived is None and info.nbytes:
                nbytes = info.nbytes if index is None else info.nbytes // info.shape[0]
                begin = info.offset + (index or 0) * nbytes
                wanted.setdefault(info.file, []).append((begin, begin + nbytes, info))
        for file, parts in wanted.items():
            for begin, end, info in _joined(sorted(parts, key=itemgetter(0, 1))):
                # Elements lie at multiples of their size in the memory where they do in the file.
                skipped = begin % _ALIGNMENT
                found = self._bytes(skipped + end - begin)[skipped:]
                self._fill_bytes(info, begin, found)
                found.flags.writeable = False
                self._read.setdefault(file, []).append((begin, end, found))

    def _read_rows(self, info: TensorInfo, base: int, rows: range, width: int, cols: range) -> Array:
        size = info.numpy_dtype.itemsize
        count = (rows[-1] + 1 - rows.start) * width * size if rows else 0
        begin = info.offset + (base + rows.start * width) * size
        for first, end, found in self._read.get(info.file, ()):
            if count and first <= begin and begin + count <= end and begin % size == 0:
                block = found[begin - first : begin - first + count].view(info.numpy_dtype)
                return block.reshape(-1, width)[:: rows.step, cols.start : cols.stop : cols.step]
        return super()._read_rows(info, base, rows, width, cols)

    def _new(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return self._bytes(nbytes).view(dtype).reshape(shape)

    def _bytes(self, count: int) -> npt.NDArray[np.uint8]:
        """Returns the next bytes of the memory; new ones where it is full, as before the first `reset`."""
        begin, self._wanted = self._used, self._wanted + -(-count // _ALIGNMENT) * _ALIGNMENT
        if begin + count > self._memory.size:
            return np.empty(count, np.uint8)
        self._used += -(-count // _ALIGNMENT) * _ALIGNMENT
        return self._memory[begin : begin + count]


def _joined(parts: Iterable[_Part]) -> Iterator[_Part]:
    """Yields ascending parts of a file, those as one that lie side by side."""
    last: _Part | None = None
    for begin, end, info in parts:
        if last is not None and begin <= last[1] + _GAP:
            last = last[0], max(end, last[1]), last[2]
            continue
        if last is not None:
            yield last
        last = begin, end, info
    if last is not None:
        yield last
