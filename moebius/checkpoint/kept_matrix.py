"""A stored matrix whose codes a packed format holds exactly, perhaps with its rows in another order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moebius.checkpoint.index import TensorInfo
from moebius.checkpoint.reader import SliceReader
from moebius.checkpoint.stored_arrays import StoredArray
from moebius.checkpoint.stored_matrix import StoredMatrix
from moebius.checkpoint.weight_schemes import FLOAT_CODES, PLAIN, PLAIN_CODES
from moebius.kernels.source import SourceMatrix
from moebius.kernels.weight_formats import WEIGHT_FORMATS


@dataclass(frozen=True, slots=True, eq=False)
class KeptMatrix:
    """Filled by `kept_matrix`, or for GGUF by `gguf.kept.kept_blocks`."""

    matrix: StoredMatrix
    format: str  # A key of `WEIGHT_FORMATS`.
    # int64 [rows], the stored row of each row; None: they are in order. Only where no two rows share an
    # element of codes or scales.
    row_order: NDArray[np.intp] | None = None

    def read(self, reader: SliceReader, rows: slice, cols: slice) -> SourceMatrix:
        """Returns rows and columns of the matrix; bounds as in `StoredMatrix.read`, which says what it
        raises.
        """
        if self.row_order is None:
            return self.matrix.read(reader, rows, cols)
        wanted = self.row_order[rows]
        first = int(wanted.min())
        source = self.matrix.read(reader, slice(first, int(wanted.max()) + 1), cols)
        picked = wanted - first
        return replace(
            source,
            codes=source.codes[picked],
            rows=len(picked),
            scales=None if source.scales is None else source.scales[picked],
            mins=None if source.mins is None else source.mins[picked],
            column_scale=None if source.column_scale is None else source.column_scale[picked],
        )


def kept_floats(tensor: TensorInfo) -> KeptMatrix | None:
    """Returns a tensor of bfloat16 `[out, in]` as a packed format keeps it; None: it is something else."""
    if tensor.dtype != "BF16" or tensor.derived is not None or len(tensor.shape) != 2:
        return None
    rows, columns = tensor.shape
    codes = StoredArray(PLAIN_CODES, tensor, None, range(rows), columns)
    return KeptMatrix(StoredMatrix(PLAIN, (rows, columns), (codes,), None), FLOAT_CODES[tensor.dtype])


def kept_matrix(matrix: StoredMatrix) -> KeptMatrix | None:
    """Returns the matrix as a packed format keeps it.

    None where it is stored in floats, where none holds it exactly for rows of any type, or where its columns
    are not in order.
    """
    name = matrix.packed_format
    if name not in WEIGHT_FORMATS or matrix.scheme.reorders or matrix.is_rounded:
        return None
    if WEIGHT_FORMATS[name].quantised_rows or WEIGHT_FORMATS[name].code in ("float32", "bfloat16", "float16"):
        return None
    return KeptMatrix(matrix, name)
