"""Kimi-K2.5's image processor: never larger, padded at the right and below to whole tokens.

transformers' own needs torchvision; this one computes sizes by its rule (`navit_resize`) and resizes with
Pillow, as the code published with the checkpoint does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image


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
        """From transformers' keys, or those of the published checkpoint (`media_proc_cfg`)."""
        keys = dict(settings.get("media_proc_cfg") or settings)
        side = (keys.get("size") or {}).get("max_height")
        found: dict[str, Any] = {
            "patch_size": keys.get("patch_size"),
            "merge_size": keys.get("merge_size", keys.get("merge_kernel_size")),
            "max_patches": keys.get("max_patches", keys.get("in_patch_limit")),
            "max_side_patches": keys.get("patch_limit_on_one_side", side),
            "image_mean": _numbers(keys.get("image_mean")),
            "image_std": _numbers(keys.get("image_std")),
        }
        return KimiImageProcessor(**{name: value for name, value in found.items() if value is not None})

    def sizes(self, height: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Height and width after resizing, and after padding."""
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


def _numbers(values: Sequence[float] | None) -> tuple[float, ...] | None:
    return None if values is None else tuple(float(value) for value in values)
