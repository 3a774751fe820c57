"""A reader whose results live in memory that it uses again, so that a load faults no page in twice."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from moebius.checkpoint.index import TensorInfo
from moebius.checkpoint.reader import Array, SliceReader

ALIGNMENT = 64


class ReusingReader(SliceReader):
    """Like `SliceReader`, but results are views that stay valid until `reset`, and may be strided.

    Rows are read whole and consecutively; what was not asked for is left out by strides. Reading the same
    rows again (gate and up interleaved) reads no file. Not thread safe.
    """

    def __init__(self) -> None:
        super().__init__()
        self._memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._used = 0
        self._known: dict[tuple[str, int, int], Array] = {}

    def reset(self) -> None:
        """Give all results' memory back; grows it when the last round needed more."""
        if self._used > self._memory.size:
            self._memory = np.empty(self._used + ALIGNMENT, np.uint8)
        self._used = 0
        self._known.clear()

    def _read_rows(self, info: TensorInfo, base: int, rows: range, width: int, cols: range) -> Array:
        first = rows.start - rows.start % rows.step
        last = min(
            -(-rows.stop // rows.step) * rows.step, max(rows.stop, self._stored_rows(info, base, width))
        )
        key = (info.name, base + first * width, last - first)
        block = self._known.get(key)
        if block is None:
            block = self._take((last - first, width), info.numpy_dtype)
            self._fill(info, base + first * width, block)
            self._known[key] = block
        picked = slice(rows.start - first, rows.stop - first, rows.step)
        return block[picked, cols.start : cols.stop : cols.step]

    @staticmethod
    def _stored_rows(info: TensorInfo, base: int, width: int) -> int:
        """Rows from `base` to the end of the tensor."""
        return (math.prod(info.shape) - base) // width if width else 0

    def _take(self, shape: tuple[int, int], dtype: np.dtype[np.generic]) -> Array:
        """Uninitialised memory, from the buffer while it lasts."""
        count = math.prod(shape) * dtype.itemsize
        begin = -(-self._used // ALIGNMENT) * ALIGNMENT
        self._used = begin + count
        if self._used > self._memory.size:
            return np.empty(shape, dtype)
        return self._memory[begin : begin + count].view(dtype).reshape(shape)
