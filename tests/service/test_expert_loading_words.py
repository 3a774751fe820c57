"""Guards that packed experts mean what words, groups and scales of unusual types mean, or are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from expert_service.host import ExpertHost, LoadSettings
from expert_service.placement import ThreadPlacement
from moebius.checkpoint.errors import CheckpointError
from moebius.experts.slices import SliceRequest
from moebius.models.read import read_geometry
from tests.helpers.model_formats import MODEL_FORMATS
from tests.helpers.quantised_checkpoints import QUANTIZATION_CONFIGS
from tests.helpers.quantised_models import Models, QuantisedModel, cached_plain_models, quantise
from tests.tolerances import EXPERTS_FLOAT32

LAYER = 1
# Held exactly by the packed formats of those names.
KEPT = {
    "fp8_block_bfloat16_scales": "fp8_block",
    "fp8_block_e8m0_scales": "fp8_block",
    "fp8_block_deepseek_v4": "fp8_block",
    "fp4_deepseek_v4": "mxfp4",
    "fp4_ling": "mxfp4",
    "fp8_block_compressed": "fp8_block",
    "fbgemm_fp8": "fp8_channel",
    "int8_words": "int8",
    "int8_words_g64": "int8_g64_f16",
    "int8_g64": "int8_g64_f16",
    "gptq_int8_g32": "int8_g32_f16",
    "gptq_int8_rows": "int8_g128_f16",
    "int4_rows": "int4_g128",
    "kimi_int4": "int4_g32",
    "gptq_bfloat16_scales": "int4_g32",
    "auto_round": "int4_g32_f16",
    "mxfp4_compressed": "mxfp4",
    "mxfp4_quark": "mxfp4",
    "fp8_block_modelopt": "fp8_block",
    "fp8_block_odd_rows": "fp8_g32",
    "fp8_block_quark": "fp8_block",
    "fp8_channel_modelopt": "fp8_channel",
    "fp8_groups_compressed": "fp8_g32",
    "mxfp8_blocks": "mxfp8",
    "mxfp8_compressed": "mxfp8",
    "mxfp8_e8m0": "mxfp8",
    "mxfp8_quark": "mxfp8",
    "gptq_act_order": "int4_g32_f16_ordered/int4_g32_f16",
    "gptq_act_order_zeros": "int4_g128_zeros_f16_ordered/int4_g128_zeros_f16",
    "gptq_int8_act_order": "int8_g32_f16_ordered/int8_g32_f16",
    "compressed_act_order": "int4_g32_ordered/int4_g32",
    "compressed_act_order_zeros": "int4_g32_zeros_ordered/int4_g32_zeros",
}
# Types of scales that no packed format has.
REFUSED = ("int4_float32_scales",)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return cached_plain_models(tmp_path_factory.mktemp("plain"))


def make(models: Models, name: str) -> QuantisedModel:
    chosen = MODEL_FORMATS[name]
    return quantise(models("qwen3_moe"), lambda _: chosen, chosen.config)


def host_of(directory: Path, **request: str) -> ExpertHost:
    settings = LoadSettings(calibrate_kernels=False)
    host = ExpertHost(ThreadPlacement(-1, 1, ()), lambda *_: None, lambda: None, settings)
    host.load(SliceRequest(str(directory), **request))  # type: ignore[arg-type]
    return host


def difference(host: ExpertHost, model: QuantisedModel, directory: Path) -> float:
    """Returns the largest difference of the layer's output from that of the weights in float64, over the
    largest value.
    """
    geometry = read_geometry(directory)
    rng = np.random.default_rng(5)
    hidden = rng.standard_normal((6, geometry.hidden_size), np.float32)
    ids = np.argsort(rng.random((6, geometry.num_experts)), 1)[:, : geometry.top_k].astype(np.int32)
    router = rng.random(ids.shape, np.float32)
    wanted = np.zeros(hidden.shape)
    for row, choice in np.ndindex(ids.shape):
        below, x = f"model.layers.{LAYER}.mlp.experts.{ids[row, choice]}", hidden[row].astype(np.float64)
        gate, up, down = (
            model.meant[f"{below}.{part}_proj.weight"].astype(np.float64) for part in ("gate", "up", "down")
        )
        intermediate = gate @ x
        wanted[row] += router[row, choice] * (down @ (intermediate / (1 + np.exp(-intermediate)) * (up @ x)))
    found = host.forward(LAYER, hidden, ids, router)
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("name", list(KEPT))
def test_experts_are_kept_exactly(name: str, models: Models, tmp_path: Path) -> None:
    model = make(models, name)
    directory = model.write(tmp_path)
    host = host_of(directory)
    assert host.loaded is not None
    assert host.loaded.weight_format == KEPT[name]
    assert difference(host, model, directory) < EXPERTS_FLOAT32


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_kept_is_requantised_only_when_asked(
    name: str, models: Models, tmp_path: Path
) -> None:
    model = make(models, name)
    directory = model.write(tmp_path)
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj\..* can not keep; .*--expert-dtype"):
        host_of(directory)
    assert difference(host_of(directory, weight_dtype="float32"), model, directory) < EXPERTS_FLOAT32


def test_every_format_is_kept_or_refused() -> None:
    """The formats that `test_expert_loading_formats` lacks are all above."""
    assert set(MODEL_FORMATS) - set(QUANTIZATION_CONFIGS) == {*KEPT, *REFUSED}
