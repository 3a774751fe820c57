"""Invariant: in every family each linear layer may be quantised: codes and scales find their modules.

Names are the published ones, below whatever prefix the family has; what is loaded is compared with the same
checkpoint dequantised, which the other tests here hold to transformers.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gpu_service.layers.linear import Linear, StoredWeight
from gpu_service.loader.load import load_weights
from gpu_service.loader.names import expected_names
from gpu_service.models.compose import build_model
from gpu_service.ops.linear import dequantise
from moebius.models.read import read_model_config
from tests.helpers.model_formats import MODEL_FORMATS
from tests.helpers.quantised_models import PlainModel, quantise
from tests.helpers.tiny_models import TINY_MODELS, make_tiny_model
from tests.tolerances import DEQUANTISED_FLOAT32

# One of each.
FAMILIES = {tiny.model_type: name for name, tiny in reversed(TINY_MODELS.items())}


def weights_of(directory: Path, *, keep_fp8: bool) -> dict[str, torch.Tensor]:
    """Returns every parameter in float32, out of packed layouts and 8 bits."""
    model = build_model(read_model_config(directory))
    load_weights(model, directory, "panels" if keep_fp8 else "dequantised")
    names = {name for name in expected_names(model.config) if name.endswith(".weight_scales")}
    assert not names, "what is kept is still expected under the checkpoint's names"
    found = {
        name: value.to_dense() if value.is_mkldnn else value
        for name, value in model.named_parameters()
        if not name.endswith(".weight_scales")
    }
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.weight_scales is not None:
            found[f"{name}.weight"] = dequantise(module.weight, module.weight_scales, module._first_column)
        elif isinstance(module, StoredWeight) and module.packed is not None:
            stored_order = torch.arange(module.packed.out_features)
            order = module._output_order if isinstance(module, Linear) else None
            rows = stored_order if order is None else order
            found[f"{name}.weight"] = module.packed.take_rows(rows, torch.float32)
    return found


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_quantised_layers_of_every_family_are_found(family: str, tmp_path: Path) -> None:
    """Dequantised while loading, and kept in fp8."""
    make_tiny_model(FAMILIES[family], tmp_path / "made")
    stored: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "made").glob("*.safetensors"):
        stored |= load_file(file)
    made = PlainModel(tmp_path / "made", None, stored, {}, torch.empty(0))
    chosen = MODEL_FORMATS["fp8_block"]
    model = quantise(made, lambda name: chosen if stored[name].ndim == 2 else None, chosen.config)
    assert any(re.search(r"\.(self_attn|attention|attn|mixer)\.", name) for name in model.meant)
    expected = weights_of(model.dequantised().write(tmp_path / "plain"), keep_fp8=False)
    directory = model.write(tmp_path / "fp8")
    for keep_fp8 in (False, True):
        for name, value in weights_of(directory, keep_fp8=keep_fp8).items():
            torch.testing.assert_close(value, expected[name], rtol=DEQUANTISED_FLOAT32, atol=0, msg=name)
