"""Whether a model whose configuration ties its head to its embedding really has one matrix for both.

The rule is transformers' (`PreTrainedModel.tie_weights`, version 5.23): a stored head of other values is
used, whatever config.json says, as fine-tunes have it that were saved with an old configuration; one of
equal values is a copy; where only one of the two is stored, it is both.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from moebius import _kernels
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.index import CheckpointIndex, TensorInfo, has_weights
from moebius.checkpoint.matrix_finder import MatrixFinder, is_ignored
from moebius.checkpoint.quantisation import read_schemes
from moebius.checkpoint.reader import SliceReader
from moebius.checkpoint.stored_matrix import StoredMatrix
from moebius.checkpoint.stored_values import as_float32, to_bfloat16
from moebius.models.checkpoint import open_index
from moebius.models.config import DTypeName, ModelConfig
from moebius.models.registry import family_of
from moebius.models.weights import EMBEDDING, HEAD

# Rows that are compared at once: whole words and blocks of every format.
_ROWS = 1024


def has_own_head(directory: Path, config: ModelConfig) -> bool:
    """Returns whether a head is stored whose values, in the model's dtype, are not those of the embedding.

    Reads the two matrices only where both are stored, and no further than to the first difference. A head of
    another shape or in unreadable parts is one of its own, which the loader then refuses by name. Raises
    CheckpointError for a checkpoint whose headers can not be read.
    """
    if not has_weights(directory):
        return False
    tensors = _stored(open_index(directory), config.model_type, config.num_layers)
    shape = (config.vocab_size, config.hidden_size)
    if not (_has(tensors, HEAD) and _has(tensors, EMBEDDING)):
        return False
    finder = MatrixFinder(tensors, directory, read_schemes(directory))
    try:
        head, embedding = (finder.find(f"{module}.weight", shape) for module in (HEAD, EMBEDDING))
    except CheckpointError:
        return True
    return head.bias is not None or not _are_equal(head, embedding, config.dtype)


def is_stored_as_head(index: CheckpointIndex, model_type: str, num_layers: int) -> bool:
    """Returns whether the one matrix of both is stored under the head's name alone."""
    tensors = _stored(index, model_type, num_layers)
    return _has(tensors, HEAD) and not _has(tensors, EMBEDDING)


def _stored(index: CheckpointIndex, model_type: str, num_layers: int) -> dict[str, TensorInfo]:
    """Returns the tensors of both modules, by canonical name."""
    names = family_of(model_type).names
    named = ((names.canonical_name(name, num_layers), info) for name, info in index.tensors.items())
    return {name: info for name, info in named if name and name.rpartition(".")[0] in (HEAD, EMBEDDING)}


def _has(tensors: Mapping[str, TensorInfo], module: str) -> bool:
    return any(name.rpartition(".")[0] == module and not is_ignored(name) for name in tensors)


def _are_equal(head: StoredMatrix, embedding: StoredMatrix, dtype: DTypeName) -> bool:
    rows = head.shape[0]
    with SliceReader() as reader:
        for begin in range(0, rows, _ROWS):
            picked = slice(begin, min(begin + _ROWS, rows))
            ours, theirs = (
                _kernels.dequantise_matrix(matrix.read(reader, rows=picked)) for matrix in (head, embedding)
            )
            if dtype == "float16":
                # What has no finite number in it is refused by the loader.
                with np.errstate(over="ignore"):
                    ours, theirs = ours.astype(np.float16), theirs.astype(np.float16)
            if dtype == "bfloat16":
                ours, theirs = (as_float32(to_bfloat16(values), "BF16") for values in (ours, theirs))
            if not np.array_equal(ours, theirs):
                return False
    return True
