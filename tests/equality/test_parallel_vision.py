"""Guards that dividing a model with vision never shows: four ranks in two stages answer as one does.

The stage that embeds puts features into the stream, DeepStack's second addition is the other stage's. The
tower is a stand-in that every rank has; towers themselves are compared with transformers' in
`test_vision.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gpu_service.assembly.build
from gpu_service.assembly.vision import Vision
from gpu_service.core.images import ImageLayout, PreparedImage, place_images
from gpu_service.models.vision.tower import VisionTower
from gpu_service.vision.features import ImageEncoder
from tests.helpers.rank_group import Outcome, Script, rank_config, run_group
from tests.helpers.tiny_vision_models import IMAGE_TOKEN, write_vision_model


def image(seed: int, rows: int, columns: int) -> PreparedImage:
    """Returns random patches, different for every seed."""
    pixels = np.random.default_rng(seed).normal(size=(4 * rows * columns, 6)).astype(np.float32)
    return PreparedImage(-seed, pixels, (1, 2 * rows, 2 * columns), (rows, columns))


LAYOUT = ImageLayout(IMAGE_TOKEN, IMAGE_TOKEN)
WIDE, TALL, OTHER = image(1, 2, 5), image(2, 4, 2), image(3, 2, 5)
PROMPTS: list[tuple[list[int], list[PreparedImage]]] = [
    ([11, 48, IMAGE_TOKEN, 71, 28], [WIDE]),
    ([IMAGE_TOKEN, 5, 123, IMAGE_TOKEN, 8], [TALL, WIDE]),
    ([11, 48, IMAGE_TOKEN, 71, 28], [OTHER]),
    ([10, 110, 4], []),
]


class StandIn(VisionTower):
    """A random projection of four patches each, once for the embedding and for two layers."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(3, 24, 48, generator=torch.Generator().manual_seed(5))
        self.weight = torch.nn.Parameter(weight)

    def encode(self, pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return pixels.view(1, -1, 24) @ self.weight


def use_stand_in() -> None:
    """From now on this process builds its engine so."""
    build: Any = gpu_service.assembly.build
    tower = ImageEncoder(StandIn(), torch.device("cpu"), 1 << 20)
    build.load_vision = lambda config, model, device: Vision(tower, None)  # type: ignore[arg-type]
    build.vision_memory = lambda config, model: None


def image_cases(script: Script) -> dict[str, list[Outcome]]:
    """Returns all at once in chunks, then again from the prefix cache."""
    cases = {}
    for name in ("fresh", "prefix"):
        requests = []
        for index, (prompt, images) in enumerate(PROMPTS):
            tokens, vision = place_images(prompt, images, LAYOUT) if images else (prompt, None)
            requests.append(script.submit(f"{name}{index}", tokens, vision, ignore_eos=True))
        cases[name] = script.wait(requests)
    return cases


@pytest.mark.parametrize("name", ["qwen3_vl_moe", pytest.param("ernie4_5_vl_moe", marks=pytest.mark.full)])
def test_ranks_do_not_show(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks give the same tokens, also where image tokens choose experts of their own, in the second stage
    too.
    """
    write_vision_model(name, tmp_path)
    # One rank needs no process of its own; what it replaces is put back.
    for name in ("load_vision", "vision_memory"):
        monkeypatch.setattr(gpu_service.assembly.build, name, getattr(gpu_service.assembly.build, name))
    use_stand_in()
    script = Script(rank_config(tmp_path, 1, 1))
    alone = image_cases(script)
    script.close()
    assert alone["fresh"][0].token_ids != alone["fresh"][2].token_ids
    assert alone["prefix"][1].cached_len > 8
    assert run_group(rank_config(tmp_path, 2, 2), use_stand_in, image_cases) == alone
