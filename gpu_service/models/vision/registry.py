"""From `model_type` to the tower that sees for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gpu_service.model_config import ModelConfig
from gpu_service.models.vision.kimi_k25 import build_kimi_tower
from gpu_service.models.vision.tower import GridTower, VisionTower
from gpu_service.vision.config import transformers_needed

TowerBuilder = Callable[[Mapping[str, Any], int, torch.dtype], VisionTower]


def _grid_tower(family: str) -> TowerBuilder:
    """Of a family whose tower is one class of transformers."""

    def build(config: Mapping[str, Any], hidden_size: int, dtype: torch.dtype) -> VisionTower:
        import transformers

        vision = getattr(transformers, f"{family}VisionConfig")(**config["vision_config"])
        if vision.out_hidden_size != hidden_size:
            raise ValueError(
                f"vision_config: out_hidden_size = {vision.out_hidden_size} is not the model's hidden_size "
                f"({hidden_size})"
            )
        tower = getattr(transformers, f"{family}VisionModel")
        return GridTower(tower._from_config(vision, dtype=dtype, attn_implementation="sdpa"))

    return build


TOWER_BUILDERS: Mapping[str, TowerBuilder] = {
    "glm4v_moe": _grid_tower("Glm4vMoe"),
    "kimi_k25": build_kimi_tower,
    "qwen3_5_moe": _grid_tower("Qwen3_5Moe"),
    "qwen3_vl_moe": _grid_tower("Qwen3VLMoe"),
}


def build_tower(config: ModelConfig, directory: str | Path, device: torch.device | str) -> VisionTower:
    """Compose the tower of a checkpoint on `device` ("meta": only its sizes); `load_tower` gives it values.

    Raises ValueError when `vision_config` does not fit the model, UserError without transformers.
    """
    raw = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    with transformers_needed(), _without_values(), torch.device(device):
        tower = TOWER_BUILDERS[config.model_type](raw, config.hidden_size, config.torch_dtype)
    return tower.eval().requires_grad_(False)


@contextmanager
def _without_values() -> Iterator[None]:
    """Drawing random values that the checkpoint replaces would take longer than reading them."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        yield
