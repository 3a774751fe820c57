"""Invariant: what is read of a GGUF tensor is what the package `gguf` decodes, in every type and slice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants
from numpy.typing import NDArray

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.gguf.blocks import FLOAT_TYPES, QUANTISED_TYPES, block_type
from moebius.checkpoint.gguf.schemes import KEPT_SCHEMES
from moebius.checkpoint.mapped_reader import MappedReader
from moebius.checkpoint.reader import SliceReader
from moebius.checkpoint.stored_values import as_float32
from moebius.models.checkpoint import open_index
from tests.helpers.gguf_models import make_gguf

EXPERTS, ROWS, COLS = 3, 6, 512
# Types that the package does not decode: number, and bits of a weight, which follow a float16 factor.
NEWER = {"Q1_0": (41, 1), "Q2_0": (42, 2)}


def write_tensors(path: Path, tensors: dict[str, tuple[NDArray[Any], str]]) -> Path:
    """Returns a file of family qwen3moe with a single layer's tensors and no more metadata than the index
    needs.
    """
    writer = GGUFWriter(path, "qwen3moe")
    writer.add_expert_count(EXPERTS)
    for name, (array, kind) in tensors.items():
        if kind in NEWER:
            found = block_type(NEWER[kind][0], name)
            shape = (*array.shape[:-1], array.shape[-1] // found.nbytes * found.weights)
            # The package changes shapes of uint8 only.
            writer.add_tensor(name, array.view(np.int8), shape, NEWER[kind][0])  # type: ignore[arg-type]
            continue
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


@pytest.mark.parametrize("kind", [*FLOAT_TYPES, *(kind for kind in QUANTISED_TYPES if kind not in NEWER)])
@pytest.mark.parametrize("make_reader", [SliceReader, MappedReader])
@np.errstate(all="ignore")
def test_slices_are_those_of_the_decoded_tensor(
    tmp_path: Path, kind: str, make_reader: type[SliceReader]
) -> None:
    """Columns may begin and end inside blocks; a stack's matrices are found; bytes may be infinities.

    Stacks of types that packed formats hold are read in parts: test_packed.py.
    """
    matrix, stack = random_rows(kind, ROWS), random_rows(kind, EXPERTS, ROWS)
    tensors = {"blk.0.attn_q.weight": (matrix, kind), "blk.0.ffn_gate_exps.weight": (stack, kind)}
    index = open_index(write_tensors(tmp_path / "m.gguf", tensors))
    query = index["model.layers.0.self_attn.q_proj.weight"]
    whole = quants.dequantize(matrix, GGMLQuantizationType[kind])
    assert query.shape == whole.shape
    rows, cols = slice(1, 5), slice(250, 403)
    with make_reader() as reader:
        found = [
            (reader.read(query), whole),
            (reader.read_slice(query, rows), whole[rows]),
            (reader.read_slice(query, slice(0, ROWS, 2), cols), whole[::2, cols]),
        ]
        if kind not in KEPT_SCHEMES:
            gate = index["model.layers.0.mlp.experts.gate_proj.weight"]
            stacked = quants.dequantize(stack, GGMLQuantizationType[kind])
            assert gate.shape == stacked.shape
            found += [
                (reader.read(gate), stacked),
                (reader.read_slice(gate, rows, cols, stack_index=2), stacked[2][rows, cols]),
            ]
        for values, wanted in found:
            np.testing.assert_array_equal(as_float32(values, query.dtype), wanted)


@pytest.mark.parametrize("kind", sorted(NEWER))
def test_types_that_the_package_does_not_decode_are_decoded_as_ggml_does(kind: str) -> None:
    """One bit: the factor or its negative; two: -1 to 2 times the factor. Lowest bits come first."""
    number, bits = NEWER[kind]
    found = block_type(number, "x")
    blocks = np.random.default_rng(3).integers(0, 256, (ROWS, 4 * found.nbytes), np.uint8)
    blocks.reshape(-1, found.nbytes)[:, :2] = np.array([-0.75], np.float16).view(np.uint8)
    wanted = []
    for block in blocks.reshape(-1, found.nbytes):
        word = int.from_bytes(bytes(block[2:]), "little")
        codes = [word >> bits * place & (1 << bits) - 1 for place in range(found.weights)]
        wanted.append([-0.75 * (2 * code - 1 if bits == 1 else code - 1) for code in codes])
    np.testing.assert_array_equal(found.dequantise(blocks), np.array(wanted, np.float32).reshape(ROWS, -1))


@np.errstate(all="ignore")
def test_scales_of_nvfp4_weights_are_factors(tmp_path: Path) -> None:
    """One for a matrix, one for each expert; those of activations are left aside."""
    blocks = random_rows("NVFP4", ROWS)
    factors = np.array([0.5, 3.0, 0.25], np.float32)
    tensors: dict[str, tuple[NDArray[Any], str]] = {
        "blk.0.attn_q.weight": (blocks, "NVFP4"),
        "blk.0.attn_q.scale": (factors[1:2], "F32"),
        "blk.0.attn_q.input_scale": (factors[:1], "F32"),
        # Packed formats of Q4_0 have no place for such a scale.
        "blk.0.ffn_down_exps.weight": (random_rows("Q4_0", EXPERTS, ROWS), "Q4_0"),
        "blk.0.ffn_down_exps.scale": (factors, "F32"),
    }
    index = open_index(write_tensors(tmp_path / "m.gguf", tensors))
    kind = GGMLQuantizationType.NVFP4
    down = quants.dequantize(tensors["blk.0.ffn_down_exps.weight"][0], GGMLQuantizationType.Q4_0)
    with SliceReader() as reader:
        for name, values in (
            ("self_attn.q_proj", quants.dequantize(blocks, kind) * factors[1]),
            ("mlp.experts.down_proj", down * factors[:, None, None]),
        ):
            info = index[f"model.layers.0.{name}.weight"]
            np.testing.assert_array_equal(reader.read(info), values)
            last = {"stack_index": 2} if values.ndim == 3 else {}
            part = reader.read_slice(info, slice(1, 5), slice(50, 203), **last)
            np.testing.assert_array_equal(part, (values[2] if last else values)[1:5, 50:203])
    tensors["blk.0.attn_q.scale"] = factors, "F32"
    message = r"'blk.0.attn_q.scale' is F32 of shape \[3\]; allowed: F32 of shape \[1\]$"
    with pytest.raises(CheckpointError, match=message):
        open_index(write_tensors(tmp_path / "n.gguf", tensors))


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
