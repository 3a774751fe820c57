"""From an image file to what the tower reads: transformers' image processors on Pillow and numpy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gpu_service.model_config import ModelConfig
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


_PROCESSORS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "glm4v_moe": _glm,
    "kimi_k25": _kimi,
    "qwen3_5_moe": _qwen,
    "qwen3_vl_moe": _qwen,
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
        self._processor = _PROCESSORS[config.model_type](load_settings(directory))
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

    def prepare(self, data: bytes) -> PreparedImage:
        """An image file, resized, normalised and cut into patches. Raises ImageError."""
        try:
            image = decode_image(data, self._max_megapixels)
            # Without torch: `pt` tensors would only be turned back.
            made = self._processor.preprocess([image], return_tensors="np")
        except (ImageFileError, ValueError) as error:
            raise ImageError(str(error)) from error
        time, height, width = (int(count) for count in made["image_grid_thw"][0])
        return PreparedImage(
            key=content_key(data),
            pixels=np.ascontiguousarray(made["pixel_values"], dtype=np.float32),
            grid=(time, height, width),
            token_grid=(height // self._merge, width // self._merge),
        )


def content_key(data: bytes) -> int:
    """A negative number of 63 bits: equal files have equal keys, and no token id is negative."""
    return -1 - (int.from_bytes(hashlib.sha256(data).digest()[:8], "big") >> 1)
