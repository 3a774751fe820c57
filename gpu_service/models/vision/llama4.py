"""Llama 4's tower: tiles by themselves, four patches side by side become a token; from transformers."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from gpu_service.models.vision.tower import VisionTower


class Llama4Tower(VisionTower):
    """`pixels` are `[tiles, 3, side, side]`; features follow one another tile by tile."""

    def __init__(self, vision_model: Any, multi_modal_projector: Any) -> None:
        super().__init__()
        self.vision_model = vision_model
        self.multi_modal_projector = multi_modal_projector

    def encode(self, pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        encoded = self.vision_model(pixels, return_dict=True).last_hidden_state
        projected: torch.Tensor = self.multi_modal_projector(encoded.flatten(0, 1))
        return projected[None]


def build_llama4_tower(config: Mapping[str, Any], hidden_size: int, dtype: torch.dtype) -> VisionTower:
    """Compose it from config.json's keys; parameters are on torch's current device, without values."""
    from transformers import Llama4VisionConfig, Llama4VisionModel
    from transformers.models.llama4.modeling_llama4 import Llama4MultiModalProjector

    vision = Llama4VisionConfig(**config["vision_config"])
    model_class: Any = Llama4VisionModel
    projector_class: Any = Llama4MultiModalProjector
    tower = model_class._from_config(vision, dtype=dtype, attn_implementation="sdpa")
    settings = SimpleNamespace(vision_config=vision, text_config=SimpleNamespace(hidden_size=hidden_size))
    return Llama4Tower(tower, projector_class(settings).to(dtype))
