"""From an image file to what the tower reads: transformers' image processors on Pillow and numpy.

Kimi-K2.5's is our own, because transformers' needs torchvision: it computes sizes by the same rule
(`navit_resize`) and resizes with Pillow, as the code published with the checkpoint does.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from gpu_service.core.images import ImageError, ImageLayout, PreparedImage
from gpu_service.models.vision.tower import transformers_needed
from gpu_service.vision.own_processors import (
    FrameImageProcessor,
    PooledImageProcessor,
    StepImageProcessor,
    TileImageProcessor,
    numbers,
)
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.tokenizer import read_backend
from moebius.errors import UserError
from moebius.image_files import ImageFileError, decode_image
from moebius.models.config import ModelConfig, VisionConfig
from moebius.models.registry import vision_family


@dataclass(frozen=True, slots=True)
class KimiImageProcessor:
    """Settings, filled by `from_settings`; lengths in pixels but where they count patches."""

    patch_size: int = 14
    merge_size: int = 2
    # Most patches of an image, and along one of its sides.
    max_patches: int = 16384
    max_side_patches: int = 512
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @staticmethod
    def from_settings(settings: Mapping[str, Any]) -> KimiImageProcessor:
        """Makes the processor from transformers' keys, or those of the published checkpoint
        (`media_proc_cfg`).
        """
        keys = dict(settings.get("media_proc_cfg") or settings)
        side = (keys.get("size") or {}).get("max_height")
        found: dict[str, Any] = {
            "patch_size": keys.get("patch_size"),
            "merge_size": keys.get("merge_size", keys.get("merge_kernel_size")),
            "max_patches": keys.get("max_patches", keys.get("in_patch_limit")),
            "max_side_patches": keys.get("patch_limit_on_one_side", side),
            "image_mean": numbers(keys.get("image_mean")),
            "image_std": numbers(keys.get("image_std")),
        }
        return KimiImageProcessor(**{name: value for name, value in found.items() if value is not None})

    def sizes(self, height: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns height and width after resizing, and after padding."""
        patches = max(1, height // self.patch_size) * max(1, width // self.patch_size)
        longest = self.max_side_patches * self.patch_size
        scale = min(1.0, math.sqrt(self.max_patches / patches), longest / height, longest / width)
        resized = tuple(min(longest, max(1, int(side * scale))) for side in (height, width))
        step = self.merge_size * self.patch_size
        padded = tuple(-(-side // step) * step for side in resized)
        return (resized[0], resized[1]), (padded[0], padded[1])

    def preprocess(self, images: Sequence[Image.Image], return_tensors: str) -> dict[str, Any]:
        """`pixel_values` float32 `[P, 3, patch, patch]`, row by row of patches, and `image_grid_thw`."""
        assert return_tensors == "np", "only numpy arrays are made here"
        made = [self._patches(image) for image in images]
        return {
            "pixel_values": np.concatenate([patches for patches, _ in made]),
            "image_grid_thw": np.array([[1, *grid] for _, grid in made]),
        }

    def _patches(self, image: Image.Image) -> tuple[npt.NDArray[np.float32], tuple[int, int]]:
        (height, width), (full_height, full_width) = self.sizes(image.height, image.width)
        resized = image.resize((width, height), Image.Resampling.BICUBIC)
        canvas = np.zeros((full_height, full_width, 3), np.float32)
        canvas[:height, :width] = np.asarray(resized, np.float32) / 255.0
        normal = (canvas - np.array(self.image_mean, np.float32)) / np.array(self.image_std, np.float32)
        size = self.patch_size
        rows, columns = full_height // size, full_width // size
        patches = normal.reshape(rows, size, columns, size, 3).transpose(0, 2, 4, 1, 3)
        return patches.reshape(rows * columns, 3, size, size).astype(np.float32), (rows, columns)


@dataclass(frozen=True, slots=True)
class PixtralImageProcessor:
    """Mistral's, transformers' own with a limit on pixels. Filled by `from_settings`."""

    theirs: Any  # transformers' PixtralImageProcessorPil.
    patch_size: int
    merge_size: int
    longest: int  # Of an image's sides.

    @staticmethod
    def from_settings(settings: Mapping[str, Any], patch_size: int, merge_size: int) -> PixtralImageProcessor:
        """Sizes of patches are the tower's. Raises UserError for settings of another tower."""
        from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

        own = {key: value for key, value in settings.items() if key != "image_processor_type"}
        stored = own.pop("patch_size", patch_size)
        sides = {*stored.values()} if isinstance(stored, Mapping) else {stored}
        if sides != {patch_size}:
            raise UserError(
                f"images are prepared in patches of {stored}, but vision_config says {patch_size}"
            )
        side = patch_size * merge_size
        theirs: Any = PixtralImageProcessorPil(**own, patch_size={"height": side, "width": side})
        size = theirs.size
        return PixtralImageProcessor(
            theirs, patch_size, merge_size, size.longest_edge or max(size.height, size.width)
        )

    @property
    def max_patches(self) -> int:
        """The most patches of one image."""
        side = self.patch_size * self.merge_size
        return int(math.ceil(self.longest / side) * self.merge_size) ** 2

    def _limit(self, height: int, width: int, max_pixels: int) -> int:
        """Returns the most that its longer side may be, so that it has no more pixels than that."""
        side, scale = self.patch_size * self.merge_size, math.sqrt(max_pixels / (height * width))
        longest = min(self.longest, max(side, int(max(height, width) * scale)))
        while longest > side:
            ratio = max(1.0, max(height, width) / longest)
            if math.prod(-(-int(length / ratio) // side) * side for length in (height, width)) <= max_pixels:
                break
            longest -= side
        return longest

    def preprocess(
        self, images: Sequence[Image.Image], return_tensors: str, max_pixels: int | None = None
    ) -> dict[str, Any]:
        """`pixel_values` float32 `[1, 3, height, width]` and `image_grid_thw`.

        Raises ValueError for an image that is too thin.
        """
        (image,) = images
        longest = self.longest if max_pixels is None else self._limit(image.height, image.width, max_pixels)
        if max(image.size) > longest and min(image.size) * longest < max(image.size):
            raise ValueError(f"an image of {image.height} x {image.width} pixels is too thin")
        made = self.theirs.preprocess([image], return_tensors=return_tensors, size={"longest_edge": longest})
        pixels = np.asarray(made["pixel_values"])
        grid = [1, *(length // self.patch_size for length in pixels.shape[-2:])]
        return {"pixel_values": pixels, "image_grid_thw": np.array([grid])}


_FILES = ("preprocessor_config.json", "processor_config.json")


def _qwen(settings: Mapping[str, Any], _: VisionConfig) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(**settings)


def _glm(settings: Mapping[str, Any], _: VisionConfig) -> Any:
    """GLM-4.5V and GLM-4.6V differ in whether an image counts as one frame or two against its size limit."""
    if str(settings.get("image_processor_type", "")).startswith("Glm46V"):
        from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil

        return Glm46VImageProcessorPil(**settings)
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

    return Glm4vImageProcessorPil(**settings)


def _ernie(settings: Mapping[str, Any], _: VisionConfig) -> Any:
    from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import (
        Ernie4_5_VLMoeImageProcessorPil,
    )

    return Ernie4_5_VLMoeImageProcessorPil(**settings)


def _glm5(settings: Mapping[str, Any], _: VisionConfig) -> Any:
    from transformers.models.glm5_next.image_processing_pil_glm5_next import Glm5NextImageProcessorPil

    return Glm5NextImageProcessorPil(**settings)


def _gemma4(settings: Mapping[str, Any], _: VisionConfig) -> Any:
    return PooledImageProcessor.from_settings(settings)


def _kimi(settings: Mapping[str, Any], _: VisionConfig) -> Any:
    return KimiImageProcessor.from_settings(settings)


def _llama4(settings: Mapping[str, Any], vision: VisionConfig) -> Any:
    return TileImageProcessor.from_settings(settings, vision.patch_size, vision.merge_size, vision.tile_size)


def _minimax(settings: Mapping[str, Any], _: VisionConfig) -> Any:
    return FrameImageProcessor.from_settings(settings)


def _pixtral(settings: Mapping[str, Any], vision: VisionConfig) -> Any:
    return PixtralImageProcessor.from_settings(settings, vision.patch_size, vision.merge_size)


def _step(settings: Mapping[str, Any], vision: VisionConfig) -> Any:
    return StepImageProcessor.from_settings(settings, vision.patch_size, vision.merge_size, vision.tile_size)


# Images of little detail have at most this many pixels, an area of 512 x 512.
LOW_DETAIL_PIXELS = 512 * 512
Preprocess = Callable[..., Any]


def _limited(processor: Any, most: int) -> Preprocess:
    """Returns the processor with `most` as the limit on what it counts, where its own is not less."""
    most = min(processor.size["longest_edge"], most)
    least = min(processor.size["shortest_edge"], most)
    return partial(processor.preprocess, size={"shortest_edge": least, "longest_edge": most})


def _low_qwen(processor: Any) -> Preprocess:
    return _limited(processor, LOW_DETAIL_PIXELS)


def _low_glm(processor: Any) -> Preprocess:
    """Its limits count the pixels of all frames, and an image is repeated to as many as a patch has."""
    return _limited(processor, LOW_DETAIL_PIXELS * processor.temporal_patch_size)


def _low_glm5(processor: Any) -> Preprocess:
    most = LOW_DETAIL_PIXELS // (processor.patch_size * processor.merge_size) ** 2
    most = min(most, processor.max_image_tokens)
    least = min(most, processor.min_image_tokens)
    return partial(processor.preprocess, min_image_tokens=least, max_image_tokens=most)


def _low_gemma4(processor: Any) -> Preprocess:
    most = LOW_DETAIL_PIXELS // (processor.patch_size * processor.merge_size) ** 2
    limited: Preprocess = replace(processor, max_tokens=min(most, processor.max_tokens)).preprocess
    return limited


def _low_llama4(processor: Any) -> Preprocess:
    most = min(processor.max_tiles, max(1, LOW_DETAIL_PIXELS // processor.tile_size**2))
    limited: Preprocess = replace(processor, max_tiles=most).preprocess
    return limited


def _low_minimax(processor: Any) -> Preprocess:
    most = min(processor.max_pixels, LOW_DETAIL_PIXELS)
    least = min(processor.min_pixels, most)
    limited: Preprocess = replace(processor, max_pixels=most, min_pixels=least).preprocess
    return limited


def _low_kimi(processor: Any) -> Preprocess:
    most = min(processor.max_patches, LOW_DETAIL_PIXELS // processor.patch_size**2)
    limited: Preprocess = replace(processor, max_patches=most).preprocess
    return limited


def _low_pixtral(processor: Any) -> Preprocess:
    return partial(processor.preprocess, max_pixels=LOW_DETAIL_PIXELS)


def _low_step(processor: Any) -> Preprocess:
    limited: Preprocess = replace(processor, cuts=False).preprocess
    return limited


def _most_by_area(processor: Any) -> int:
    most: int = processor.size["longest_edge"] // processor.patch_size**2
    return most


def _most_by_tokens(processor: Any) -> int:
    most: int = processor.max_image_tokens * processor.merge_size**2
    return most


def _most_patches(processor: Any) -> int:
    most: int = processor.max_patches
    return most


@dataclass(frozen=True, slots=True)
class FamilyProcessor:
    """One row of the table."""

    build: Callable[[Mapping[str, Any], VisionConfig], Any]  # From the checkpoint's settings.
    low_detail: Callable[[Any], Preprocess]  # What prepares images of little detail.
    most_patches: Callable[[Any], int] = _most_patches  # Of one image.


# By `VisionFamily.processor`.
PROCESSORS: Mapping[str, FamilyProcessor] = {
    "ernie": FamilyProcessor(_ernie, _low_qwen, _most_by_area),
    "gemma4": FamilyProcessor(_gemma4, _low_gemma4),
    "glm": FamilyProcessor(_glm, _low_glm, _most_by_area),
    "glm5": FamilyProcessor(_glm5, _low_glm5, _most_by_tokens),
    "kimi": FamilyProcessor(_kimi, _low_kimi),
    "llama4": FamilyProcessor(_llama4, _low_llama4),
    "minimax": FamilyProcessor(_minimax, _low_minimax),
    "pixtral": FamilyProcessor(_pixtral, _low_pixtral),
    "qwen": FamilyProcessor(_qwen, _low_qwen, _most_by_area),
    "step": FamilyProcessor(_step, _low_step),
}


def load_settings(directory: str | Path) -> dict[str, Any]:
    """Returns the image processor's keys. Raises UserError when the checkpoint has no file with them."""
    for name in _FILES:
        path = Path(directory) / name
        if path.is_file():
            settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return dict(settings.get("image_processor", settings))
    raise UserError(
        f"{directory} has a vision tower, but no {_FILES[0]} that says how images are prepared for it; "
        "language_model_only: true serves the language model alone"
    )


def read_layout(config: ModelConfig, directory: str | Path) -> ImageLayout:
    """Returns the tokens of an image in a prompt, by the names that the checkpoint's tokenizer gives them.

    Raises UserError naming the token that it lacks.
    """
    assert config.vision is not None
    names = vision_family(config.model_type).tokens
    vision, image = config.vision, config.vision.image_token_id
    if not names:
        start, end = (
            () if number is None else (number,) for number in (vision.start_token_id, vision.end_token_id)
        )
        return ImageLayout(image, image, start, end, sees_ahead=vision.sees_ahead)
    try:
        tokenizer = read_backend(Path(directory))
    except CheckpointError as error:
        raise UserError(f"how images stand in prompts is not known: {error}") from error
    found: dict[str, int] = {}
    for role, name in names.items():
        number = tokenizer.token_to_id(name)
        if number is None:
            raise UserError(
                f"{directory}: the tokenizer has no token {name!r}, which stands in prompts with images; "
                "language_model_only: true serves the language model alone"
            )
        found[role] = number
    placeholder = found.pop("placeholder", image)
    around = {role: (number,) for role, number in found.items()}
    return ImageLayout(placeholder, image, **around, sees_ahead=vision.sees_ahead)


class ImagePreparer:
    """Prepares images; pure, so that several threads may."""

    def __init__(self, config: ModelConfig, directory: str | Path, max_megapixels: float) -> None:
        """Raises UserError when the checkpoint does not say how its images are prepared."""
        assert config.vision is not None
        self.layout = read_layout(config, directory)
        family = PROCESSORS[vision_family(config.model_type).processor]
        settings = load_settings(directory)
        with transformers_needed():
            self._processor = family.build(settings, config.vision)
        self._low_detail = family.low_detail(self._processor)
        self._max_megapixels = max_megapixels
        self._merge = config.vision.merge_size
        self.max_patches = family.most_patches(self._processor)  # Of one image.
        theirs = (self._processor.patch_size, self._processor.merge_size)
        if theirs != (config.vision.patch_size, config.vision.merge_size):
            raise UserError(
                f"{directory}: images are prepared in patches of {theirs[0]} and merges of {theirs[1]}, but "
                f"vision_config says {config.vision.patch_size} and {config.vision.merge_size}"
            )

    def prepare(self, data: bytes, *, low_detail: bool = False, cache_salt: str = "") -> PreparedImage:
        """Returns an image file, resized, normalised and cut into patches. Raises ImageError.

        `low_detail`: of at most `LOW_DETAIL_PIXELS`, unless the checkpoint's limit is lower anyway.
        `cache_salt`: the encoded image is kept for requests with an equal one only.
        """
        preprocess = self._low_detail if low_detail else self._processor.preprocess
        try:
            image = decode_image(data, self._max_megapixels)
            # Without torch: `pt` tensors would only be turned back.
            made = preprocess([image], return_tensors="np")
        except (ImageFileError, ValueError) as error:
            raise ImageError(str(error)) from error
        time, height, width = (int(count) for count in made["image_grid_thw"][0])
        tokens = height // self._merge, width // self._merge
        return PreparedImage(
            key=content_key(data, low_detail=low_detail, cache_salt=cache_salt),
            pixels=np.ascontiguousarray(made["pixel_values"], dtype=np.float32),
            grid=(time, height, width),
            token_grid=made.get("whole_tokens", tokens),
            tiles=made.get("tiles", (0, 0)),
            tile_tokens=math.prod(tokens),
        )


def content_key(data: bytes, *, low_detail: bool = False, cache_salt: str = "") -> int:
    """Returns a negative number of 63 bits: equal files of equal detail and salt have equal keys; no token id
    is negative.
    """
    digest = hashlib.sha256(data).digest()
    if low_detail:
        # Of the digest rather than of the file with something appended, which could be another file.
        digest = hashlib.sha256(digest + b"low").digest()
    if cache_salt:
        digest = hashlib.sha256(digest + b"salt" + cache_salt.encode()).digest()
    return -1 - (int.from_bytes(digest[:8], "big") >> 1)
