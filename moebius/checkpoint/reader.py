"""Reads parts of tensors with bounded memory: the result, plus at most one block of rows."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from moebius.checkpoint.derived import read_whole
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.index import TensorInfo, open_for_reading

Array = npt.NDArray[np.generic]

# Rows are read in blocks of about this many bytes when only some columns are wanted.
BLOCK_BYTES = 1 << 20


class SliceReader:
    """Keeps shard files open between reads. Not thread safe; close it, or use it as a context manager."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def expect(self, matrices: Iterable[tuple[TensorInfo, int | None]]) -> None:
        """Says which tensors, or which matrices of stacks, are read as a whole next; it changes no result."""

    def read(self, info: TensorInfo) -> Array:
        """Returns the whole tensor, in its own shape; bfloat16 as uint16."""
        if info.derived is not None:
            return read_whole(info.derived, self, info.shape)
        output = self._new(info.shape, info.numpy_dtype)
        self._fill(info, 0, output)
        return output

    def read_slice(
        self,
        info: TensorInfo,
        rows: slice | None = None,
        cols: slice | None = None,
        stack_index: int | None = None,
    ) -> Array:
        """`tensor[rows, cols]` of a matrix, or `tensor[stack_index][rows, cols]` of a stack of matrices.

        A 1-d tensor is a matrix of one column per row (`cols` must stay None; the result is 1-d). Returns
        a new contiguous array in the tensor's own dtype (bfloat16 as uint16). Slices follow numpy's rules,
        with positive steps only. Raises CheckpointError naming the tensor.
        """
        base, shape = _select_matrix(info, stack_index)
        num_rows, num_cols = shape[0], math.prod(shape[1:])
        row_range = _bounded(info, rows, num_rows)
        if cols is not None and len(shape) != 2:
            raise CheckpointError(f"tensor {info.name!r} has shape {list(info.shape)}: no columns to slice")
        col_range = range(num_cols) if cols is None else _bounded(info, cols, num_cols)
        if info.derived is None:
            picked = self._read_rows(info, base, row_range, num_cols, col_range)
        else:
            picked = info.derived.read(self, stack_index or 0, row_range, col_range)
        return picked if cols is not None else picked.reshape(len(row_range), *shape[1:])

    def _read_rows(self, info: TensorInfo, base: int, rows: range, width: int, cols: range) -> Array:
        """Returns `[len(rows), len(cols)]` of a row-major matrix that starts `base` elements into
        the tensor.
        """
        output = self._new((len(rows), len(cols)), info.numpy_dtype)
        if not output.size:
            return output
        if rows.step == 1 and len(cols) == width:
            self._fill(info, base + rows.start * width, output)
            return output
        span = max(1, BLOCK_BYTES // (width * info.numpy_dtype.itemsize * rows.step))
        for first in range(0, len(rows), span):
            part = rows[first : first + span]
            block = np.empty((part[-1] - part[0] + 1, width), info.numpy_dtype)
            self._fill(info, base + part[0] * width, block)
            output[first : first + len(part)] = block[:: rows.step, cols.start : cols.stop : cols.step]
        return output

    def _new(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        """Returns memory for a result."""
        return np.empty(shape, dtype)

    def _descriptor(self, file: Path) -> int:
        """Returns the open file."""
        descriptor = self._descriptors.get(file)
        if descriptor is None:
            descriptor = self._descriptors[file] = open_for_reading(file)
        return descriptor

    def _fill(self, info: TensorInfo, first_element: int, output: Array) -> None:
        """Read `output.size` consecutive elements of the tensor into a contiguous array.

        Raises CheckpointError naming the tensor where the file ends too early or its disk fails.
        """
        if not output.size:
            return
        self._fill_bytes(
            info, info.offset + first_element * output.itemsize, output.reshape(-1).view(np.uint8)
        )

    def _fill_bytes(self, info: TensorInfo, position: int, output: npt.NDArray[np.uint8]) -> None:
        """Read bytes of the tensor's file from `position` on. Raises CheckpointError as `_fill`."""
        descriptor, target = self._descriptor(info.file), memoryview(output.data)
        while target:
            try:
                count = os.preadv(descriptor, [target], position)
            except OSError as error:
                raise CheckpointError(
                    f"{info.file} could not be read at byte {position}, where tensor {info.name!r} lies: "
                    f"{error.strerror}"
                ) from error
            if count == 0:
                raise CheckpointError(
                    f"{info.file} ended at byte {position} while tensor {info.name!r} was read"
                )
            target, position = target[count:], position + count


def read_slice(
    info: TensorInfo, rows: slice | None = None, cols: slice | None = None, stack_index: int | None = None
) -> Array:
    """`SliceReader.read_slice` for a single read: opens and closes the file."""
    with SliceReader() as reader:
        return reader.read_slice(info, rows, cols, stack_index)


def _select_matrix(info: TensorInfo, stack_index: int | None) -> tuple[int, tuple[int, ...]]:
    """Returns first element and shape of the wanted matrix."""
    if stack_index is None:
        if not info.shape:
            raise CheckpointError(f"tensor {info.name!r} is a scalar: nothing to slice")
        return 0, info.shape
    if len(info.shape) != 3 or not 0 <= stack_index < info.shape[0]:
        raise CheckpointError(f"tensor {info.name!r} of shape {list(info.shape)} has no matrix {stack_index}")
    return stack_index * info.shape[1] * info.shape[2], info.shape[1:]


def _bounded(info: TensorInfo, wanted: slice | None, size: int) -> range:
    """The indices a slice picks; numpy would clip a slice that reaches past the end, which hides errors."""
    picked = wanted if wanted is not None else slice(None)
    if (picked.stop or 0) > size or (picked.start or 0) > size or (picked.step or 1) < 1:
        raise CheckpointError(f"tensor {info.name!r} of shape {list(info.shape)} has no slice {picked}")
    return range(*picked.indices(size))
