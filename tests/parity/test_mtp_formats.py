"""Invariant: multi-token prediction is read in the format that it is stored in, the model's or another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from expert_service.loader import plan_load
from gpu_service.experts.local_client import LocalExpertClient
from moebius.models.config import ModelOverrides
from moebius.models.read import read_geometry
from tests.helpers.gguf_files import prediction_projection
from tests.helpers.gguf_models import GgufFile, cached_gguf_files
from tests.helpers.model_formats import MODEL_FORMATS
from tests.helpers.mtp_models import (
    MTP_FILE,
    MtpReference,
    head_logits,
    make_heads,
    write_mtp_model,
)
from tests.helpers.paged_runner import PagedRunner, load_runner
from tests.helpers.quantised_models import QUANTISED_MODELS, PlainModel, quantise
from tests.tolerances import LOGITS_FLOAT32_VS_TRANSFORMERS

TOKENS = [3, 17, 200, 5, 99, 42, 42, 8, 150, 23, 61, 2, 110, 77]
# Of the model that is quantised, decoder layers.
LAYERS = 2


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PlainModel:
    directory = tmp_path_factory.mktemp("plain")
    reference = write_mtp_model(QUANTISED_MODELS["deepseek_v3"], directory).model
    weights = load_file(directory / "model.safetensors") | load_file(directory / MTP_FILE)
    return PlainModel(directory, reference, weights, {}, torch.empty(0))


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], GgufFile]:
    return cached_gguf_files(tmp_path_factory.mktemp("gguf"))


def _runner(path: Path, dtype: torch.dtype = torch.float32) -> PagedRunner:
    """With the experts that servers are compared with, the head's too."""
    experts = LocalExpertClient(str(path), read_geometry(path, mtp_heads=1), dtype)
    return load_runner(path, experts=experts, overrides=ModelOverrides(mtp_heads=1, dtype="float32"))


@pytest.mark.covering(1)
@pytest.mark.parametrize("head", ["as the model", "in floats"])
@pytest.mark.parametrize("name", ["fp8_block", "compressed_int4_g32", "gptq_int4_g32"])
def test_a_quantised_head_is_the_dequantised_head(
    name: str, head: str, plain: PlainModel, tmp_path: Path
) -> None:
    """Experts keep the format of their layer; others of the checkpoint may have another."""
    chosen = MODEL_FORMATS[name]

    def choose(tensor: str) -> Any:
        is_head = tensor.startswith(f"model.layers.{LAYERS}.")
        shared = "embed_tokens" in tensor or "shared_head" in tensor
        return None if shared or (is_head and head == "in floats") else chosen

    stored = quantise(plain, choose, chosen.config)
    quantised, meant = stored.write(tmp_path / "stored"), stored.dequantised().write(tmp_path / "meant")
    (found,), (expected,) = (head_logits(_runner(path), TOKENS) for path in (quantised, meant))
    assert expected.std() > 0.5, "flat logits would hide errors"
    torch.testing.assert_close(found, expected, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS)
    plan = plan_load(read_geometry(quantised, mtp_heads=1), str(quantised))
    assert (plan.gate_up_formats[LAYERS] == plan.gate_up_formats[LAYERS - 1]) == (head == "as the model")


@pytest.mark.parametrize("name", ["deepseek_v3_whole_kv_b", "glm_moe_dsa"])
def test_the_head_of_a_gguf_file_is_that_of_transformers(name: str, gguf: Callable[[str], GgufFile]) -> None:
    """The file's block for prediction is its last decoder layer once more, between norms like the last."""
    file = gguf(name)
    heads = make_heads(file.reference, 1)
    with torch.no_grad():
        layer, model = heads.layers[0], file.reference.model
        layer.mtp_block.load_state_dict(model.layers[-1].state_dict())
        for norm in (layer.enorm, layer.hnorm, layer.post_norm):
            norm.weight.copy_(model.norm.weight)
        layer.eh_proj.weight.copy_(torch.from_numpy(prediction_projection(layer.hnorm.weight.shape[0])))
    (expected,) = MtpReference(file.reference, heads).logits(TOKENS)
    (found,) = head_logits(_runner(file.path), TOKENS)
    assert expected.std() > 0.3, "flat logits would hide errors"
    torch.testing.assert_close(found[:-1], expected, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS)
