"""Guards that the towers of released models load completely: the names and shapes of the published files."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpu_service.models.vision.registry import build_from_config
from gpu_service.models.vision.tower import VisionTower
from moebius.models.config import VisionConfig
from moebius.models.keys import HfKeys
from moebius.models.registry import FAMILIES, family_of
from moebius.models.vision import read_vision
from tests.helpers.published_checkpoints import FIXTURES, Published, expand

MODELS = {
    file.stem: published
    for file in sorted(FIXTURES.glob("*.json"))
    if family_of((published := Published.load(file.stem)).config["model_type"]).vision is not None
}
_PREFIXES = (
    "mm_projector.",
    "model.resampler_model.",
    "model.vision_model.",
    "model.embed_vision.",
    "model.vision_tower.",
    "model.visual.",
    "multi_modal_projector.",
    "patch_merge_mlp.",
    "patch_merger.",
    "pre_mm_projector_norm.",
    "vision_encoder.",
    "vision_language_adapter.",
    "vision_model.",
    "vision_tower.",
    "vit_large_projector.",
)


def _build(config: dict[str, Any], hidden_size: int) -> VisionTower:
    with torch.device("meta"):
        return build_from_config(config, hidden_size, torch.bfloat16)


@pytest.mark.parametrize("name", list(MODELS))
def test_released_names_fill_the_tower(name: str) -> None:
    """Every tensor has its place, of its shape, no place is left, and the text model's loader wants none."""
    config = MODELS[name].config
    family = family_of(config["model_type"])
    vision = family.vision
    assert vision is not None
    tower = _build(config, config.get("text_config", config)["hidden_size"])
    found: dict[str, tuple[int, ...]] = {}
    for pattern, _, shape in MODELS[name].tensors:
        for published in expand(pattern) if pattern.startswith(_PREFIXES) else ():
            inner = vision.tower_name(published)
            assert inner is not None, published
            assert family.names.canonical_name(published, num_layers=100) is None
            for part, values in tower.parts(inner, torch.empty(shape, device="meta")):
                assert part not in found
                found[part] = tuple(values.shape)
    assert found == {name: tuple(tensor.shape) for name, tensor in tower.state_dict().items()}


def test_every_family_that_sees_has_a_published_model() -> None:
    assert {published.config["model_type"] for published in MODELS.values()} == {
        family.model_type for family in FAMILIES.values() if family.vision is not None
    }


def test_a_tower_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="out_hidden_size = 4096"):
        _build(MODELS["glm-4.5v"].config, 5120)


def test_kimis_own_spelling_is_read() -> None:
    vision = read_vision(HfKeys("config.json", dict(MODELS["kimi-k2.5"].config)), family_of("kimi_k25"))
    assert vision == VisionConfig(163605, 2, 14, 1152, 4304)
