"""Invariant: what is read of a GGUF tensor is what the package `gguf` decodes, in every type and slice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants
from numpy.typing import NDArray

from moebius.checkpoint.gguf.blocks import FLOAT_TYPES, QUANTISED_TYPES
from moebius.checkpoint.mapped_reader import MappedReader
from moebius.checkpoint.reader import SliceReader
from moebius.checkpoint.stored_values import as_float32
from moebius.models.checkpoint import open_index
from tests.helpers.gguf_models import make_gguf

EXPERTS, ROWS, COLS = 3, 6, 512


def write_tensors(path: Path, tensors: dict[str, tuple[NDArray[Any], str]]) -> Path:
    """A file of family qwen3moe with a single layer's tensors and no more metadata than the index needs."""
    writer = GGUFWriter(path, "qwen3moe")
    writer.add_expert_count(EXPERTS)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_rows(kind: str, *outer: int) -> NDArray[Any]:
    """Any bytes are values of a quantised type; floats are drawn."""
    random = np.random.default_rng(5)
    if kind in FLOAT_TYPES:
        values = random.standard_normal((*outer, COLS)).astype(np.float32)
        return quants.quantize(values, GGMLQuantizationType[kind])
    weights, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return random.integers(0, 256, (*outer, COLS // weights * nbytes), np.uint8)


@pytest.mark.parametrize("kind", [*FLOAT_TYPES, *QUANTISED_TYPES])
@pytest.mark.parametrize("make_reader", [SliceReader, MappedReader])
@np.errstate(all="ignore")
def test_slices_are_those_of_the_decoded_tensor(
    tmp_path: Path, kind: str, make_reader: type[SliceReader]
) -> None:
    """Columns may begin and end inside blocks; a stack's matrices are found; bytes may be infinities."""
    matrix, stack = random_rows(kind, ROWS), random_rows(kind, EXPERTS, ROWS)
    # A type that packed formats hold comes in several tensors only where gate and up both have it.
    other = random_rows("F32", EXPERTS, ROWS)
    path = write_tensors(
        tmp_path / "m.gguf",
        {
            "blk.0.attn_q.weight": (matrix, kind),
            "blk.0.ffn_gate_exps.weight": (stack, kind),
            "blk.0.ffn_up_exps.weight": (other, "F32"),
        },
    )
    index = open_index(path)
    query = index["model.layers.0.self_attn.q_proj.weight"]
    gate = index["model.layers.0.mlp.experts.gate_proj.weight"]
    whole = quants.dequantize(matrix, GGMLQuantizationType[kind])
    stacked = quants.dequantize(stack, GGMLQuantizationType[kind])
    assert (query.shape, gate.shape) == (whole.shape, stacked.shape)
    rows, cols = slice(1, 5), slice(250, 403)
    with make_reader() as reader:
        for found, wanted in (
            (reader.read(query), whole),
            (reader.read(gate), stacked),
            (reader.read_slice(query, rows), whole[rows]),
            (reader.read_slice(query, slice(0, ROWS, 2), cols), whole[::2, cols]),
            (reader.read_slice(gate, rows, cols, stack_index=2), stacked[2][rows, cols]),
        ):
            np.testing.assert_array_equal(as_float32(found, query.dtype), wanted)


@pytest.mark.parametrize(
    ("name", "module", "parameters"),
    [
        ("mixtral", "self_attn", ("q_proj.weight", "k_proj.weight")),
        ("deepseek_v2", "self_attn", ("kv_b_proj.weight",)),
        ("qwen3_next", "linear_attn", ("in_proj_qkvz.weight", "conv1d.weight")),
        (
            "qwen3_5_moe",
            "linear_attn",
            ("in_proj_qkv.weight", "in_proj_z.weight", "conv1d.weight", "dt_bias", "out_proj.weight"),
        ),
    ],
)
def test_parts_of_rearranged_tensors_are_those_of_the_whole(
    tmp_path: Path, name: str, module: str, parameters: tuple[str, ...]
) -> None:
    """What a tensor-parallel rank reads: some heads' rows, or some columns, and rows inside of heads."""
    file = make_gguf(name, tmp_path)
    index = open_index(file.path)
    tensors = file.reference.state_dict()
    for parameter in parameters:
        tensor = f"model.layers.1.{module}.{parameter}"
        whole, info = tensors[tensor].numpy(), index[tensor]
        half = whole.shape[0] // 2
        slices: list[tuple[slice, slice | None]] = [(slice(0, half), None), (slice(half, None), None)]
        if whole.ndim == 2:
            slices.append((slice(5, 29), slice(3, 40)))
        with SliceReader() as reader:
            np.testing.assert_array_equal(as_float32(reader.read(info), info.dtype), whole)
            for rows, cols in slices:
                found = as_float32(reader.read_slice(info, rows, cols), info.dtype)
                np.testing.assert_array_equal(found, whole[rows] if cols is None else whole[rows, cols])
