"""Invariant: images of little detail are what the family's processor makes of them under a lower limit."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gpu_service.server.validation import Bounds, InvalidField, make_requests
from gpu_service.vision.processor import LOW_DETAIL_PIXELS, ImagePreparer
from moebius.models.config import ModelConfig
from moebius.models.read import read_model_config
from protos import engine_pb2 as pb
from tests.helpers.tiny_tokenizer import write_tokenizer
from tests.helpers.tiny_vision_models import IMAGE_TOKEN, VISION_MODELS, word_tokenizer, write_vision_model

SIZE = (1400, 600)
# Case of VISION_MODELS -> its family, and what its limit counts for each pixel of an image.
FAMILIES = {
    "qwen3_vl_moe": ("qwen3_vl_moe", 1),
    "qwen3_5_moe": ("qwen3_5_moe", 1),
    "glm4v_moe": ("glm4v_moe", 2),
    # Its processor is that of GLM-4.6V.
    "glm4v_moe_groups_tied": ("glm4v_moe", 2),
    "kimi_k25": ("kimi_k25", 1),
    "gemma4": ("gemma4", 1),
    "glm5_next": ("glm5_next", 1),
    "minimax_m3_vl": ("minimax_m3_vl", 1),
    "mistral_large4": ("mistral_large4", 1),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    directory = tmp_path_factory.mktemp("seeing")
    write_vision_model("qwen3_vl_moe", directory)
    return read_model_config(directory)


@pytest.fixture(scope="module")
def file() -> bytes:
    noise = np.random.default_rng(3).integers(0, 256, (SIZE[1] // 20, SIZE[0] // 20, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).resize(SIZE).save(buffer, "PNG")
    return buffer.getvalue()


def preparer(family: str, pixels: int, config: ModelConfig, directory: Path) -> ImagePreparer:
    """Returns the preparer of a checkpoint whose images have at most a number of pixels."""
    settings: dict[str, Any] = dict(VISION_MODELS[family].processor)
    if family == "gemma4":
        settings |= {"max_soft_tokens": pixels // 64}
    elif family == "glm5_next":
        settings |= {"max_image_tokens": pixels // 64}
    elif family == "mistral_large4":
        # Its limit is the longer side's.
        settings |= {"size": {"longest_edge": int(math.sqrt(pixels * SIZE[0] / SIZE[1])) // 8 * 8}}
    elif family == "kimi_k25":
        settings |= {"max_patches": pixels // 16, "size": {"max_height": 4096, "max_width": 4096}}
    else:
        settings |= {"size": {"shortest_edge": 64, "longest_edge": pixels * FAMILIES[family][1]}}
    directory.mkdir(exist_ok=True)
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    write_tokenizer(directory, word_tokenizer(VISION_MODELS[family].tokens), None)
    return ImagePreparer(replace(config, model_type=FAMILIES[family][0]), directory, max_megapixels=1.0)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_little_detail_is_the_processor_with_a_lower_limit(
    family: str, config: ModelConfig, file: bytes, tmp_path: Path
) -> None:
    large = preparer(family, 10**6, config, tmp_path / "large")
    limited = preparer(family, LOW_DETAIL_PIXELS, config, tmp_path / "limited")
    low, wanted, high = large.prepare(file, low_detail=True), limited.prepare(file), large.prepare(file)
    assert low.grid == wanted.grid
    np.testing.assert_array_equal(low.pixels, wanted.pixels)
    assert low.key != high.key == wanted.key
    assert high.num_tokens > 2 * low.num_tokens
    pixels = low.grid[1] * low.grid[2] * 16
    # Kimi pads its sides to whole tokens after that.
    assert 0.9 * LOW_DETAIL_PIXELS < pixels <= LOW_DETAIL_PIXELS * (1.03 if family == "kimi_k25" else 1)
    width, height = SIZE
    assert low.token_grid[1] / low.token_grid[0] == pytest.approx(width / height, rel=0.05)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_little_detail_is_never_more_than_the_checkpoint_allows(
    family: str, config: ModelConfig, file: bytes, tmp_path: Path
) -> None:
    small = preparer(family, 4096, config, tmp_path)
    low, high = small.prepare(file, low_detail=True), small.prepare(file)
    assert low.grid == high.grid
    np.testing.assert_array_equal(low.pixels, high.pixels)


def test_little_detail_is_fewer_tiles(file: bytes, tmp_path: Path) -> None:
    """There are as many tiles as cover 512 x 512 pixels, and one more with all of the image."""
    write_vision_model("llama4", tmp_path)
    config = read_model_config(tmp_path)
    assert config.vision is not None
    config = replace(config, vision=replace(config.vision, tile_size=336, patch_size=14))
    settings = {"size": {"height": 336, "width": 336}, "max_patches": 16}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    made = ImagePreparer(config, tmp_path, max_megapixels=1.0)
    low, high = made.prepare(file, low_detail=True), made.prepare(file)
    assert (low.tiles, high.tiles) == ((1, 2), (2, 5))
    assert (low.num_tokens, high.num_tokens) == (3 * 144, 11 * 144)


def test_little_detail_is_no_crops(file: bytes, tmp_path: Path) -> None:
    """Step-3.7 reads all of an image in one size, and crops of it as they are."""
    write_vision_model("step3p7", tmp_path)
    made = ImagePreparer(read_model_config(tmp_path), tmp_path, max_megapixels=1.0)
    low, high = made.prepare(file, low_detail=True), made.prepare(file)
    assert (low.tiles, low.num_tokens, low.grid) == ((0, 0), 4, (0, 4, 4))
    assert high.num_tokens == 4 + high.tiles[0] * high.tiles[1] > 100 // 2
    np.testing.assert_array_equal(low.pixels, high.pixels[-len(low.pixels) :])


def test_a_detail_that_is_not_known_is_named(config: ModelConfig, file: bytes, tmp_path: Path) -> None:
    """Enumerations of the protocol are open: any number may come."""
    message = pb.GenerateRequest(
        request_id="r",
        tokenized=pb.TokenizedInput(input_ids=[1, IMAGE_TOKEN]),
        sampling_params=pb.SamplingParams(max_tokens=1),
    )
    message.images.add(data=file, detail=7)
    with pytest.raises(InvalidField, match=r"images\[0\].detail.*IMAGE_DETAIL_HIGH, IMAGE_DETAIL_LOW"):
        make_requests(message, Bounds(211, 4096), preparer("qwen3_vl_moe", 4096, config, tmp_path))
