"""Step-3.7's tower (a perception encoder with convolutions that merge patches), from transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from gpu_service.models.vision.tower import VisionTower, unfused

# An elongated image may have a hundred of them, and all of a crop's patches see one another.
STEP_CROPS_AT_A_TIME = 8


class StepTower(VisionTower):
    """`pixels` are patches `[P, 3, patch, patch]`: of crops, counted by `grid`, then of all of the image."""

    def __init__(self, vision_model: Any, multi_modal_projector: nn.Module) -> None:
        super().__init__()
        self.vision_model = vision_model
        self.multi_modal_projector = multi_modal_projector
        self._num_heads: int = vision_model.config.num_attention_heads
        self._whole: int = vision_model.config.image_size // vision_model.config.patch_size

    def encode(self, pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        """Crop by crop, all of the image last."""
        crops, rows, columns = grid[0].tolist()
        split, most = crops * rows * columns, STEP_CROPS_AT_A_TIME * rows * columns
        starts = range(0, split, max(1, most))
        parts = [self._features(pixels[at : min(at + most, split)], rows, columns) for at in starts]
        parts.append(self._features(pixels[split:], self._whole, self._whole))
        return torch.cat(parts)[None]

    def _features(self, patches: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Returns `[N, H]` of as many pictures of rows x columns patches as there are."""
        patch = patches.shape[-1]
        squares = patches.view(-1, rows, columns, 3, patch, patch).permute(0, 3, 1, 4, 2, 5)
        squares = squares.reshape(-1, 3, rows * patch, columns * patch)
        encoded = self.vision_model(squares, return_dict=True).last_hidden_state
        projected: torch.Tensor = self.multi_modal_projector(encoded.flatten(0, 1))
        return projected

    def parts(self, name: str, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Queries, keys and values are one tensor in checkpoints, with neighbours as rotary pairs."""
        return unfused(name, values, ".self_attn.in_proj_", ".self_attn.{}_proj.", self._num_heads)


def build_step_tower(config: Mapping[str, Any], hidden_size: int, dtype: torch.dtype) -> VisionTower:
    """Compose it from config.json's keys; parameters are on torch's current device, without values."""
    from transformers import Step3p7VisionConfig, Step3p7VisionModel

    keys = {key: value for key, value in config["vision_config"].items() if key != "model_type"}
    vision = Step3p7VisionConfig(**keys)
    model_class: Any = Step3p7VisionModel
    tower = model_class._from_config(vision, dtype=dtype, attn_implementation="sdpa")
    bias = bool(config.get("projector_bias", False))
    return StepTower(tower, nn.Linear(4 * vision.hidden_size, hidden_size, bias=bias, dtype=dtype))
