"""Matrices of GGUF files as packed formats keep them, found behind tensors that are read in floats."""

from __future__ import annotations

from pathlib import Path

from moebius.checkpoint.gguf.model import StoredBlocks
from moebius.checkpoint.gguf.schemes import KEPT_SCHEMES
from moebius.checkpoint.gguf.tensors import packed_tensors
from moebius.checkpoint.gguf.values import Dequantised, GatheredRows
from moebius.checkpoint.index import TensorInfo
from moebius.checkpoint.kept_matrix import KeptMatrix
from moebius.checkpoint.matrix_finder import MatrixFinder


def kept_blocks(info: TensorInfo) -> KeptMatrix | None:
    """Returns the matrix behind a tensor of decoded values.

    None where it is stored in floats, in blocks that no packed format holds, multiplied by a factor, put
    together from several tensors, or no matrix.
    """
    if isinstance(info.derived, GatheredRows) and len(info.derived.sources) == 1:
        (source,) = info.derived.sources
        found = kept_blocks(source)
        if found is None or found.row_order is not None:
            return None
        return KeptMatrix(found.matrix, found.format, info.derived.order)
    if not isinstance(info.derived, Dequantised) or len(info.shape) != 2:
        return None
    scheme = KEPT_SCHEMES.get(info.derived.type.name)
    if scheme is None:
        return None
    raw = info.derived.stored
    stored = StoredBlocks(raw.name, raw.file, info.derived.type, info.shape, raw.offset, raw.nbytes)
    finder = MatrixFinder(packed_tensors(stored, info.name), Path(raw.file), (scheme,))
    matrix = finder.find(info.name, (info.shape[0], info.shape[1]))
    return KeptMatrix(matrix, matrix.packed_format)
