"""Invariant: with MXFP4 experts a gpt-oss checkpoint is the model of transformers with the experts decoded.

Blocks and scales are stored as published checkpoints store them; transformers decodes them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_service.experts.local_client import LocalExpertClient
from moebius.models.read import read_geometry
from tests.helpers.paged_runner import load_runner
from tests.helpers.quantised_sources import mxfp4
from tests.helpers.tiny_models import TINY_MODELS, TinyModel, write_tiny_model
from tests.tolerances import LOGITS_FLOAT32_VS_TRANSFORMERS

PROMPT = [3, 17, 200, 5, 99, 42, 42, 8, 150, 23, 61, 2, 110, 77, 31]
# A block is 32 elements of a row.
SIZES = {"hidden_size": 64, "intermediate_size": 96}


def _quantise(directory: Path, reference: Any) -> None:
    """Replaces the experts' matrices on disk by blocks and scales, and in the reference by what they mean."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        parts = [mxfp4(matrix.T.contiguous().numpy()).tensors for matrix in tensors.pop(name)]
        blocks, scales = (
            torch.from_numpy(np.stack([part[key] for part in parts])) for key in ("blocks", "scales")
        )
        blocks = blocks.view(*scales.shape, 16)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        decoded = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        reference.get_parameter(name).data.copy_(decoded)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("base", ["gpt_oss", "gpt_oss_no_bias_tied"])
def test_logits_match_transformers_with_decoded_experts(base: str, tmp_path: Path) -> None:
    tiny = TinyModel("gpt_oss", TINY_MODELS[base].changes | SIZES)
    reference = write_tiny_model(tiny, tmp_path, seed=5)
    with torch.inference_mode():
        unquantised = reference(torch.tensor([PROMPT])).logits[0]
    _quantise(tmp_path, reference)
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    assert (expected - unquantised).abs().max() > 0.1, "the codes must matter"
    geometry = read_geometry(tmp_path)
    runner = load_runner(tmp_path, experts=LocalExpertClient(str(tmp_path), geometry, torch.float32))
    _, logits = runner.prefill(PROMPT, chunk=4)
    torch.testing.assert_close(logits, expected, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS)
