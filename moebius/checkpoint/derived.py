"""Tensors whose values are computed when they are read: quantised blocks, merged and reordered matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from moebius.checkpoint.reader import SliceReader


class DerivedValues(Protocol):
    """Makes the values of one tensor from what its file stores."""

    def read(self, reader: SliceReader, stack_index: int, rows: range, cols: range) -> NDArray[np.generic]:
        """Returns `[len(rows), len(cols)]` of matrix `stack_index` of a stack (0: the only one), in the
        tensor's type.

        Raises CheckpointError naming the tensor.
        """


def read_whole(values: DerivedValues, reader: SliceReader, shape: tuple[int, ...]) -> NDArray[Any]:
    """Returns all of a tensor of one to three axes; one axis is a matrix of one column."""
    matrices = range(shape[0]) if len(shape) == 3 else range(1)
    rows, cols = shape[-2:] if len(shape) > 1 else (shape[0], 1)
    found = [values.read(reader, stack_index, range(rows), range(cols)) for stack_index in matrices]
    return np.stack(found).reshape(shape)
