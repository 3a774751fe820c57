"""Builds the vision tower of a family, from transformers' classes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gpu_service.device import TORCH_DTYPES
from gpu_service.models.vision.ernie4_5_vl_moe import build_ernie_tower
from gpu_service.models.vision.gemma4 import build_gemma4_tower
from gpu_service.models.vision.kimi_k25 import build_kimi_tower
from gpu_service.models.vision.llama4 import build_llama4_tower
from gpu_service.models.vision.minimax_m3 import build_minimax_m3_tower
from gpu_service.models.vision.pixtral import build_pixtral_tower
from gpu_service.models.vision.step3p7 import build_step_tower
from gpu_service.models.vision.tower import GridTower, VisionTower, transformers_needed
from moebius.models.config import ModelConfig
from moebius.models.registry import vision_family

# By `VisionFamily.tower`; the others are one class of transformers.
_BUILDERS: Mapping[str, Callable[[Mapping[str, Any], int, torch.dtype], VisionTower]] = {
    "Ernie4_5_VLMoe": build_ernie_tower,
    "Gemma4": build_gemma4_tower,
    "Kimi_K25": build_kimi_tower,
    "Llama4": build_llama4_tower,
    "MiniMaxM3VL": build_minimax_m3_tower,
    "Pixtral": build_pixtral_tower,
    "Step3p7": build_step_tower,
}


def build_from_config(config: Mapping[str, Any], hidden_size: int, dtype: torch.dtype) -> VisionTower:
    """Builds the tower from config.json's keys, on torch's current device and without values.

    Raises ValueError.
    """
    family = vision_family(config["model_type"]).tower
    build = _BUILDERS.get(family)
    if build is not None:
        return build(config, hidden_size, dtype)
    return _grid_tower(family, config, hidden_size, dtype)


def _grid_tower(family: str, config: Mapping[str, Any], hidden_size: int, dtype: torch.dtype) -> VisionTower:
    """Builds the tower of a family that is one class of transformers."""
    import transformers

    vision = getattr(transformers, f"{family}VisionConfig")(**config["vision_config"])
    if vision.out_hidden_size != hidden_size:
        raise ValueError(
            f"vision_config: out_hidden_size = {vision.out_hidden_size} is not the model's hidden_size "
            f"({hidden_size})"
        )
    tower = getattr(transformers, f"{family}VisionModel")
    return GridTower(tower._from_config(vision, dtype=dtype, attn_implementation="sdpa"))


def build_tower(config: ModelConfig, directory: str | Path, device: torch.device | str) -> VisionTower:
    """Compose the tower of a checkpoint on `device` ("meta": only its sizes); `load_tower` gives it values.

    Raises ValueError when `vision_config` does not fit the model, UserError without transformers.
    """
    raw = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    with transformers_needed(), _without_values(), torch.device(device):
        tower = build_from_config(raw, config.hidden_size, TORCH_DTYPES[config.dtype])
    return tower.eval().requires_grad_(False)


@contextmanager
def _without_values() -> Iterator[None]:
    """Drawing random values that the checkpoint replaces would take longer than reading them."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        yield
