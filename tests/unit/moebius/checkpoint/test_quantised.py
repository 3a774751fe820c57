"""Guards that quantised checkpoints are recognised by configuration and tensors, and mean what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moebius import _kernels
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.reader import SliceReader
from moebius.models.expert_checkpoint import ExpertCheckpoint
from moebius.models.read import read_geometry
from tests.helpers.quantised_checkpoints import QUANTIZATION_CONFIGS, GptOssMoe, QuantisedMoe
from tests.helpers.quantised_sources import ENCODERS

MATRICES = ("gate", "up", "down")


def opened(directory: Path) -> ExpertCheckpoint:
    return ExpertCheckpoint.open(str(directory), read_geometry(directory))


@pytest.mark.parametrize("encoder", list(QUANTIZATION_CONFIGS))
def test_every_format_means_its_weights(tmp_path: Path, encoder: str) -> None:
    """Whole matrices: the scheme is found, the packed format holds it exactly, and the weights are right."""
    moe = QuantisedMoe(encoder)
    checkpoint = opened(moe.write(tmp_path))
    wanted = ENCODERS[encoder](np.ones((16, 128), np.float32)).format
    with SliceReader() as reader:
        for (layer, expert, which), weights in moe.weights.items():
            matrix = checkpoint.matrix(layer, expert, which)
            assert matrix.packed_format == wanted
            source = matrix.read(reader)
            assert _kernels.unsupported_reason(wanted, source) == ""
            found = _kernels.dequantise_matrix(source)
            np.testing.assert_allclose(found, weights, rtol=3e-7)


@pytest.mark.parametrize("encoder", list(QUANTIZATION_CONFIGS))
def test_slices_are_slices_of_the_weights(tmp_path: Path, encoder: str) -> None:
    """Rows of gate and up, columns of down, cut where the format allows."""
    moe = QuantisedMoe(encoder)
    checkpoint = opened(moe.write(tmp_path))
    with SliceReader() as reader:
        up, down = checkpoint.matrix(1, 2, "up"), checkpoint.matrix(1, 2, "down")
        cut = max(16, up.row_multiple, down.col_multiple)
        assert cut % up.row_multiple == cut % down.col_multiple == 0
        # Blocks may be wider than the matrix.
        for part in (slice(0, cut), slice(cut, 160)) if cut < 160 else (slice(0, 160),):
            rows = _kernels.dequantise_matrix(up.read(reader, rows=part))
            np.testing.assert_allclose(rows, moe.weights[1, 2, "up"][part], rtol=3e-7)
            cols = _kernels.dequantise_matrix(down.read(reader, cols=part))
            np.testing.assert_allclose(cols, moe.weights[1, 2, "down"][:, part], rtol=3e-7)


def test_blocks_of_fp8_may_be_cut_along_out(tmp_path: Path) -> None:
    """The slice knows how far into its block of 128 rows it begins."""
    moe = QuantisedMoe("fp8_block")
    matrix = opened(moe.write(tmp_path)).matrix(0, 0, "up")
    with SliceReader() as reader:
        for begin, end in ((16, 160), (112, 144), (128, 160)):
            found = _kernels.dequantise_matrix(matrix.read(reader, rows=slice(begin, end)))
            np.testing.assert_allclose(found, moe.weights[0, 0, "up"][begin:end], rtol=3e-7)


def test_gpt_oss(tmp_path: Path) -> None:
    """Interleaved gate and up, biases, the activation and its limit."""
    moe = GptOssMoe()
    checkpoint = opened(moe.write(tmp_path))
    assert (checkpoint.model.activation, checkpoint.model.alpha, checkpoint.model.limit) == (
        "gpt_oss",
        1.702,
        5.0,
    )
    with SliceReader() as reader:
        for (layer, expert, which), weights in moe.weights.items():
            source = checkpoint.matrix(layer, expert, which).read(reader)
            np.testing.assert_array_equal(_kernels.dequantise_matrix(source), weights)
            assert source.bias is not None
            np.testing.assert_array_equal(source.bias, moe.biases[layer, expert, which])
        gate = checkpoint.matrix(0, 1, "gate").read(reader, rows=slice(16, 48))
        np.testing.assert_array_equal(_kernels.dequantise_matrix(gate), moe.weights[0, 1, "gate"][16:48])


def test_unquantised_layers_in_a_quantised_checkpoint(tmp_path: Path) -> None:
    """What is stored as floats is floats, whatever quantization_config says: no list is needed."""
    moe = QuantisedMoe("compressed_int4_g32")
    plain = {
        f"model.layers.0.mlp.experts.1.down_proj.{suffix}": None
        for suffix in ("weight_packed", "weight_scale")
    }
    weights = np.ones((96, 160), np.float32)
    model = moe.write(tmp_path, {**plain, "model.layers.0.mlp.experts.1.down_proj.weight": weights})
    checkpoint = opened(model)
    assert checkpoint.matrix(0, 1, "down").packed_format == "float32"
    assert checkpoint.matrix(0, 0, "down").packed_format == "int4_g32"


_OLD_AWQ = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}


@pytest.mark.parametrize(
    ("encoder", "file", "content", "packed"),
    [
        ("nvfp4", "hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, "nvfp4"),
        (
            "gptq_int4_g32",
            "quantize_config.json",
            {"bits": 4, "group_size": 32, "sym": False, "desc_act": False},
            "int4_g32_zeros_f16",
        ),
        ("awq_int4_g32", "quant_config.json", _OLD_AWQ, "int4_g32_zeros_f16"),
    ],
)
def test_files_next_to_the_configuration(
    tmp_path: Path, encoder: str, file: str, content: dict[str, Any], packed: str
) -> None:
    """Quantisers' own files serve where config.json says nothing, and are refused when they are none."""
    model = QuantisedMoe(encoder).write(tmp_path)
    config = json.loads((model / "config.json").read_text())
    del config["quantization_config"]
    (model / "config.json").write_text(json.dumps(config))
    (model / file).write_text(json.dumps(content))
    assert opened(model).matrix(0, 0, "gate").packed_format == packed
    (model / file).write_text("[")
    with pytest.raises(CheckpointError, match=f"{file} cannot be read as a quantiser's configuration"):
        opened(model)


def test_channel_scales_of_int4(tmp_path: Path) -> None:
    """A scale per row is one that all groups of 128 share."""
    moe = QuantisedMoe("compressed_int4_g128")
    moe.quantization = json.loads(json.dumps(QUANTIZATION_CONFIGS["compressed_int4_g128"]))
    assert moe.quantization is not None
    weights = moe.quantization["config_groups"]["group_0"]["weights"]
    weights.update(strategy="channel", group_size=None)
    tensors, _ = moe.tensors()
    # One group covers the 96 columns of gate and up; down gets its first group's scale for the whole row.
    changed = {
        name: array[:, :1].copy()
        for name, array in tensors.items()
        if name.endswith("down_proj.weight_scale")
    }
    checkpoint = opened(moe.write(tmp_path, changed))
    with SliceReader() as reader:
        gate = _kernels.dequantise_matrix(checkpoint.matrix(0, 0, "gate").read(reader))
        np.testing.assert_allclose(gate, moe.weights[0, 0, "gate"], rtol=3e-7)
        down = checkpoint.matrix(0, 0, "down").read(reader)
        assert down.scales is not None
        assert down.scales.shape == (96, 2)
        np.testing.assert_allclose(
            _kernels.dequantise_matrix(down)[:, :128], moe.weights[0, 0, "down"][:, :128], rtol=3e-7
        )
