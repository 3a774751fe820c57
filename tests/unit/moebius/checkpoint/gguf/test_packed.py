"""Invariant: packed experts mean what a GGUF file says, bit by bit: codes, scales and mins are kept.

Scales that are products of two stored numbers have more bits than float16; they stay two numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from numpy.typing import NDArray

from moebius import _kernels
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.gguf.block_parts import BLOCK_PARTS, take_part
from moebius.checkpoint.gguf.schemes import KEPT_SCHEMES
from moebius.checkpoint.index import NUMPY_DTYPES
from moebius.checkpoint.mapped_reader import MappedReader
from moebius.kernels.weight_formats import expert_layout
from moebius.models.expert_checkpoint import ExpertCheckpoint
from moebius.models.geometry import MoeGeometry
from moebius.models.read import read_geometry
from tests.helpers.gguf_models import make_gguf
from tests.helpers.numpy_unpack import unpack_expert
from tests.unit.moebius.checkpoint.gguf.test_values import write_tensors

SIZE = 256
GEOMETRY = MoeGeometry("qwen3_moe", SIZE, 1, (0,), 1, 1, SIZE, "silu", "float32")
# Where the float16 factors of a block lie: float bytes drawn like the others would be infinite now and then.
FACTORS = {"Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,), "MXFP4": (), "NVFP4": ()} | {
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "IQ1_M": (),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
}
NAMES = {"gate": "ffn_gate_exps", "up": "ffn_up_exps", "down": "ffn_down_exps"}


def stack(kind: str, seed: int, factor: float = 0.01) -> NDArray[np.uint8]:
    """Returns one expert's blocks, every byte of codes and scales drawn: `[1, SIZE, bytes of a row]`."""
    weights, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (SIZE * SIZE // weights, nbytes), np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = random.integers(110, 130, len(blocks))
    if kind == "NVFP4":
        blocks[:, :4] = random.integers(0, 0x7F, (len(blocks), 4))
    if kind == "IQ1_M":
        # The highest nibble of the factor, which lies in four words.
        blocks[:, 55] = blocks[:, 55] & 0x8F | 0x10
    for place in FACTORS.get(kind, (0,)):
        factors = (random.uniform(-factor, factor, len(blocks))).astype(np.float16)
        blocks[:, place : place + 2] = factors.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(1, SIZE, -1)


def checkpoint_of(path: Path, stacks: dict[str, tuple[NDArray[Any], str]]) -> ExpertCheckpoint:
    tensors = {f"blk.0.{NAMES[which]}.weight": stored for which, stored in stacks.items()}
    return ExpertCheckpoint.open(str(write_tensors(path / "m.gguf", tensors)), GEOMETRY)


@pytest.mark.parametrize("kind", sorted(KEPT_SCHEMES))
def test_packed_experts_mean_what_the_file_says(tmp_path: Path, kind: str) -> None:
    """All three matrices, and a part of down that begins and ends inside of blocks of 256."""
    stacks = {which: (stack(kind, seed), kind) for seed, which in enumerate(NAMES)}
    found = checkpoint_of(tmp_path, stacks).expert(0, 0)
    scheme = KEPT_SCHEMES[kind]
    assert found.formats == (scheme.packed_format, scheme.packed_format)
    assert not found.is_rounded
    wanted = {
        which: quants.dequantize(blocks, GGMLQuantizationType[kind])[0]
        for which, (blocks, _) in stacks.items()
    }
    with MappedReader() as reader:
        sources = {which: getattr(found, which).read(reader) for which in NAMES}
        for which, source in sources.items():
            np.testing.assert_array_equal(_kernels.dequantise_matrix(source), wanted[which])
        multiple = scheme.group_size * scheme.groups_together
        assert found.down.col_multiple == multiple
        inside = slice(multiple, 256 - multiple if multiple < 128 else 256)
        part = found.down.read(reader, rows=slice(16, 48), cols=inside)
        np.testing.assert_array_equal(_kernels.dequantise_matrix(part), wanted["down"][16:48, inside])
        packed = _kernels.pack_matrix(scheme.packed_format, part)
        kept = _kernels.unpack_matrix(scheme.packed_format, packed, 32, inside.stop - inside.start, False)
        np.testing.assert_array_equal(kept, wanted["down"][16:48, inside])
        packed, squared_error, _ = _kernels.pack_expert(*found.formats, *sources.values(), parts=3)
    layout = expert_layout(scheme.packed_format, scheme.packed_format, SIZE, SIZE)
    unpacked = dict(zip(NAMES, unpack_expert(layout, packed), strict=True))
    assert squared_error == 0
    for which in NAMES:
        np.testing.assert_array_equal(unpacked[which], wanted[which])


@pytest.mark.parametrize("kind", sorted(BLOCK_PARTS))
def test_parts_of_rows_that_lie_apart(kind: str) -> None:
    """A part of a matrix's columns is read in place: rows are strided, and the bytes those of a copy."""
    weights, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = np.random.default_rng(5).integers(0, 256, (12, 7 * nbytes), np.uint8)
    apart = blocks[::3, nbytes : 6 * nbytes]
    for role, part in BLOCK_PARTS[kind].items():
        shape, dtype = (4, 5 * weights // part.step), NUMPY_DTYPES[part.dtype]
        found, wanted = np.empty(shape, dtype), np.empty(shape, dtype)
        take_part(kind, role, apart, found)
        take_part(kind, role, np.ascontiguousarray(apart), wanted)
        assert found.tobytes() == wanted.tobytes(), role
        with pytest.raises(ValueError, match=f"output has .* must .* have {wanted.nbytes}"):
            take_part(kind, role, apart, found[:3])
    with pytest.raises(ValueError, match=f"whole blocks of {nbytes} bytes"):
        take_part(kind, "codes", blocks[:, 1:], np.empty(0, np.uint8))
    with pytest.raises(ValueError, match=f"GGUF type {kind} have no part 'bias'"):
        take_part(kind, "bias", blocks, np.empty(0, np.uint8))


def test_scales_beyond_float16_are_kept(tmp_path: Path) -> None:
    """A product of two stored numbers may be larger than float16 holds."""
    blocks = stack("Q4_K", 1, 60000.0)
    found = checkpoint_of(tmp_path, dict.fromkeys(NAMES, (blocks, "Q4_K"))).expert(0, 0)
    wanted = quants.dequantize(blocks, GGMLQuantizationType.Q4_K)[0]
    assert np.abs(wanted).max() > 15 * 65504
    with MappedReader() as reader:
        packed = _kernels.pack_matrix(found.formats[0], found.up.read(reader))
    kept = _kernels.unpack_matrix(found.formats[0], packed, SIZE, SIZE, False)
    np.testing.assert_array_equal(kept, wanted)


def test_a_factor_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    blocks = stack("Q6_K", 1)
    blocks[0, 3, 208:210] = 0, 0x7C
    found = checkpoint_of(tmp_path, dict.fromkeys(NAMES, (blocks, "Q6_K"))).expert(0, 0)
    with MappedReader() as reader, pytest.raises(CheckpointError, match=r"up_proj\.q6_k_scales.*infinite"):
        found.up.read(reader)


def test_scales_of_nvfp4_matrices_are_kept(tmp_path: Path) -> None:
    """One for each expert's matrix, times what the blocks mean."""
    stacks = {which: stack("NVFP4", seed) for seed, which in enumerate(NAMES)}
    tensors: dict[str, tuple[NDArray[Any], str]] = {}
    for seed, (which, blocks) in enumerate(stacks.items()):
        tensors[f"blk.0.{NAMES[which]}.weight"] = blocks, "NVFP4"
        tensors[f"blk.0.{NAMES[which]}.scale"] = np.array([0.3 + seed], np.float32), "F32"
    path = write_tensors(tmp_path / "m.gguf", tensors)
    found = ExpertCheckpoint.open(str(path), GEOMETRY).expert(0, 0)
    assert found.formats == ("nvfp4", "nvfp4")
    with MappedReader() as reader:
        for seed, which in enumerate(NAMES):
            packed = _kernels.pack_matrix("nvfp4", getattr(found, which).read(reader))
            kept = _kernels.unpack_matrix("nvfp4", packed, SIZE, SIZE, False)
            values = quants.dequantize(stacks[which], GGMLQuantizationType.NVFP4)[0]
            np.testing.assert_array_equal(kept, values * np.float32(0.3 + seed))


def test_gate_up_and_down_keep_types_of_their_own(tmp_path: Path) -> None:
    """An expert means what the file says, and takes no more than its matrices do."""
    kinds = {"gate": "Q4_K", "up": "Q6_K", "down": "IQ3_S"}
    stacks = {which: (stack(kind, 2), kind) for which, kind in kinds.items()}
    found = checkpoint_of(tmp_path, stacks).expert(0, 0)
    assert found.formats == ("int4_g32_mins_products+int6_g16_products", "iq3_s_grid_products")
    assert not found.is_rounded
    with MappedReader() as reader:
        sources = found.read(reader, 0, SIZE, keeps=True)
        packed, error, _ = _kernels.pack_expert(*found.formats, *sources)
    assert error == 0
    layout = expert_layout(*found.formats, SIZE, SIZE)
    blocks = SIZE // 16
    assert packed.nbytes == blocks * sum(
        panel.panel_bytes for panel in (layout.gate, layout.gate_up, layout.down)
    )
    for (blocks_of, kind), weights in zip(stacks.values(), unpack_expert(layout, packed), strict=True):
        wanted = quants.dequantize(blocks_of, GGMLQuantizationType[kind])[0]
        np.testing.assert_array_equal(weights, wanted)


def test_a_type_that_no_format_keeps_is_rounded_alone(tmp_path: Path) -> None:
    """What it is rounded to is said; the matrices beside it stay as they are."""
    stacks = {which: (stack("Q4_0", seed), "Q4_0") for seed, which in enumerate(NAMES)}
    stacks["up"] = np.zeros((1, SIZE, SIZE // 128 * 18), np.uint8), "Q1_0"
    found = checkpoint_of(tmp_path, stacks).expert(0, 0)
    assert found.formats == ("int4_g32_f16+bfloat16", "int4_g32_f16")
    assert [bool(matrix.rounding) for matrix in found.all] == [False, True, False]


def test_biases_and_stacks_of_a_model(tmp_path: Path) -> None:
    """An expert other than the first, with biases: the packed matrix is what the package decodes."""
    from gguf import GGUFReader

    file = make_gguf("gpt_oss", tmp_path)
    stored = {tensor.name: tensor for tensor in GGUFReader(file.path).tensors}
    checkpoint = ExpertCheckpoint.open(str(file.path), read_geometry(file.path))
    with MappedReader() as reader:
        for which, name in NAMES.items():
            tensor = stored[f"blk.1.{name}.weight"]
            matrix = checkpoint.matrix(1, 2, which)
            source = matrix.read(reader)
            assert matrix.packed_format == "mxfp4"
            assert source.bias is not None
            packed = _kernels.pack_matrix("mxfp4", source)
            found = _kernels.unpack_matrix("mxfp4", packed, *matrix.shape, True)
            np.testing.assert_array_equal(found, quants.dequantize(tensor.data, tensor.tensor_type)[2])
