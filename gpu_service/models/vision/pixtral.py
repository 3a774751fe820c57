"""Mistral's tower (Pixtral) and what joins it to the text, from transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from gpu_service.models.vision.tower import VisionTower, half_split


class PixtralTower(VisionTower):
    """`pixels` are one image `[1, 3, height, width]`; a projection merges the patches of a token."""

    def __init__(self, vision_tower: Any, multi_modal_projector: Any) -> None:
        super().__init__()
        self.vision_tower = vision_tower
        self.multi_modal_projector = multi_modal_projector
        self._num_heads: int = vision_tower.config.num_attention_heads

    def encode(self, pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        """Encodes by the tower's parts: the whole makes a mask of patches by patches, which one image does
        not need.
        """
        tower = self.vision_tower
        embedded = tower.ln_pre(tower.patch_conv(pixels).flatten(2).mT)
        rows, columns = grid[0, 1:].tolist()
        places = torch.cartesian_prod(
            torch.arange(rows, device=pixels.device), torch.arange(columns, device=pixels.device)
        )
        rotation = tower.patch_positional_embedding(embedded, places)
        encoded = tower.transformer(embedded, position_embeddings=rotation, return_dict=True)
        projected: torch.Tensor = self.multi_modal_projector(
            encoded.last_hidden_state[0], [tuple(pixels.shape[-2:])]
        )
        return projected[None]

    def parts(self, name: str, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Mistral's own files have neighbours as rotary pairs."""
        found = next((letter for letter in "qk" if f".attention.w{letter}." in name), None)
        if found is None:
            yield name, values
        else:
            parameter = name.replace(f".attention.w{found}.", f".attention.{found}_proj.")
            yield parameter, half_split(values, self._num_heads)


def build_pixtral_tower(config: Mapping[str, Any], hidden_size: int, dtype: torch.dtype) -> VisionTower:
    """Compose it from config.json's keys; parameters are on torch's current device, without values."""
    from transformers import PixtralVisionConfig, PixtralVisionModel
    from transformers.models.mistral3.modeling_mistral3 import Mistral3MultiModalProjector

    vision = PixtralVisionConfig(**config["vision_config"])
    model_class: Any = PixtralVisionModel
    projector_class: Any = Mistral3MultiModalProjector
    tower = model_class._from_config(vision, dtype=dtype, attn_implementation="sdpa")
    settings = SimpleNamespace(
        vision_config=vision,
        text_config=SimpleNamespace(
            hidden_size=hidden_size, rms_norm_eps=config["text_config"].get("rms_norm_eps", 1e-6)
        ),
        spatial_merge_size=config.get("spatial_merge_size", 2),
        vision_feature_layer=-1,
        multimodal_projector_bias=config.get("multimodal_projector_bias", False),
        projector_hidden_act=config.get("projector_hidden_act", "gelu"),
    )
    return PixtralTower(tower, projector_class(settings).to(dtype))
