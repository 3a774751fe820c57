"""Guards towers and their settings: published names load completely, what does not fit is named."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from gpu_service.assembly.vision import encoding_bytes, load_vision, vision_memory
from gpu_service.cache.kv_cache import page_bytes
from gpu_service.core.images import ImageError, ImageLayout
from gpu_service.device import TORCH_DTYPES
from gpu_service.loader.load import load_tower
from gpu_service.memory.device_memory import MemoryUse
from gpu_service.memory.plan import IMAGES, VISION, parameter_bytes, plan_memory, size_kv_pool
from gpu_service.models.compose import build_model
from gpu_service.models.vision.registry import build_tower
from gpu_service.vision.processor import PROCESSORS, ImagePreparer, KimiImageProcessor, read_layout
from moebius.checkpoint.errors import CheckpointError
from moebius.config.loader import load_config
from moebius.errors import UserError
from moebius.models.config import ModelConfigError, ModelOverrides, VisionConfig
from moebius.models.read import read_model_config
from moebius.models.registry import FAMILIES
from tests.helpers.tiny_tokenizer import write_tokenizer
from tests.helpers.tiny_vision_models import noise, word_tokenizer, write_vision_model
from tests.helpers.vision_reference import kimi_sizes


def test_every_family_with_vision_has_names_and_a_tower() -> None:
    """Each rule is reached, and a text model's names are no tower's."""

    def example(pattern: str) -> str:
        return pattern.replace("**", "proj.weight").replace("*", "3")

    towers = [family.vision for family in FAMILIES.values() if family.vision is not None]
    assert len(towers) >= 7
    for vision in towers:
        for rule in vision.renames:
            assert rule.canonical is not None
            assert vision.tower_name(example(rule.stored)) == example(rule.canonical)
        assert vision.tower_name("model.language_model.norm.weight") is None
        assert vision.tower_name("language_model.model.norm.weight") is None
        assert vision.processor in PROCESSORS


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tower")
    write_vision_model("qwen3_vl_moe", directory)
    return directory


def _copy(source: Path, target: Path, **config: Any) -> Path:
    """Returns the checkpoint again, with other keys in config.json."""
    for name in ("model.safetensors", "preprocessor_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    values = json.loads((source / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(values))
    return target


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.pop("model.visual.merger.norm.bias"), "lacks visual.merger.norm.bias"),
        (lambda t: t.update({"model.visual.extra": torch.ones(2)}), "no use for model.visual.extra"),
        (lambda t: t.update({"model.visual.pos_embed.weight": torch.ones(3, 24)}), r"\[3, 24\], expected"),
        (
            lambda t: t.update({"model.visual.pos_embed.weight": torch.ones(36, 24, dtype=torch.int8)}),
            "is I8",
        ),
        (lambda t: t["model.visual.pos_embed.weight"][1].fill_(math.nan), "pos_embed.weight' holds NaN"),
    ],
)
def test_a_tower_that_does_not_fit_is_an_error_by_name(
    spoil: Any, message: str, checkpoint: Path, tmp_path: Path
) -> None:
    directory = _copy(checkpoint, tmp_path)
    tensors = load_file(directory / "model.safetensors")
    spoil(tensors)
    save_file(tensors, directory / "model.safetensors")
    config = read_model_config(directory)
    tower = build_tower(config, directory, "cpu")
    with pytest.raises(CheckpointError, match=message):
        load_tower(tower, directory, config.model_type)


def test_a_model_that_sees_says_so(checkpoint: Path) -> None:
    config = read_model_config(checkpoint)
    assert config.vision == VisionConfig(200, 2, 4, 24, 36)
    assert config.unread_keys == ()
    assert read_model_config(checkpoint, ModelOverrides(language_model_only=True)).vision is None
    # Residual and the inner side of an MLP are what lives at once.
    assert config.vision is not None
    assert encoding_bytes(config.vision, patches=10, itemsize=2) == 10 * 8 * 24 * 2


def test_a_gpu_keeps_room_for_images(checkpoint: Path) -> None:
    """The tower is weights like others; what images take comes later, so the KV pool leaves it."""
    config = load_config(None, {"model": str(checkpoint), "image_cache_mib": 64})
    model_config = read_model_config(checkpoint)
    vision = vision_memory(config, model_config)
    tower = build_tower(model_config, checkpoint, "cpu")
    assert vision.tower_bytes == sum(tensor.nbytes for tensor in (*tower.parameters(), *tower.buffers()))
    # 4096 pixels of the image processor's limit are 256 patches.
    assert vision.image_bytes == 64 * 2**20 + 256 * 8 * 24 * 4
    model, gib = build_model(model_config), 2**30
    use = MemoryUse(10 * gib, 9 * gib, 0, 0, 0, 0)
    page = page_bytes(model_config.layers, 16, torch.float32, TORCH_DTYPES[model_config.dtype])
    seeing = plan_memory(config, model_config, parameter_bytes(model), use, page, vision=vision)
    blind = plan_memory(config, model_config, parameter_bytes(model), use, page)
    assert seeing.of(VISION) + seeing.of(IMAGES) == vision.total == blind.kv_bytes - seeing.kv_bytes
    wide = config.model_copy(update={"gpu": config.gpu.model_copy(update={"max_num_seqs": 10**6})})
    pages = [size_kv_pool(plan, wide, model_config, use) for plan in (blind, seeing)]
    assert pages[0] - pages[1] == pytest.approx(vision.image_bytes / page, abs=1)


@pytest.mark.parametrize("missing", ["image_token_id", "vision_config"])
def test_half_a_description_is_an_error_or_no_vision(missing: str, checkpoint: Path, tmp_path: Path) -> None:
    directory = _copy(checkpoint, tmp_path, **{missing: None})
    if missing == "vision_config":
        assert read_model_config(directory).vision is None
        return
    with pytest.raises(ModelConfigError, match="image_token_id"):
        read_model_config(directory)
    # What is left out need not be right.
    blind = read_model_config(directory, ModelOverrides(language_model_only=True))
    assert (blind.vision, blind.unread_keys) == (None, ())


def test_a_checkpoint_must_say_how_images_are_prepared(checkpoint: Path, tmp_path: Path) -> None:
    directory = _copy(checkpoint, tmp_path)
    settings = json.loads((directory / "preprocessor_config.json").read_text())
    config = read_model_config(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(settings | {"patch_size": 8}))
    with pytest.raises(UserError, match="patches of 8"):
        ImagePreparer(config, directory, 1.0)
    (directory / "preprocessor_config.json").unlink()
    with pytest.raises(UserError, match="preprocessor_config"):
        ImagePreparer(config, directory, 1.0)
    # What transformers 5 writes: the image processor's keys inside the processor's.
    (directory / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    assert ImagePreparer(config, directory, 1.0).prepare(noise(1, 40, 16)).token_grid == (2, 5)


def test_files_that_are_no_images_are_refused(checkpoint: Path) -> None:
    preparer = ImagePreparer(read_model_config(checkpoint), checkpoint, 0.001)
    whole = noise(1, 40, 16)
    thin = io.BytesIO()
    Image.new("RGB", (900, 1)).save(thin, "PNG")
    for data, message in [
        (b"nothing", "not a PNG"),
        (whole[: len(whole) // 2], "damaged"),
        (noise(2, 80, 40), "megapixels"),
        (thin.getvalue(), "aspect ratio"),
    ]:
        with pytest.raises(ImageError, match=message):
            preparer.prepare(data)


def test_an_image_is_upright_and_opaque(checkpoint: Path) -> None:
    """The camera's orientation is applied, palettes and grey become RGB."""
    preparer = ImagePreparer(read_model_config(checkpoint), checkpoint, 1.0)
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    Image.new("RGB", (40, 16)).save(buffer, "JPEG", exif=exif)
    assert preparer.prepare(buffer.getvalue()).token_grid == (5, 2)
    for mode in ("L", "P", "RGBA"):
        buffer = io.BytesIO()
        Image.new(mode, (40, 16)).save(buffer, "PNG")
        assert preparer.prepare(buffer.getvalue()).token_grid == (2, 5)


