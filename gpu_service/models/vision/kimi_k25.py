"""Kimi-K2.5's tower (MoonViT) and its projector, from transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from gpu_service.models.vision.tower import VisionTower, unfused

# How checkpoints spell what transformers' configuration calls otherwise.
_SPELLINGS = {
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_time": "pos_emb_time",
    "init_pos_emb_width": "pos_emb_width",
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers",
}
_PROJECTOR_SPELLINGS = {
    "mm_hidden_size": "projection_hidden_size",
    "projector_ln_eps": "projection_layer_norm_eps",
}


class KimiTower(VisionTower):
    """Patches are averaged over time, four of them side by side go through the projector."""

    def __init__(self, vision_tower: Any, mm_projector: Any) -> None:
        super().__init__()
        self.vision_tower = vision_tower
        self.mm_projector = mm_projector
        self._num_heads: int = vision_tower.config.num_attention_heads

    def encode(self, pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        pooled = self.vision_tower(pixels, grid_thw=grid, return_dict=True).pooler_output
        projected: torch.Tensor = self.mm_projector(pooled)
        return projected.squeeze(1)[None]

    def parts(self, name: str, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Queries, keys and values are one tensor in checkpoints."""
        return unfused(name, values, "attn.qkv_proj.", "attn.{}_proj.", self._num_heads)


def build_kimi_tower(config: Mapping[str, Any], hidden_size: int, dtype: torch.dtype) -> VisionTower:
    """Compose it from config.json's keys; parameters are on torch's current device, without values."""
    from transformers import Kimi_K25VisionConfig
    from transformers.models.kimi_k25.modeling_kimi_k25 import (
        Kimi_K25MultimodalProjection,
        Kimi_K25VisionModel,
    )

    keys = dict(config["vision_config"])
    projector = {name: keys.pop(spelled, config.get(name)) for spelled, name in _PROJECTOR_SPELLINGS.items()}
    known = set(Kimi_K25VisionConfig().to_dict())
    renamed = {_SPELLINGS.get(key, key): value for key, value in keys.items()}
    vision = Kimi_K25VisionConfig(**{key: value for key, value in renamed.items() if key in known})
    model_class: Any = Kimi_K25VisionModel
    projector_class: Any = Kimi_K25MultimodalProjection
    tower = model_class._from_config(vision, dtype=dtype, attn_implementation="sdpa")
    settings = SimpleNamespace(
        vision_config=vision,
        text_config=SimpleNamespace(hidden_size=hidden_size),
        projection_hidden_size=projector["projection_hidden_size"] or vision.hidden_size,
        projection_layer_norm_eps=projector["projection_layer_norm_eps"] or 1e-5,
    )
    return KimiTower(tower, projector_class(settings).to(dtype))
