"""MiniMax-M3's tower (CLIP with rotary positions) and what joins it to the text, from transformers."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from gpu_service.models.vision.tower import VisionTower


class MiniMaxM3Tower(VisionTower):
    """Each patch goes through the projector, then four of them together."""

    def __init__(self, vision_tower: Any, multi_modal_projector: Any) -> None:
        super().__init__()
        self.vision_tower = vision_tower
        self.multi_modal_projector = multi_modal_projector

    def encode(self, pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        encoded = self.vision_tower(pixels, grid_thw=grid, return_dict=True).last_hidden_state
        projected: torch.Tensor = self.multi_modal_projector(encoded.squeeze(0))
        return projected[None]


def build_minimax_m3_tower(config: Mapping[str, Any], hidden_size: int, dtype: torch.dtype) -> VisionTower:
    """Compose it from config.json's keys; parameters are on torch's current device, without values."""
    from transformers import MiniMaxM3VLVisionConfig, MiniMaxM3VLVisionModel
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLMultiModalProjector

    vision = MiniMaxM3VLVisionConfig(**config["vision_config"])
    model_class: Any = MiniMaxM3VLVisionModel
    projector_class: Any = MiniMaxM3VLMultiModalProjector
    tower = model_class._from_config(vision, dtype=dtype, attn_implementation="sdpa")
    settings = SimpleNamespace(
        vision_config=vision,
        text_config=SimpleNamespace(hidden_size=hidden_size),
        projector_hidden_size=config.get("projector_hidden_size", hidden_size),
        merged_hidden_size=hidden_size * vision.spatial_merge_size**2,
    )
    return MiniMaxM3Tower(tower, projector_class(settings).to(dtype))
