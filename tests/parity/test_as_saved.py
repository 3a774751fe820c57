"""Invariant: what transformers' `save_pretrained` writes, as of fine-tunes, is served as it is.

Of most families all tests of this directory load such files. Here are those that transformers writes
otherwise than they were released.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from expert_service.loader import plan_load
from gpu_service.experts.local_client import LocalExpertClient
from gpu_service.loader.load import load_tower
from gpu_service.models.vision.registry import build_tower
from moebius.models.read import read_geometry, read_model_config
from tests.helpers.paged_runner import load_runner
from tests.helpers.tiny_models import TINY_MODELS, make_tiny_model
from tests.helpers.tiny_multimodal_text import TEXT_TOWERS
from tests.helpers.tiny_vision_models import VISION_MODELS, write_vision_model
from tests.tolerances import LOGITS_FLOAT32_VS_TRANSFORMERS

PROMPT = [3, 17, 200, 5, 99, 42, 8, 150, 23, 61, 2]
# Transformers writes its successor, which is another family.
WRITTEN_AS_ANOTHER = "step3p5"
REWRITTEN = sorted(
    name
    for name, tiny in TINY_MODELS.items()
    if tiny.model_type in TEXT_TOWERS and tiny.model_type != WRITTEN_AS_ANOTHER
)


@pytest.mark.parametrize("name", REWRITTEN)
def test_a_saved_text_model_is_transformers_model(name: str, tmp_path: Path) -> None:
    """Every tensor has its place, experts and dense layers, and logits agree."""
    reference = make_tiny_model(name, tmp_path, publish=False)
    geometry = read_geometry(tmp_path)
    plan_load(geometry, str(tmp_path))
    runner = load_runner(tmp_path, experts=LocalExpertClient(str(tmp_path), geometry, torch.float32))
    _, logits = runner.prefill(PROMPT)
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS)


@pytest.mark.parametrize("name", sorted(VISION_MODELS))
def test_a_saved_tower_is_the_released_one(name: str, tmp_path: Path) -> None:
    """Parameter by parameter."""
    towers = []
    for publish in (True, False):
        directory = tmp_path / str(publish)
        write_vision_model(name, directory, publish=publish)
        config = read_model_config(directory)
        tower = build_tower(config, str(directory), torch.device("cpu"))
        load_tower(tower, directory, config.model_type)
        towers.append(tower.state_dict())
    released, saved = towers
    assert released.keys() == saved.keys()
    assert all(torch.equal(released[name], saved[name]) for name in released)
