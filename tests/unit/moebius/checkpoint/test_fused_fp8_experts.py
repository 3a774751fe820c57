"""Guards fp8 and NVFP4 experts of all layouts that stack them: shared blocks, transposed ones, scales.

Scales are stacked per expert: one each, one per row, or one per block of 128 x 128, which may straddle the
end of gate and the beginning of up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moebius import _kernels
from moebius.checkpoint.matrix_finder import side_name
from moebius.checkpoint.reader import SliceReader
from moebius.models.expert_checkpoint import ExpertCheckpoint
from moebius.models.read import read_geometry
from tests.helpers.checkpoints import TinyMoe, write_safetensors
from tests.helpers.quantised_models import QuantisedModel
from tests.helpers.quantised_sources import (
    Floats,
    Quantised,
    fp8_block,
    fp8_channel,
    fp8_tensor,
    nvfp4,
    random_weights,
)

EXPERTS, HIDDEN, INNER = 3, 160, 200
Encode = Callable[[Floats], Quantised]
# By scheme: how one matrix is stored, and what config.json says.
SCALES: dict[str, tuple[Encode, dict[str, Any]]] = {
    "blocks": (fp8_block, {"weight_block_size": [128, 128]}),
    "rows": (fp8_channel, {}),
    "one": (fp8_tensor, {}),
    "nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
}


_FUSED = "model.language_model.layers.0.mlp.experts."
_STACKED = "model.layers.0.moe."
_LLAMA4 = "language_model.model.layers.0.feed_forward.experts."
# By layout: what each tensor holds, one below the other, and its name.
NAMES: dict[str, dict[str, str]] = {
    "fused": {"gate up": f"{_FUSED}gate_up_proj", "down": f"{_FUSED}down_proj"},
    "fused_transposed": {"gate up": f"{_FUSED}gate_up_proj", "down": f"{_FUSED}down_proj"},
    "stacked": {part: f"{_STACKED}{part}_proj.weight" for part in ("gate", "up", "down")},
    # ModelOpt's copies of Llama 4: transposed, scales as well, whose suffixes are written whole.
    "llama4": {"gate up": f"{_LLAMA4}gate_up_proj", "down": f"{_LLAMA4}down_proj"},
}
TRANSPOSED = ("fused_transposed", "llama4")


def store(layout: str, encode: Encode, model: QuantisedModel) -> None:
    """All experts of layer 0, in the tensors of the layout; `meant` by expert and matrix."""
    rng = np.random.default_rng(3)
    for held, name in NAMES[layout].items():
        parts = held.split()
        size = (HIDDEN, INNER) if held == "down" else (INNER, HIDDEN)
        found = [encode(random_weights(rng, len(parts) * size[0], size[1])) for _ in range(EXPERTS)]
        for suffix in found[0].tensors:
            arrays = [each.tensors[suffix] for each in found]
            stacked = np.stack([array.T for array in arrays] if layout in TRANSPOSED else arrays)
            is_whole = layout == "llama4" and suffix != "weight"
            side = f"{name}_{suffix}" if is_whole else side_name(name, suffix)
            # One scale each is an axis less.
            model.tensors[side] = stacked.reshape(-1) if stacked.size == EXPERTS else stacked
            if encode is nvfp4 and suffix == "weight":
                model.dtypes[side] = "U8"
        for expert, each in enumerate(found):
            for which, weights in zip(parts, np.split(each.weights, len(parts)), strict=True):
                model.meant[f"{expert}.{which}"] = weights


@pytest.mark.parametrize(
    ("layout", "family", "scales"),
    [
        ("fused_transposed", "qwen3_vl_moe", "blocks"),
        ("fused_transposed", "qwen3_vl_moe", "one"),
        *(("fused", "qwen3_5_moe", scales) for scales in SCALES),
        *(("stacked", "step3p5", scales) for scales in SCALES),
        *(("llama4", "llama4", scales) for scales in ("one", "nvfp4")),
    ],
)
def test_stacked_experts_mean_their_weights(layout: str, family: str, scales: str, tmp_path: Path) -> None:
    encode, settings = SCALES[scales]
    tiny = TinyMoe(hidden_size=HIDDEN, moe_intermediate_size=INNER, num_layers=1, num_experts=EXPERTS)
    quantization = {"quant_method": "fp8", **settings}
    model = QuantisedModel({}, {}, {**tiny.config(), "quantization_config": quantization})
    store(layout, encode, model)
    model.write(tmp_path)
    geometry = replace(read_geometry(tmp_path), model_type=family)
    checkpoint = ExpertCheckpoint.open(str(tmp_path), geometry)
    with SliceReader() as reader:
        for key, weights in model.meant.items():
            expert, which = key.split(".")
            matrix = checkpoint.matrix(0, int(expert), which)
            found = _kernels.dequantise_matrix(matrix.read(reader))
            np.testing.assert_allclose(found, weights, rtol=3e-7)
            rows = _kernels.dequantise_matrix(matrix.read(reader, rows=slice(48, 144)))
            np.testing.assert_array_equal(rows, found[48:144])


def test_experts_taken_apart_are_found(tmp_path: Path) -> None:
    """Quantised checkpoints of families with fused experts have a tensor per expert."""
    tiny = TinyMoe(hidden_size=HIDDEN, moe_intermediate_size=INNER, num_layers=1, num_experts=1, top_k=1)
    name = "model.language_model.layers.0.mlp.experts.0.{}_proj.weight"
    shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    tensors = {name.format(part): np.ones(shape, np.float32) for part, shape in shapes.items()}
    QuantisedModel({}, {}, tiny.config()).write(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    for family in ("qwen3_vl_moe", "qwen3_5_moe"):
        geometry = replace(read_geometry(tmp_path), model_type=family)
        found = ExpertCheckpoint.open(str(tmp_path), geometry).expert(0, 0)
        assert found.down.name == name.format("down")
