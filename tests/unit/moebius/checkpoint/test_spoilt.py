"""Invariant: a corrupt or incomplete checkpoint is refused, and the error names the tensor, key or file.

Dense layers and experts are loaded as serving does it: whichever notices first must say it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from expert_service.loader import plan_load
from gpu_service.loader.load import load_weights
from gpu_service.models.compose import build_model
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.reader import SliceReader
from moebius.models.config import ModelConfigError
from moebius.models.read import read_geometry, read_model_config
from tests.helpers import spoilt_checkpoints as spoil
from tests.helpers.model_formats import MODEL_FORMATS
from tests.helpers.quantised_models import Models, QuantisedModel, cached_plain_models, quantise
from tests.helpers.spoilt_checkpoints import DOWN, NORM, Q, Spoilt

INT4, GPTQ, AWQ, FP8 = "compressed_int4_g32", "gptq_int4_g32", "awq_int4_g32", "fp8_block"
SECOND = "model-00002-of-00002.safetensors"
NAN = np.float32("nan")

CASES: dict[str, Spoilt] = {
    # Tensors that are not there.
    "scale_missing": Spoilt(
        FP8, (f"{Q}.weight_scale_inv", "is missing", "fp8"), spoil.without(f"{Q}.weight_scale_inv")
    ),
    "scale_of_expert_missing": Spoilt(
        INT4, (f"{DOWN}.weight_scale", "is missing"), spoil.without(f"{DOWN}.weight_scale")
    ),
    "zeros_missing": Spoilt(AWQ, (f"{Q}.qzeros", "is missing", "awq"), spoil.without(f"{Q}.qzeros")),
    "codes_missing": Spoilt(INT4, (f"{Q}.weight_packed", "is missing"), spoil.without(f"{Q}.weight_packed")),
    "matrix_missing": Spoilt(
        AWQ,
        ("1 missing", f"{Q}.weight"),
        spoil.without(*(f"{Q}.{s}" for s in ("qweight", "qzeros", "scales"))),
    ),
    "norm_missing": Spoilt(FP8, ("1 missing", NORM), spoil.without(NORM)),
    "global_scale_missing": Spoilt(
        "nvfp4", (f"{Q}.weight_scale_2", "is missing"), spoil.without(f"{Q}.weight_scale_2")
    ),
    # Shapes.
    "scale_of_other_blocks": Spoilt(
        FP8, (f"{Q}.weight_scale_inv", "[4, 4]", "[2, 2]"), spoil.reshaped(f"{Q}.weight_scale_inv", 4, 4)
    ),
    "group_size_not_dividing": Spoilt(
        INT4, (f"{Q}.weight_scale", "[160, 4]", "[160, 5]"), spoil.reshaped(f"{Q}.weight_scale", 160, 4)
    ),
    "packed_too_narrow": Spoilt(
        INT4, (f"{Q}.weight_packed", "[160, 19]", "[160, 20]"), spoil.reshaped(f"{Q}.weight_packed", 160, 19)
    ),
    "packed_for_expert": Spoilt(
        INT4,
        (f"{DOWN}.weight_packed", "[160, 8]", "[160, 9]"),
        spoil.reshaped(f"{DOWN}.weight_packed", 160, 8),
    ),
    "words_the_other_way": Spoilt(
        GPTQ, (f"{Q}.qweight", "[160, 20]", "[20, 160]"), spoil.reshaped(f"{Q}.qweight", 160, 20)
    ),
    "plain_misshaped": Spoilt(FP8, ("mis-shaped", NORM, "[7]", "[160]"), spoil.reshaped(NORM, 7)),
    "scale_of_many_for_a_tensor": Spoilt(
        "nvfp4", (f"{Q}.weight_scale_2", "[2]", "single"), spoil.reshaped(f"{Q}.weight_scale_2", 2)
    ),
    # Types.
    "scale_of_integers": Spoilt(
        FP8, (f"{Q}.weight_scale_inv", "I32", "F32, BF16"), spoil.typed(f"{Q}.weight_scale_inv", "I32")
    ),
    "codes_of_another_float8": Spoilt(FP8, (f"{Q}.weight", "F8_E5M2"), spoil.typed(f"{Q}.weight", "F8_E5M2")),
    "norm_of_integers": Spoilt(FP8, ("mis-typed", NORM, "I32"), spoil.typed(NORM, "I32")),
    "type_unknown": Spoilt(
        FP8, (f"{Q}.weight", "F8_E3M4"), files=spoil.header_changed(f"{Q}.weight", dtype="F8_E3M4")
    ),
    # Values.
    "scale_nan": Spoilt(FP8, (f"{Q}.weight_scale_inv", "NaN"), spoil.filled(f"{Q}.weight_scale_inv", NAN)),
    "scale_infinite": Spoilt(AWQ, (f"{Q}.scales", "infinite"), spoil.filled(f"{Q}.scales", np.inf)),
    "scale_nan_bfloat16": Spoilt(
        INT4, (f"{Q}.weight_scale", "NaN"), spoil.filled(f"{Q}.weight_scale", 0x7FC0)
    ),
    "scale_nan_float8": Spoilt(
        "nvfp4", (f"{Q}.weight_scale", "NaN"), spoil.filled(f"{Q}.weight_scale", 0x7F)
    ),
    "scale_nan_e8m0": Spoilt(
        "mxfp4_quark", (f"{Q}.weight_scale", "NaN"), spoil.filled(f"{Q}.weight_scale", 0xFF)
    ),
    "scale_of_expert_nan": Spoilt(
        INT4, (f"{DOWN}.weight_scale", "NaN"), spoil.filled(f"{DOWN}.weight_scale", 0x7F80)
    ),
    # Weights themselves, dense and of experts.
    "weight_nan_float32": Spoilt("float32", (f"{Q}.weight", "NaN"), spoil.filled(f"{Q}.weight", NAN)),
    "weight_infinite_float32": Spoilt(
        "float32", (f"{DOWN}.weight", "NaN or inf"), spoil.filled(f"{DOWN}.weight", -np.inf)
    ),
    "weight_nan_bfloat16": Spoilt("bfloat16", (f"{Q}.weight", "NaN"), spoil.filled(f"{Q}.weight", 0xFFC0)),
    "weight_of_expert_nan_bfloat16": Spoilt(
        "bfloat16", (f"{DOWN}.weight", "NaN"), spoil.filled(f"{DOWN}.weight", 0x7F81)
    ),
    "weight_infinite_bfloat16": Spoilt(
        "bfloat16", (f"{DOWN}.weight", "infinite"), spoil.filled(f"{DOWN}.weight", 0xFF80)
    ),
    "weight_infinite_float16": Spoilt(
        "float16", (f"{DOWN}.weight", "infinite"), spoil.filled(f"{DOWN}.weight", np.inf)
    ),
    "weight_nan_float8": Spoilt(FP8, (f"{Q}.weight'", "NaN"), spoil.filled(f"{Q}.weight", 0x7F)),
    "weight_of_expert_nan_float8": Spoilt(
        FP8, (f"{DOWN}.weight'", "NaN"), spoil.filled(f"{DOWN}.weight", 0xFF)
    ),
    "scale_of_expert_nan_e8m0": Spoilt(
        "mxfp4_quark", (f"{DOWN}.weight_scale", "NaN"), spoil.filled(f"{DOWN}.weight_scale", 0xFF)
    ),
    "scale_of_expert_infinite_float16": Spoilt(
        AWQ, (f"{DOWN}.scales", "infinite"), spoil.filled(f"{DOWN}.scales", np.inf)
    ),
    "product_infinite": Spoilt(
        FP8, (f"{Q}.weight'", "infinite"), spoil.filled(f"{Q}.weight_scale_inv", np.float32(3e38))
    ),
    "norm_nan": Spoilt(FP8, (NORM, "NaN"), spoil.filled(NORM, NAN)),
    "divisor_zero": Spoilt(
        "nvfp4_reciprocal", (f"{Q}.weight_global_scale", "is 0"), spoil.filled(f"{Q}.weight_global_scale", 0)
    ),
    "columns_reordered": Spoilt(GPTQ, (f"{Q}.g_idx", "desc_act"), spoil.filled(f"{Q}.g_idx", 0)),
    "zeros_not_symmetric": Spoilt(
        "gptq_int8_g32", (f"{Q}.qzeros", "symmetric"), spoil.filled(f"{Q}.qzeros", 0x7F7F7F7E)
    ),
    # Tensors that are not asked for.
    "extra_tensor": Spoilt(
        FP8, ("1 unused", f"{Q}.weight_scale"), spoil.added(f"{Q}.weight_scale", np.ones(1, np.float32))
    ),
    "extra_zeros": Spoilt(
        INT4,
        ("1 unused", f"{Q}.weight_zero_point"),
        spoil.added(f"{Q}.weight_zero_point", np.ones((20, 5), np.int32)),
    ),
    "scaled_inputs": Spoilt(
        "nvfp4",
        ("1 unused", f"{Q}.pre_quant_scale"),
        spoil.added(f"{Q}.pre_quant_scale", np.ones(160, np.float32)),
    ),
    "bias_of_no_bias": Spoilt("gptq_int8_g32", ("1 unused", f"{Q}.bias"), spoil.filled(f"{Q}.bias", 1)),
    # quantization_config.
    "method_unknown": Spoilt(
        FP8, ("quant_method", "'hqq'", "compressed-tensors"), spoil.configured(quant_method="hqq")
    ),
    "format_unknown": Spoilt(
        INT4, ("format", "marlin-24", "pack-quantized"), spoil.configured(format="marlin-24")
    ),
    "block_unknown": Spoilt(
        FP8, ("weight_block_size", "[64, 24]"), spoil.configured(weight_block_size=[64, 24])
    ),
    "desc_act": Spoilt(GPTQ, ("desc_act", "often"), spoil.configured(desc_act="often")),
    "bits_unknown": Spoilt(GPTQ, ("bits", "3", "4, 8"), spoil.configured(bits=3)),
    "group_size_unknown": Spoilt(
        INT4, ("group_size", "48", "32, 64, 128"), spoil.weights_configured(group_size=48)
    ),
    "group_size_of_another": Spoilt(
        INT4, (f"{Q}.weight_scale", "[160, 5]", "[160, 3]"), spoil.weights_configured(group_size=64)
    ),
    "strategy_unknown": Spoilt(INT4, ("strategy", "'token'"), spoil.weights_configured(strategy="token")),
    "rule_unknown": Spoilt(GPTQ, ("bits", "2"), spoil.configured(dynamic={".*q_proj": {"bits": 2}})),
    "configuration_missing": Spoilt(FP8, (f"{Q}.weight", "F8_E4M3", "no quantisation"), spoil.unconfigured),
    # Files.
    "shard_truncated": Spoilt(FP8, (spoil.SINGLE, "truncated"), files=spoil.truncated),
    "header_garbage": Spoilt(FP8, (spoil.SINGLE, "not JSON"), files=spoil.garbled),
    "header_too_long": Spoilt(FP8, (spoil.SINGLE, "header of"), files=spoil.header_too_long),
    "header_too_deep": Spoilt(FP8, (spoil.SINGLE, "not JSON"), files=spoil.header_of("[" * 100_000)),
    "header_with_a_name_twice": Spoilt(
        FP8, (spoil.SINGLE, "'x' twice"), files=spoil.header_of('{"x": {}, "x": {}}')
    ),
    "tensors_apart": Spoilt(
        FP8, (NORM, "begins at byte"), files=spoil.header_changed(NORM, data_offsets=[1, 641])
    ),
    "bytes_after_the_last_tensor": Spoilt(FP8, (spoil.SINGLE, "end at byte"), files=spoil.longer),
    "pointer_in_place_of_weights": Spoilt(
        FP8, (spoil.SINGLE, "Git LFS", "git lfs pull"), files=spoil.written(spoil.SINGLE, spoil.LFS_POINTER)
    ),
    "pointer_in_place_of_the_index": Spoilt(
        FP8,
        (spoil.INDEX, "Git LFS", "git lfs pull"),
        files=spoil.sharded(spoil.written(spoil.INDEX, spoil.LFS_POINTER)),
    ),
    "bytes_that_do_not_fit": Spoilt(
        FP8, (f"{Q}.weight", "needs"), files=spoil.header_changed(f"{Q}.weight", shape=[1])
    ),
    "checkpoint_missing": Spoilt(FP8, (spoil.SINGLE, "is missing"), files=spoil.removed(spoil.SINGLE)),
    "shard_missing": Spoilt(FP8, (SECOND, "is missing"), files=spoil.sharded(spoil.removed(SECOND))),
    "shard_without_tensor": Spoilt(
        FP8, (NORM, SECOND, spoil.INDEX), files=spoil.sharded(spoil.indexed({NORM: SECOND}))
    ),
    "shard_elsewhere": Spoilt(
        FP8, (NORM, "../other"), files=spoil.sharded(spoil.indexed({NORM: "../other.safetensors"}))
    ),
    "tensor_twice": Spoilt(FP8, (NORM, SECOND), files=spoil.sharded(spoil.twice)),
    "index_garbage": Spoilt(
        FP8, (spoil.INDEX, "not JSON"), files=spoil.sharded(spoil.written(spoil.INDEX, "{"))
    ),
    "config_missing": Spoilt(FP8, ("config.json",), files=spoil.removed("config.json")),
    "config_garbage": Spoilt(FP8, ("config.json", "JSON"), files=spoil.written("config.json", "{")),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return cached_plain_models(tmp_path_factory.mktemp("plain"))


def load_all(directory: Path) -> None:
    """Dense layers, then the plan of the experts, then all of them."""
    model = build_model(read_model_config(directory))
    load_weights(model, directory)
    plan = plan_load(read_geometry(directory), str(directory))
    with SliceReader() as reader:
        for expert in plan.experts.values():
            for matrix in (expert.gate, expert.up, expert.down):
                matrix.read(reader)


def fresh(models: Models, name: str) -> QuantisedModel:
    chosen = MODEL_FORMATS[name]
    return quantise(models("qwen3_moe"), lambda _: chosen, chosen.config)


@pytest.mark.parametrize("case", list(CASES))
def test_a_spoilt_checkpoint_is_refused_by_name(case: str, models: Models, tmp_path: Path) -> None:
    spoilt = CASES[case]
    model = fresh(models, spoilt.format)
    spoilt.spoils(model)
    directory = model.write(tmp_path)
    spoilt.files(directory)
    with pytest.raises((CheckpointError, ModelConfigError)) as caught:
        load_all(directory)
    message = str(caught.value)
    assert all(name in message for name in spoilt.named), message


@pytest.mark.parametrize("name", sorted({case.format for case in CASES.values()} - {"gptq_int8_g32"}))
def test_what_is_spoilt_above_loads_otherwise(name: str, models: Models, tmp_path: Path) -> None:
    """The unspoilt file loads, so that no case passes for a reason of its own."""
    load_all(fresh(models, name).write(tmp_path))
