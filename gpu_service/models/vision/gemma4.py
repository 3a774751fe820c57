"""Gemma 4's tower: squares of patches are averaged into a token; from transformers."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from gpu_service.models.vision.tower import VisionTower


class Gemma4Tower(VisionTower):
    """`pixels` are `[P, 3 * patch * patch]`, row by row of patches and without padding."""

    def __init__(self, vision_tower: Any, embed_vision: Any) -> None:
        super().__init__()
        self.vision_tower = vision_tower
        self.embed_vision = embed_vision

    def encode(self, pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        columns = int(grid[0, 2])
        number = torch.arange(pixels.shape[0], device=pixels.device)
        positions = torch.stack((number % columns, number // columns), dim=-1)
        encoded = self.vision_tower(pixels[None], pixel_position_ids=positions[None]).last_hidden_state
        projected: torch.Tensor = self.embed_vision(inputs_embeds=encoded)
        return projected[None]


def build_gemma4_tower(config: Mapping[str, Any], hidden_size: int, dtype: torch.dtype) -> VisionTower:
    """Compose it from config.json's keys; parameters are on torch's current device, without values."""
    from transformers import Gemma4VisionConfig, Gemma4VisionModel
    from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder

    vision = Gemma4VisionConfig(**config["vision_config"])
    model_class: Any = Gemma4VisionModel
    embedder_class: Any = Gemma4MultimodalEmbedder
    tower = model_class._from_config(vision, dtype=dtype, attn_implementation="sdpa")
    text: Any = SimpleNamespace(hidden_size=hidden_size)
    return Gemma4Tower(tower, embedder_class(vision, text).to(dtype))
