"""Guards linear layers kept in fp8: the kernel is the reference, and ranks hold their codes and scales."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_service.core.parallel import ParallelContext
from gpu_service.layers.linear import Linear, StoredWeight
from gpu_service.loader.load import load_weights
from gpu_service.models.common import CausalLM
from gpu_service.models.compose import build_model
from gpu_service.ops.linear import dequantise, fp8_linear
from gpu_service.ops.panel_weight import PanelWeight
from gpu_service.ops.triton import linear as triton_linear
from moebius.models.read import read_model_config
from tests.helpers.model_formats import MODEL_FORMATS, ModelFormat
from tests.helpers.paged_runner import PagedRunner
from tests.helpers.quantised_models import (
    PROMPT,
    QUANTISED_MODELS,
    Models,
    cached_plain_models,
    local_experts,
    quantise,
    reference_logits,
    write_quantised,
)
from tests.tolerances import DEQUANTISED_FLOAT32, FP8_LINEAR, LOGITS_FLOAT32_VS_TRANSFORMERS

FP8 = ("fp8_block", "fp8_block_e8m0_scales", "fp8_block_256", "fp8_rows_128", "fp8_channel", "fp8_tensor")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return cached_plain_models(tmp_path_factory.mktemp("plain"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where a GPU is")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "outputs", "columns", "first_column"),
    [(0, 8, 128, 0), (1, 40, 300, 0), (3, 17, 90, 50), (20, 65, 200, 127), (70, 16, 128, 0)],
)
def test_the_kernel_is_the_reference(
    rows: int, outputs: int, columns: int, first_column: int, dtype: torch.dtype
) -> None:
    """Odd sizes, groups that columns cut at both ends, few rows and several blocks of them, strided rows."""
    torch.manual_seed(rows)
    wide = torch.randn(rows, columns + 3).to(dtype)
    weight = (torch.randn(outputs, columns) * 50).to(torch.float8_e4m3fn)
    scales = torch.rand(outputs, -(-(first_column + columns) // 128)) / 50
    bias = torch.randn(outputs).to(dtype) if rows != 3 else None
    arguments = (wide[:, :columns], weight, scales, first_column, bias)
    found, expected = triton_linear.fp8_linear(*arguments), fp8_linear.reference(*arguments)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=FP8_LINEAR[dtype] * columns**0.5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where a GPU is")
@pytest.mark.parametrize("bias", [True, False])
def test_many_rows_meet_widened_weights(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some outputs at a time, the last of which are fewer; groups that columns cut at both ends."""
    columns, first_column = 300, 50
    monkeypatch.setattr(triton_linear, "WIDEN_FROM_ROWS", 6)
    monkeypatch.setattr(triton_linear, "UNPACKED_BYTES", 4 * columns * 4)
    widened: list[int] = []
    product = triton_linear._widened_product
    monkeypatch.setattr(
        triton_linear, "_widened_product", lambda x, *rest: (widened.append(len(x)), product(x, *rest))
    )
    weight = (torch.randn(10, columns) * 50).to(torch.float8_e4m3fn)
    scales = torch.rand(10, -(-(first_column + columns) // 128)) / 50
    for rows in (5, 6):
        x, offset = torch.randn(rows, columns), torch.randn(10) if bias else None
        found = triton_linear.fp8_linear(x, weight, scales, first_column, offset)
        expected = fp8_linear.reference(x, weight, scales, first_column, offset)
        torch.testing.assert_close(found, expected, rtol=0, atol=FP8_LINEAR[x.dtype] * columns**0.5)
    assert widened == [6]


def load(directory: Path, parallel: ParallelContext, *, keep_fp8: bool) -> CausalLM:
    model = build_model(read_model_config(directory), parallel=parallel)
    load_weights(model, directory, "panels" if keep_fp8 else "dequantised")
    return model


def weights_of(model: CausalLM) -> dict[str, torch.Tensor]:
    """Returns the weights of linear layers, as float32, whatever they are held in."""
    found: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            weight = module.weight.to_dense() if module.weight.is_mkldnn else module.weight
            if module.weight_scales is not None:
                weight = dequantise(weight, module.weight_scales, module._first_column)
            found[name] = weight
    return found


def kept(model: CausalLM) -> set[str]:
    return {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, Linear) and module.weight.dtype == torch.float8_e4m3fn
    }


@pytest.mark.parametrize("name", FP8)
def test_ranks_keep_their_parts(name: str, models: Models, tmp_path: Path) -> None:
    """Rank 2 of 4 has columns of two blocks; all linear layers are kept, the router is not quantised."""
    chosen = MODEL_FORMATS[name]
    quantise(models("deepseek_v3"), lambda _: chosen, chosen.config).write(tmp_path)
    for parallel in (ParallelContext(), ParallelContext(2, 4, 0, 1)):
        model = load(tmp_path, parallel, keep_fp8=True)
        assert kept(model) == {"a_proj", "q_b_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"}
        expected = weights_of(load(tmp_path, parallel, keep_fp8=False))
        for path, weight in weights_of(model).items():
            torch.testing.assert_close(weight, expected[path], rtol=DEQUANTISED_FLOAT32, atol=0, msg=path)


def in_panels(model: CausalLM) -> set[str]:
    return {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, StoredWeight) and isinstance(module.packed, PanelWeight)
    }


@pytest.mark.parametrize("name", ["fp8_block_64", "mxfp8"])
def test_narrow_groups_are_kept_in_panels(name: str, models: Models, tmp_path: Path) -> None:
    """A scale for 128 columns is what layers in fp8 have; MXFP8 and small blocks have more."""
    chosen = MODEL_FORMATS[name]
    quantise(models("deepseek_v3"), lambda _: chosen, chosen.config).write(tmp_path)
    model = load(tmp_path, ParallelContext(), keep_fp8=True)
    assert not kept(model)
    assert "o_proj" in in_panels(model)


@pytest.mark.parametrize("model", list(QUANTISED_MODELS))
def test_logits_with_layers_kept_in_fp8(model: str, models: Models, tmp_path: Path) -> None:
    """Layers with a part in another format are in panels next to those that are kept in fp8."""
    plain, fp8, int8 = models(model), MODEL_FORMATS["fp8_channel"], MODEL_FORMATS["int8"]
    assert fp8.config is not None
    assert int8.config is not None
    groups = {
        "group_0": {**fp8.config["config_groups"]["group_0"], "format": "float-quantized"},
        "group_1": {**int8.config["config_groups"]["group_0"], "format": "int-quantized"},
    }
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}

    def choose(name: str) -> ModelFormat:
        return int8 if "up_proj" in name and ".experts." not in name else fp8

    reference = write_quantised(plain, tmp_path, choose, config)
    loaded = load(tmp_path, ParallelContext(), keep_fp8=True)
    assert "o_proj" in kept(loaded)
    assert "gate_up_proj" in in_panels(loaded) - kept(loaded), "its second part is int8"
    _, logits = PagedRunner(loaded, local_experts(tmp_path)).prefill(PROMPT)
    torch.testing.assert_close(
        logits, reference_logits(reference), rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS
    )
