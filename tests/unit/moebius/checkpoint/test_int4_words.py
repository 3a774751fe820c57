"""Guards what int4 words mean, by words written out here: order of nibbles, zero points, types of scales.

Sources: AutoAWQ's order 0 2 4 6 1 3 5 7, AutoGPTQ's zero points less one (modulo 16) in version 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moebius import _kernels
from moebius.checkpoint.matrix_finder import MatrixFinder
from moebius.checkpoint.quantisation import awq, gptq
from moebius.checkpoint.reader import SliceReader
from moebius.checkpoint.weight_schemes import WeightScheme
from moebius.models.checkpoint import open_index
from tests.helpers.checkpoints import write_safetensors
from tests.helpers.quantised_sources import bfloat16_bits

GROUP = 32
# Nibbles 0 to 7 of a word, the lowest first.
NIBBLES = (1, 2, 3, 4, 5, 6, 7, 9)
WORD = np.uint32(sum(nibble << (4 * place) for place, nibble in enumerate(NIBBLES))).view(np.int32)
# Column of an AWQ word's eight that each nibble holds.
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
SCALES: dict[str, Any] = {
    "F16": np.float16(0.5),
    "BF16": bfloat16_bits(np.array([0.5], np.float32))[0],
    "F32": np.float32(0.5),
}


def dequantised(directory: Path, tensors: dict[str, Any], schemes: tuple[WeightScheme, ...]) -> Any:
    """Returns the dequantised values of a matrix of 8 rows and one group of columns."""
    write_safetensors(directory / "model.safetensors", {f"m.{key}": value for key, value in tensors.items()})
    index = open_index(directory)
    matrix = MatrixFinder(index.tensors, directory, schemes).find("m.weight", (8, GROUP))
    with SliceReader() as reader:
        return _kernels.dequantise_matrix(matrix.read(reader))


@pytest.mark.parametrize("scale", list(SCALES))
def test_awq(scale: str, tmp_path: Path) -> None:
    """Nibbles and zero points in the same order along out; zero points 0 and 15 among them."""
    zeros = (0, 15, 2, 3, 4, 5, 6, 7)
    word = np.uint32(sum(zero << (4 * place) for place, zero in enumerate(zeros))).view(np.int32)
    tensors = {
        "qweight": np.full((GROUP, 1), WORD, np.int32),
        "qzeros": np.full((1, 1), word, np.int32),
        "scales": np.full((1, 8), SCALES[scale]),
    }
    found = dequantised(tmp_path, tensors, awq({"bits": 4, "group_size": GROUP}))
    for nibble, zero, row in zip(NIBBLES, zeros, AWQ_COLUMNS, strict=True):
        assert np.all(found[row] == 0.5 * (nibble - zero))


@pytest.mark.parametrize(("version", "zero_of_15", "zero_of_7"), [("gptq", 0, 8), ("gptq_v2", 15, 7)])
@pytest.mark.parametrize("scale", list(SCALES))
def test_gptq(scale: str, version: str, zero_of_15: int, zero_of_7: int, tmp_path: Path) -> None:
    """Nibbles along in; what a stored zero point stands for depends on the version, 15 wraps to 0."""
    stored = np.uint32(0x7777777F).view(np.int32)
    tensors = {
        "qweight": np.full((GROUP // 8, 8), WORD, np.int32),
        "qzeros": np.full((1, 1), stored, np.int32),
        "scales": np.full((1, 8), SCALES[scale]),
        "g_idx": np.zeros(GROUP, np.int32),
    }
    config = {"bits": 4, "group_size": GROUP, "sym": False, "checkpoint_format": version}
    found = dequantised(tmp_path, tensors, gptq(config))
    codes = np.tile(NIBBLES, GROUP // 8)
    np.testing.assert_array_equal(found[0], 0.5 * (codes - zero_of_15))
    np.testing.assert_array_equal(found[1:], np.tile(0.5 * (codes - zero_of_7), (7, 1)))
