"""ERNIE 4.5 VL's tower and its resampler, from transformers."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from gpu_service.models.vision.tower import VisionTower


class ErnieTower(VisionTower):
    """Four patches side by side become a token; an image counts as two equal frames."""

    def __init__(self, vision_tower: Any, resampler_model: Any) -> None:
        super().__init__()
        self.vision_tower = vision_tower
        self.resampler_model = resampler_model

    def encode(self, pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        patches = self.vision_tower(pixels, grid_thw=grid, return_dict=True).last_hidden_state
        features: torch.Tensor = self.resampler_model(patches, grid)
        return features[None]


def build_ernie_tower(config: Mapping[str, Any], hidden_size: int, dtype: torch.dtype) -> VisionTower:
    """Compose it from config.json's keys, in transformers' spelling or the released one.

    Parameters are on torch's current device, without values.
    """
    from transformers import Ernie4_5_VLMoeVisionConfig
    from transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe import (
        Ernie4_5_VLMoeVariableResolutionResamplerModel,
        Ernie4_5_VLMoeVisionTransformerPretrainedModel,
    )

    keys = dict(config["vision_config"])
    keys.setdefault("intermediate_size", int(keys.get("mlp_ratio", 4) * keys["hidden_size"]))
    for axis in ("spatial", "temporal"):
        if config.get(f"{axis}_conv_size") is not None:
            keys[f"{axis}_merge_size"] = config[f"{axis}_conv_size"]
    known = set(Ernie4_5_VLMoeVisionConfig().to_dict()) - {"model_type"}
    vision = Ernie4_5_VLMoeVisionConfig(**{key: value for key, value in keys.items() if key in known})
    model_class: Any = Ernie4_5_VLMoeVisionTransformerPretrainedModel
    resampler_class: Any = Ernie4_5_VLMoeVariableResolutionResamplerModel
    tower = model_class._from_config(vision, dtype=dtype, attn_implementation="sdpa")
    text = config.get("text_config", config)
    settings = SimpleNamespace(
        vision_config=vision,
        text_config=SimpleNamespace(hidden_size=hidden_size, rms_norm_eps=text["rms_norm_eps"]),
    )
    return ErnieTower(tower, resampler_class(settings).to(dtype))
