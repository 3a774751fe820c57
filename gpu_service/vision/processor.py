"""From an image file to what the tower reads: transformers' image processors on Pillow and numpy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gpu_service.model_config import ModelConfig
from gpu_service.vision.config import transformers_needed
from gpu_service.vision.prompt import ImageError, PreparedImage
from moebius.errors import UserError
from moebius.image_files import ImageFileError, decode_image

_FILES = ("preprocessor_config.json", "processor_config.json")


def _qwen(settings: Mapping[str, Any]) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(**settings)


def _glm(settings: Mapping[str, Any]) -> Any:
    """GLM-4.5V and GLM-4.6V differ in whether an image counts as one frame or two against its size limit."""
    if str(settings.get("image_processor_type", "")).startswith("Glm46V"):
        from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil

        return Glm46VImageProcessorPil(**settings)
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

    return Glm4vImageProcessorPil(**settings)


def _kimi(settings: Mapping[str, Any]) -> Any:
    from gpu_service.vision.kimi_processor import KimiImageProcessor

    return KimiImageProcessor.from_settings(settings)


# Images of little detail have at most so many pixels, an area of 512 x 512.
LOW_DETAIL_PIXELS = 512 * 512
Preprocess = Callable[..., Any]


def _limited(processor: Any, most: int) -> Preprocess:
    """With `most` as the limit on what the processor counts, where its own is not less."""
    most = min(processor.size["longest_edge"], most)
    least = min(processor.size["shortest_edge"], most)
    return partial(processor.preprocess, size={"shortest_edge": least, "longest_edge": most})


def _low_qwen(processor: Any) -> Preprocess:
    return _limited(processor, LOW_DETAIL_PIXELS)


def _low_glm(processor: Any) -> Preprocess:
    """Its limits count the pixels of all frames, and an image is repeated to as many as a patch has."""
    return _limited(processor, LOW_DETAIL_PIXELS * processor.temporal_patch_size)


def _low_kimi(processor: Any) -> Preprocess:
    most = min(processor.max_patches, LOW_DETAIL_PIXELS // processor.patch_size**2)
    limited: Preprocess = replace(processor, max_patches=most).preprocess
    return limited


@dataclass(frozen=True, slots=True)
class FamilyProcessor:
    """One row of the table."""

    # From the checkpoint's settings.
    build: Callable[[Mapping[str, Any]], Any]
    # What prepares images of little detail.
    low_detail: Callable[[Any], Preprocess]


_PROCESSORS: Mapping[str, FamilyProcessor] = {
    "glm4v_moe": FamilyProcessor(_glm, _low_glm),
    "kimi_k25": FamilyProcessor(_kimi, _low_kimi),
    "qwen3_5_moe": FamilyProcessor(_qwen, _low_qwen),
    "qwen3_vl_moe": FamilyProcessor(_qwen, _low_qwen),
}


def load_settings(directory: str | Path) -> dict[str, Any]:
    """The image processor's keys. Raises UserError when the checkpoint has no file with them."""
    for name in _FILES:
        path = Path(directory) / name
        if path.is_file():
            settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return dict(settings.get("image_processor", settings))
    raise UserError(
        f"{directory} has a vision tower, but no {_FILES[0]} that says how images are prepared for it; "
        "language_model_only: true serves the language model alone"
    )


class ImagePreparer:
    """Prepares images; pure, so that several threads may."""

    def __init__(self, config: ModelConfig, directory: str | Path, max_megapixels: float) -> None:
        """Raises UserError when the checkpoint does not say how its images are prepared."""
        assert config.vision is not None
        self.image_token_id = config.vision.image_token_id
        family = _PROCESSORS[config.model_type]
        settings = load_settings(directory)
        with transformers_needed():
            self._processor = family.build(settings)
        self._low_detail = family.low_detail(self._processor)
        self._max_megapixels = max_megapixels
        self._merge, patch = config.vision.merge_size, config.vision.patch_size
        # Of one image; the processors of grids limit its pixels instead.
        self.max_patches: int = getattr(self._processor, "max_patches", 0) or (
            self._processor.size["longest_edge"] // patch**2
        )
        theirs = (self._processor.patch_size, self._processor.merge_size)
        if theirs != (config.vision.patch_size, config.vision.merge_size):
            raise UserError(
                f"{directory}: images are prepared in patches of {theirs[0]} and merges of {theirs[1]}, but "
                f"vision_config says {config.vision.patch_size} and {config.vision.merge_size}"
            )

    def prepare(self, data: bytes, *, low_detail: bool = False) -> PreparedImage:
        """An image file, resized, normalised and cut into patches. Raises ImageError.

        `low_detail`: of at most `LOW_DETAIL_PIXELS`, unless the checkpoint's limit is lower anyway.
        """
        preprocess = self._low_detail if low_detail else self._processor.preprocess
        try:
            image = decode_image(data, self._max_megapixels)
            # Without torch: `pt` tensors would only be turned back.
            made = preprocess([image], return_tensors="np")
        except (ImageFileError, ValueError) as error:
            raise ImageError(str(error)) from error
        time, height, width = (int(count) for count in made["image_grid_thw"][0])
        return PreparedImage(
            key=content_key(data, low_detail=low_detail),
            pixels=np.ascontiguousarray(made["pixel_values"], dtype=np.float32),
            grid=(time, height, width),
            token_grid=(height // self._merge, width // self._merge),
        )


def content_key(data: bytes, *, low_detail: bool = False) -> int:
    """A negative number of 63 bits: equal files of equal detail have equal keys; no token id is negative."""
    digest = hashlib.sha256(data).digest()
    if low_detail:
        # Of the digest rather than of the file with something behind it, which could be another file.
        digest = hashlib.sha256(digest + b"low").digest()
    return -1 - (int.from_bytes(digest[:8], "big") >> 1)
