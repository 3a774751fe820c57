"""Guards that our own image processors make the pixels of transformers': golden values in tests/data.

They were written by transformers 5.23's Llama4ImageProcessor, MiniMaxM3VLImageProcessor, Gemma4ImageProcessor
and Step3p7ImageProcessor, with torchvision 0.29 on torch 2.13, from the same images.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gpu_service.models.vision.step3p7 import STEP_CROPS_AT_A_TIME
from gpu_service.vision.own_processors import (
    FrameImageProcessor,
    PooledImageProcessor,
    StepImageProcessor,
    TileImageProcessor,
)
from moebius.errors import UserError
from tests.helpers.tiny_vision_models import noise

CASES = json.loads((Path(__file__).parents[3] / "data" / "image_pixels.json").read_text())


def _image(case: dict[str, Any]) -> Image.Image:
    width, height = case["width"], case["height"]
    return Image.open(io.BytesIO(noise(width + height, width, height))).convert("RGB")


def _tiles(settings: dict[str, Any]) -> TileImageProcessor:
    side = settings.get("size", {}).get("height", 336)
    return TileImageProcessor.from_settings(settings, patch_size=14, merge_size=2, tile_size=side)


def _step(settings: dict[str, Any]) -> StepImageProcessor:
    return StepImageProcessor.from_settings(settings, 14, 4, settings.get("size", {}).get("height", 728))


def _processor(case: dict[str, Any]) -> Any:
    settings = case["settings"]
    if case["processor"] == "step":
        return _step(settings)
    if case["processor"] == "llama4":
        return _tiles(settings)
    own = FrameImageProcessor if case["processor"] == "minimax" else PooledImageProcessor
    return own.from_settings(settings)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_pixels_are_transformers(number: int) -> None:
    """Sizes, tiles and values, for images that are thin, wide, small, large or just right."""
    case = CASES[number]
    is_llama, is_step = case["processor"] == "llama4", case["processor"] == "step"
    made = _processor(case).preprocess([_image(case)], "np")
    pixels = made["pixel_values"]
    assert list(pixels.shape) == case["shape"]
    if is_llama:
        assert list(made["tiles"]) == case["tiles"]
        assert made["image_grid_thw"].tolist() == [
            [len(pixels), pixels.shape[-1] // 14, pixels.shape[-1] // 14]
        ]
    elif is_step:
        rows, columns = case["tiles"]
        side = case["settings"].get("patch_size", 504) // 14
        assert list(made["tiles"]) == case["tiles"]
        assert made["image_grid_thw"].tolist() == [[rows * columns, side, side]]
        whole = 4 * made["whole_tokens"][0]
        assert len(pixels) == rows * columns * side**2 + whole**2
    else:
        assert made["image_grid_thw"].tolist() == [case["grid"]]
    flat = pixels.reshape(-1).astype(np.float64)
    np.testing.assert_allclose(flat[case["at"]], case["values"], atol=2e-6)
    assert flat.mean() == pytest.approx(case["mean"], abs=2e-6)
    assert (flat**2).mean() == pytest.approx(case["square"], abs=2e-6)


def test_no_image_has_more_patches_than_were_planned() -> None:
    """What memory is set aside for is never exceeded."""
    for case in CASES:
        shape = case["shape"]
        if case["processor"] == "llama4":
            assert shape[0] * (shape[-1] // 14) ** 2 <= _tiles(case["settings"]).max_patches
        elif case["processor"] == "step":
            # Crops are read some at a time.
            processor = _step(case["settings"])
            crop, whole = processor.crop_size // 14, processor.tile_size // 14
            count = min(STEP_CROPS_AT_A_TIME, case["tiles"][0] * case["tiles"][1])
            assert max(count * crop**2, whole**2) <= processor.max_patches
        else:
            assert shape[0] <= _processor(case).max_patches


def test_settings_that_do_not_fit_are_named() -> None:
    with pytest.raises(UserError, match=r"tiles of \(448, 448\), but vision_config says 336"):
        TileImageProcessor.from_settings({"size": {"height": 448, "width": 448}}, 14, 2, 336)
    with pytest.raises(UserError, match="resample of the image processor is 1"):
        FrameImageProcessor.from_settings({"resample": 1})
    with pytest.raises(UserError, match=r"\(700, 728\) pixels large, but vision_config says 728"):
        StepImageProcessor.from_settings({"size": {"height": 700}}, 14, 4, 728)
    with pytest.raises(UserError, match="cut into 500 and 728 pixels; allowed: multiples of 56"):
        StepImageProcessor.from_settings({"patch_size": 500}, 14, 4, 728)
    with pytest.raises(UserError, match="patches of 16 and merges of 4, but vision_config says 14 and 4"):
        StepImageProcessor.from_settings({"vision_patch_size": 16}, 14, 4, 728)


def test_an_image_is_not_cut_into_any_number_of_crops() -> None:
    """A line of pixels would have thousands, of one pixel each."""
    processor = _step({})
    for height, width in ((200, 60000), (1, 128), (60000, 1), (3024, 40)):
        if max(height, width) == 60000 and min(height, width) > 1:
            with pytest.raises(ValueError, match="too thin"):
                processor.plan(height, width)
        else:
            squared = min(height, width) < 32
            rows, columns = processor.plan(*((max(height, width),) * 2 if squared else (height, width)))[2]
            assert rows * columns <= 100