def test_tokens_of_an_image_are_found_by_their_names(tmp_path: Path) -> None:
    """A tokenizer that lacks one is refused with its name, before any request."""
    write_vision_model("llama4", tmp_path)
    config = read_model_config(tmp_path)
    layout = read_layout(config, tmp_path)
    assert layout == ImageLayout(200, 201, start=(202,), end=(203,), column=(204,), row=(205,), whole=(200,))
    write_tokenizer(tmp_path, word_tokenizer({"<|image|>": 200}), None)
    with pytest.raises(UserError, match=r"no token '<\|image_start\|>'.*language_model_only"):
        read_layout(config, tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="how images stand in prompts is not known"):
        ImagePreparer(config, tmp_path, 1.0)


def test_an_image_that_no_step_can_hold_is_refused_at_the_start(tmp_path: Path) -> None:
    """Where its tokens see one another, all of them are computed at once."""
    write_vision_model("gemma4", tmp_path)
    settings = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 280}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    model = read_model_config(tmp_path)
    assert model.vision is not None
    assert model.vision.sees_ahead
    small = load_config(None, {"model": str(tmp_path), "max_num_batched_tokens": 256})
    with pytest.raises(UserError, match=r"max_num_batched_tokens: 256 .* at least 280"):
        load_vision(small, model, torch.device("cpu"))
    enough = load_config(None, {"model": str(tmp_path), "max_num_batched_tokens": 280})
    assert load_vision(enough, model, torch.device("cpu")) is not None


def test_sizes_of_kimi_are_transformers() -> None:
    """Sizes agree for the released limits and small ones, for images of all proportions."""
    for limits in ({}, {"max_patches": 100, "max_side_patches": 17}):
        processor = KimiImageProcessor(**limits)
        for step in range(60):
            height, width = 1 + 37 * step % 4001, 1 + int(7000 * abs(math.sin(step)))
            assert processor.sizes(height, width) == kimi_sizes()(
                height,
                width,
                patch_size=14,
                merge_kernel_size=2,
                max_patches=processor.max_patches,
                max_size_per_side=processor.max_side_patches,
            )


def test_settings_of_kimi_in_both_spellings() -> None:
    published = {
        "media_proc_cfg": {
            "in_patch_limit": 16384,
            "patch_limit_on_one_side": 512,
            "patch_size": 14,
            "merge_kernel_size": 2,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        }
    }
    theirs = {"size": {"max_height": 512, "max_width": 512}, "max_patches": 16384, "merge_size": 2}
    assert KimiImageProcessor.from_settings(published) == KimiImageProcessor()
    assert KimiImageProcessor.from_settings(theirs) == KimiImageProcessor()
