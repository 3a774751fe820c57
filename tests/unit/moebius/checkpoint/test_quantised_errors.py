"""Guards that a checkpoint which cannot be served exactly is refused, naming tensor or key, and scheme."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expert_service.loader import plan_load
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.reader import SliceReader
from moebius.experts.slices import SliceRequest, plan_slice
from moebius.models.expert_checkpoint import ExpertCheckpoint
from moebius.models.read import read_geometry
from tests.helpers.quantised_checkpoints import (
    QUANTIZATION_CONFIGS,
    Array,
    GptOssMoe,
    QuantisedMoe,
    compressed,
    gptq,
)
from tests.helpers.quantised_sources import ENCODERS, SMALL_FORMATS

STEM = "model.layers.1.mlp.experts.2.down_proj"


def refusal(
    directory: Path,
    encoder: str,
    replace: dict[str, Array | None] | None = None,
    quantization: dict[str, Any] | None = None,
    dtypes: dict[str, str] | None = None,
) -> str:
    """Returns what planning a load of the changed checkpoint says."""
    moe = QuantisedMoe(encoder, quantization=quantization)
    model = moe.write(directory, replace, dtypes)
    with pytest.raises(CheckpointError) as caught:
        plan_load(read_geometry(model), str(model))
    return str(caught.value)


@pytest.mark.parametrize(
    ("encoder", "suffix", "scheme"),
    [
        ("fp8_block", "weight_scale_inv", "fp8"),
        ("fp8_channel", "weight_scale", "compressed-tensors float-quantized"),
        ("int8", "weight_scale", "compressed-tensors int-quantized"),
        ("compressed_int4_g32", "weight_scale", "compressed-tensors pack-quantized"),
        ("compressed_int4_g32_zeros", "weight_zero_point", "compressed-tensors pack-quantized"),
        ("awq_int4_g32", "qzeros", "awq"),
        ("gptq_int4_g32", "g_idx", "gptq"),
        ("nvfp4", "weight_scale_2", "modelopt NVFP4"),
        ("nvfp4_reciprocal", "weight_global_scale", "compressed-tensors nvfp4-pack-quantized"),
        ("compressed_int4_g32", "weight_packed", "compressed-tensors pack-quantized"),
    ],
)
def test_missing_tensors_are_named(tmp_path: Path, encoder: str, suffix: str, scheme: str) -> None:
    """The tensor that is not there, and the scheme that needs it."""
    message = refusal(tmp_path, encoder, {f"{STEM}.{suffix}": None})
    assert f"{STEM}.{suffix}' is missing" in message
    assert f"({scheme} needs it)" in message


@pytest.mark.parametrize(
    ("encoder", "suffix", "array", "expected"),
    [
        ("fp8_block", "weight_scale_inv", np.ones((2, 2), np.float32), "[1, 2]"),
        ("fp8_channel", "weight_scale", np.ones((95, 1), np.float32), "[96, 1]"),
        ("compressed_int4_g32", "weight_scale", np.ones((96, 3), np.uint16), "[96, 5]"),
        ("compressed_int4_g32", "weight_packed", np.ones((96, 19), np.int32), "[96, 20]"),
        ("compressed_int4_g32_zeros", "weight_zero_point", np.ones((96, 5), np.int32), "[12, 5]"),
        ("awq_int4_g32", "qweight", np.ones((96, 20), np.int32), "[160, 12]"),
        ("gptq_int4_g32", "qzeros", np.ones((5, 96), np.int32), "[5, 12]"),
        ("nvfp4", "weight_scale", np.ones((96, 5), np.uint8), "[96, 10]"),
    ],
)
def test_misshaped_tensors_are_named(
    tmp_path: Path, encoder: str, suffix: str, array: Array, expected: str
) -> None:
    """With the shape found and the one that the matrix and its groups call for."""
    message = refusal(tmp_path, encoder, {f"{STEM}.{suffix}": array})
    assert f"{STEM}.{suffix}'" in message
    assert str(list(array.shape)) in message
    assert f"calls for {expected}" in message


@pytest.mark.parametrize(
    ("encoder", "suffix", "dtype", "allowed"),
    [
        ("compressed_int4_g32", "weight_scale", "I16", "BF16, F16"),
        ("fp8_block", "weight_scale_inv", "I32", "F32, BF16"),
        ("awq_int4_g32", "qweight", "F32", "I32"),
    ],
)
def test_unusable_types_are_named(
    tmp_path: Path, encoder: str, suffix: str, dtype: str, allowed: str
) -> None:
    """The type found and those that the scheme may have."""
    message = refusal(tmp_path, encoder, dtypes={f"{STEM}.{suffix}": dtype})
    assert f"{STEM}.{suffix}' has dtype {dtype}; allowed for" in message
    assert allowed in message


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}


@pytest.mark.parametrize(
    ("encoder", "quantization", "complaint"),
    [
        (
            "int8",
            {"quant_method": "bitsandbytes"},
            "quant_method is 'bitsandbytes'; allowed: auto-round, awq, compressed",
        ),
        (
            "fp8_block",
            {"quant_method": "fp8", "weight_block_size": [64, 24]},
            "weight_block_size is [64, 24]; allowed: [rows, columns]",
        ),
        ("gptq_int4_g32", gptq(32, False, desc_act="often"), "desc_act is 'often'; allowed: True, False"),
        ("mxfp8", {"quant_method": "mxfp8", "weight_block_size": [1, 64]}, "weight_block_size is [1, 64]"),
        ("mxfp8", {"quant_method": "mxfp8", "moe_quant_algo": "NVFP4"}, "moe_quant_algo is 'NVFP4'"),
        ("gptq_int4_g32", gptq(48, False), "group_size is 48; allowed: 32, 64, 128, -1"),
        ("gptq_int4_g32", gptq(32, False, bits=3), "bits is 3; allowed: 4, 8"),
        ("gptq_int4_g32", gptq(32, False, checkpoint_format="marlin"), "checkpoint_format is 'marlin'"),
        ("awq_int4_g32", {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "'gemv'"),
        ("int8", compressed({**INT8, "actorder": "group"}, "int-quantized"), "actorder is 'group'"),
        ("compressed_int4_g32", compressed({**INT4, "group_size": 16}, "pack-quantized"), "group_size is 16"),
        ("compressed_int4_g32", compressed({**INT4, "num_bits": 3}, "pack-quantized"), "(3-bit int)"),
        ("compressed_int4_g32", compressed(INT4, "marlin-24"), "marlin-24 (4-bit int)"),
        ("int8", compressed({**INT8, "symmetric": False}, "int-quantized"), "symmetric is False"),
        ("int8", compressed(INT8, "int-quantized", {"num_bits": 8, "dynamic": False}), "dynamic is False"),
        ("nvfp4", {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'"),
        ("int8", {"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups is {}"),
        (
            "compressed_int4_g32",
            {**compressed(INT4, "pack-quantized"), "linear_fp8_config": {"weight_block_size": [128, 128]}},
            "linear_fp8_config.quant_method is None; allowed: fp8",
        ),
        (
            "compressed_int4_g32",
            {
                **compressed(INT4, "pack-quantized"),
                "linear_fp8_config": {"quant_method": "fp8", "weight_block_size": [128]},
            },
            "weight_block_size is [128]; allowed: [rows, columns]",
        ),
    ],
)
def test_unknown_schemes_are_named(
    tmp_path: Path, encoder: str, quantization: dict[str, Any], complaint: str
) -> None:
    """Key, value and what is allowed; nothing is read as if it were something else."""
    message = refusal(tmp_path, encoder, quantization=copy.deepcopy(quantization))
    assert complaint in message
    assert "allowed" in message


def test_quantised_tensors_need_a_configuration(tmp_path: Path) -> None:
    """float8 without quantization_config has no known scale."""
    model = QuantisedMoe("fp8_block").write(tmp_path)
    config = json.loads((model / "config.json").read_text())
    del config["quantization_config"]
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"gate_proj.weight' has dtype F8_E4M3; .*\(no quantisation\)"):
        plan_load(read_geometry(model), str(model))


def test_reordered_columns_are_refused(tmp_path: Path) -> None:
    """A g_idx that is not 0 0 .. 1 1 .. means act-order, even when desc_act says otherwise."""
    order = np.arange(160, dtype=np.int32)[::-1] // 32
    model = QuantisedMoe("gptq_int4_g32").write(tmp_path, {f"{STEM}.g_idx": order.copy()})
    checkpoint = ExpertCheckpoint.open(str(model), read_geometry(model))
    with (
        SliceReader() as reader,
        pytest.raises(CheckpointError, match=r"down_proj\.g_idx' reorders the columns \(desc_act\)"),
    ):
        checkpoint.matrix(1, 2, "down").read(reader)


def test_zero_points_of_a_symmetric_checkpoint(tmp_path: Path) -> None:
    """`sym` that the zero points belie would serve wrong weights."""
    moe = QuantisedMoe("gptq_int4_g32", quantization=gptq(32, True))
    model = moe.write(tmp_path)
    checkpoint = ExpertCheckpoint.open(str(model), read_geometry(model))
    with (
        SliceReader() as reader,
        pytest.raises(CheckpointError, match=r"qzeros' holds zero points other than .*gptq is symmetric"),
    ):
        checkpoint.matrix(0, 0, "gate").read(reader)


def test_a_global_divisor_of_zero_is_refused(tmp_path: Path) -> None:
    """compressed-tensors divides by it."""
    model = QuantisedMoe("nvfp4_reciprocal").write(
        tmp_path, {f"{STEM}.weight_global_scale": np.zeros(1, np.float32)}
    )
    checkpoint = ExpertCheckpoint.open(str(model), read_geometry(model))
    with SliceReader() as reader, pytest.raises(CheckpointError, match="weight_global_scale' is 0"):
        checkpoint.matrix(1, 2, "down").read(reader)


def test_leftover_side_tensors_are_named(tmp_path: Path) -> None:
    """Zero points that a symmetric configuration does not expect; scales of activations pass."""
    extra = {f"{STEM}.weight_zero_point": np.zeros((12, 5), np.int32)}
    assert "weight_zero_point' is an expert's" in refusal(tmp_path, "compressed_int4_g32", extra)
    model = QuantisedMoe("fp8_tensor").write(tmp_path, {f"{STEM}.input_scale": np.ones(1, np.float32)})
    assert plan_load(read_geometry(model), str(model)).weight_format == "fp8_channel"


def test_experts_of_one_layer_in_two_formats(tmp_path: Path) -> None:
    """Two formats are refused for keep; requantising makes them alike."""
    moe = QuantisedMoe("compressed_int4_g32")
    changes: dict[str, Array | None] = {}
    for matrix, shape in (("gate", (160, 96)), ("up", (160, 96)), ("down", (96, 160))):
        stem = f"model.layers.1.mlp.experts.2.{matrix}_proj"
        changes |= {f"{stem}.weight_packed": None, f"{stem}.weight_scale": None, f"{stem}.weight_shape": None}
        changes[f"{stem}.weight"] = np.ones(shape, np.float32)
    model = moe.write(tmp_path, changes)
    geometry = read_geometry(model)
    with pytest.raises(CheckpointError, match=r"experts\.2\.gate_proj\.weight' and the experts before it"):
        plan_load(geometry, str(model))
    assert plan_load(geometry, str(model), "int8").weight_format == "int8"


@pytest.mark.parametrize(
    ("encoder", "group", "servers"),
    [("compressed_int4_g64_f16", 64, 3), ("fp8_block", 128, 2), ("awq_int4_g32", 32, 6), ("nvfp4", 16, 11)],
)
def test_groups_are_never_cut(tmp_path: Path, encoder: str, group: int, servers: int) -> None:
    """More servers than groups: refused by size; as many as there are groups: every bound is one."""
    model = QuantisedMoe(encoder).write(tmp_path)
    geometry = read_geometry(model)
    plan = plan_load(geometry, str(model))
    assert plan.group == group
    with pytest.raises(
        ValueError, match=rf"160 intermediate channels .* groups of {group} that cannot be divided"
    ):
        plan_slice(geometry, SliceRequest("", split_count=servers), plan.group)
    most = 160 // group
    bounds = [
        plan_slice(geometry, SliceRequest("", split_count=most, split_index=index), plan.group)
        for index in range(most)
    ]
    assert all(part.intermediate_begin % group == 0 for part in bounds)
    whole = plan_slice(geometry, SliceRequest("", "expert", split_count=3), plan.group)
    assert whole.intermediate_size == 160


def test_gpt_oss_names(tmp_path: Path) -> None:
    """Stacked tensors: the wrong number of rows, and a limit that is none."""
    moe = GptOssMoe()
    model = moe.write(tmp_path)
    config = moe.config()
    (model / "config.json").write_text(json.dumps({**config, "swiglu_limit": 0}))
    with pytest.raises(CheckpointError, match=r"swiglu_limit = 0 .* allowed: a number > 0"):
        read_geometry(model)
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 32}))
    with pytest.raises(CheckpointError, match=r"gate_up_proj_blocks' of shape .* does not fit mxfp4"):
        plan_load(read_geometry(model), str(model))


def test_every_encoder_has_a_configuration() -> None:
    """The tests above go through all that can be encoded, but for what gpt-oss or GGUF files alone have."""
    mins = {f"{code}_mins" for code in ("int8_g32", "int4_g32", "int4_g16")}
    gguf = {"int8_g16_f16", "int4_g16_f16", *mins, *SMALL_FORMATS}
    assert set(ENCODERS) - set(QUANTIZATION_CONFIGS) == {"mxfp4", *gguf}
