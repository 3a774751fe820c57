"""Image processors that transformers has for torchvision only: the same pixels, with torch and numpy.

torchvision resizes bytes by torch's antialiased interpolation, so every pixel is the same number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.nn.functional import interpolate, pad

from gpu_service.models.vision.step3p7 import STEP_CROPS_AT_A_TIME
from moebius.errors import UserError

# Numbers of `resample`, as Pillow has them.
_RESAMPLE = {2: "bilinear", 3: "bicubic"}
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
Tensor = torch.Tensor


def _bytes_of(image: Image.Image) -> Tensor:
    """Returns uint8 `[1, 3, height, width]`."""
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None].contiguous()


def _resized(pixels: Tensor, height: int, width: int, mode: str) -> Tensor:
    """Returns uint8 `[1, 3, height, width]` of uint8 `[1, 3, H, W]`."""
    if pixels.shape[-2:] == (height, width):
        return pixels
    return interpolate(pixels, (height, width), mode=mode, align_corners=False, antialias=True)


def numbers(values: Sequence[float] | None) -> tuple[float, ...] | None:
    """Returns a list of config files as floats; None stays None."""
    return None if values is None else tuple(float(value) for value in values)


def _given(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if value is not None}


def _mode(settings: Mapping[str, Any]) -> str | None:
    """Raises UserError for a way of resizing that is not one of torch's two."""
    number = settings.get("resample")
    if number is not None and number not in _RESAMPLE:
        raise UserError(f"resample of the image processor is {number}; allowed: {sorted(_RESAMPLE)}")
    return None if number is None else _RESAMPLE[number]


@dataclass(frozen=True, slots=True)
class TileImageProcessor:
    """Llama 4's: tiles of one size, and one more with all of the image. Filled by `from_settings`."""

    patch_size: int
    merge_size: int
    tile_size: int
    max_tiles: int = 16
    resize_to_max_canvas: bool = False
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    rescale_factor: float = 1 / 255
    mode: str = "bilinear"

    @staticmethod
    def from_settings(
        settings: Mapping[str, Any], patch_size: int, merge_size: int, tile_size: int
    ) -> TileImageProcessor:
        """`tile_size`: what the tower reads. Raises UserError where the settings say otherwise."""
        size = settings.get("size") or {}
        sides = size.get("height", tile_size), size.get("width", tile_size)
        if sides != (tile_size, tile_size):
            raise UserError(f"images are cut into tiles of {sides}, but vision_config says {tile_size}")
        found = {
            "max_tiles": settings.get("max_patches"),
            "resize_to_max_canvas": settings.get("resize_to_max_canvas"),
            "image_mean": numbers(settings.get("image_mean")),
            "image_std": numbers(settings.get("image_std")),
            "rescale_factor": settings.get("rescale_factor"),
            "mode": _mode(settings),
        }
        return TileImageProcessor(patch_size, merge_size, tile_size, **_given(found))

    @property
    def max_patches(self) -> int:
        """The most patches of one image, with all of its tiles."""
        return (self.max_tiles + 1) * (self.tile_size // self.patch_size) ** 2

    def tiles(self, height: int, width: int) -> tuple[int, int]:
        """Returns rows and columns of the canvas: the one that grows least, else the one that
        shrinks least.
        """
        canvases = [
            (rows, columns)
            for rows in range(1, self.max_tiles + 1)
            for columns in range(1, self.max_tiles // rows + 1)
        ]
        sides = np.array(canvases) * self.tile_size
        # As the reference compares them, in float32.
        scales = (sides.astype(np.float32) / np.array((height, width), np.float32)).min(1)
        growing = scales[scales >= 1]
        if growing.size:
            chosen = growing.max() if self.resize_to_max_canvas else growing.min()
        else:
            chosen = scales.max()
        fitting = [canvases[index] for index in np.flatnonzero(scales == chosen)]
        return min(fitting, key=lambda canvas: canvas[0] * canvas[1])

    def content_size(self, height: int, width: int) -> tuple[int, int]:
        """Returns height and width of the image on its canvas, whose rest is black."""
        rows, columns = self.tiles(height, width)
        limits = [rows * self.tile_size, columns * self.tile_size]
        if not self.resize_to_max_canvas:
            # Larger than it is an image becomes only as far as it takes to fill a tile.
            most = zip((height, width), limits, strict=True)
            limits = [min(max(side, self.tile_size), limit) for side, limit in most]
        by_height, by_width = limits[0] / height, limits[1] / width
        if by_width < by_height:
            size = min(math.floor(height * by_width), limits[0]), limits[1]
        else:
            size = limits[0], min(math.floor(width * by_height), limits[1])
        return max(size[0], 1), max(size[1], 1)

    def preprocess(self, images: Sequence[Image.Image], return_tensors: str) -> dict[str, Any]:
        """`pixel_values` float32 `[tiles, 3, side, side]` of one image, row by row and the whole one last;
        `image_grid_thw`, tiles and patches of each; and `tiles`, rows and columns, (0, 0) where it is whole.
        """
        assert return_tensors == "np", "only numpy arrays are made here"
        (image,) = images
        pixels, side = _bytes_of(image), self.tile_size
        height, width = pixels.shape[-2:]
        rows, columns = self.tiles(height, width)
        content = _resized(pixels, *self.content_size(height, width), self.mode)
        canvas = content.new_zeros(3, rows * side, columns * side)
        canvas[:, : content.shape[-2], : content.shape[-1]] = content[0]
        tiles = canvas.view(3, rows, side, columns, side).permute(1, 3, 0, 2, 4).reshape(-1, 3, side, side)
        cut = (rows, columns) if rows * columns > 1 else (0, 0)
        if rows * columns > 1:
            tiles = torch.cat((tiles, _resized(pixels, side, side, self.mode)))
        count = side // self.patch_size
        return {
            "pixel_values": self._normal(tiles).float().numpy(),
            "image_grid_thw": np.array([[len(tiles), count, count]]),
            "tiles": cut,
        }

    def _normal(self, tiles: Tensor) -> Tensor:
        """Normalises in bfloat16, as the model was trained."""
        scaled = tiles.to(torch.bfloat16) * self.rescale_factor
        mean, std = (
            torch.tensor(values, dtype=scaled.dtype).view(3, 1, 1)
            for values in (self.image_mean, self.image_std)
        )
        return scaled.sub_(mean).div_(std)


@dataclass(frozen=True, slots=True)
class FrameImageProcessor:
    """MiniMax-M3's: Qwen2-VL's rule of sizes and order of patches. Filled by `from_settings`."""

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    # Least and most pixels of an image.
    min_pixels: int = 4 * 28 * 28
    max_pixels: int = 451584
    image_mean: tuple[float, ...] = _CLIP_MEAN
    image_std: tuple[float, ...] = _CLIP_STD
    rescale_factor: float = 1 / 255
    mode: str = "bicubic"

    @staticmethod
    def from_settings(settings: Mapping[str, Any]) -> FrameImageProcessor:
        """The published `size` is a list, which the reference does not use either."""
        size = settings.get("size")
        limits = size if isinstance(size, Mapping) else {}
        found = {
            "patch_size": settings.get("patch_size"),
            "temporal_patch_size": settings.get("temporal_patch_size"),
            "merge_size": settings.get("merge_size"),
            "min_pixels": settings.get("min_pixels", limits.get("shortest_edge")),
            "max_pixels": settings.get("max_pixels", limits.get("longest_edge")),
            "image_mean": numbers(settings.get("image_mean")),
            "image_std": numbers(settings.get("image_std")),
            "rescale_factor": settings.get("rescale_factor"),
            "mode": _mode(settings),
        }
        return FrameImageProcessor(**_given(found))

    @property
    def max_patches(self) -> int:
        """The most patches of one image."""
        return self.max_pixels // self.patch_size**2

    def preprocess(self, images: Sequence[Image.Image], return_tensors: str) -> dict[str, Any]:
        """`pixel_values` float32 `[P, 3 * frames * patch * patch]`, the patches of a token together, and
        `image_grid_thw`. Raises ValueError for an image that is too thin.
        """
        assert return_tensors == "np", "only numpy arrays are made here"
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        (image,) = images
        height, width = smart_resize(
            image.height,
            image.width,
            factor=self.patch_size * self.merge_size,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
        )
        normal = self._normal(_resized(_bytes_of(image), height, width, self.mode)).numpy()
        rows, columns = height // self.patch_size, width // self.patch_size
        return {
            "pixel_values": self._patches(normal[0], rows, columns),
            "image_grid_thw": np.array([[1, rows, columns]]),
        }

    def _normal(self, pixels: Tensor) -> Tensor:
        """Returns float32; scale and mean are joined as the reference does it."""
        mean, std = (
            (torch.tensor(values) * (1.0 / self.rescale_factor)).view(3, 1, 1)
            for values in (self.image_mean, self.image_std)
        )
        return pixels.float().sub_(mean).div_(std)

    def _patches(self, normal: npt.NDArray[Any], rows: int, columns: int) -> npt.NDArray[Any]:
        merge, patch = self.merge_size, self.patch_size
        grid = normal.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
        by_token = grid.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
        frames = np.repeat(by_token, self.temporal_patch_size, axis=5)
        return np.ascontiguousarray(frames.reshape(rows * columns, -1))


# Elongated images whose shorter side is less than this are squared; others may have this many crops.
_STEP_THIN, _STEP_CROPS = 32, 100


@dataclass(frozen=True, slots=True)
class StepImageProcessor:
    """Step-3.7's: all of an image as one square; crops of large and long ones. Filled by `from_settings`."""

    patch_size: int
    merge_size: int
    tile_size: int  # Pixels along each side of the square with all of the image.
    crop_size: int = 504  # Of each crop.
    longest: int = 3024  # An image's longer side, before it is cut.
    image_mean: tuple[float, ...] = _CLIP_MEAN
    image_std: tuple[float, ...] = _CLIP_STD
    rescale_factor: float = 1 / 255
    mode: str = "bilinear"
    cuts: bool = True  # Whether there are crops.

    @staticmethod
    def from_settings(
        settings: Mapping[str, Any], patch_size: int, merge_size: int, tile_size: int
    ) -> StepImageProcessor:
        """`tile_size`: what the tower was made for. Raises UserError where the settings say otherwise."""
        size = settings.get("size") or {}
        sides = size.get("height", tile_size), size.get("width", tile_size)
        if sides != (tile_size, tile_size):
            raise UserError(f"images become {sides} pixels large, but vision_config says {tile_size}")
        stored = settings.get("vision_patch_size", patch_size), settings.get("downsampler_stride", merge_size)
        if stored != (patch_size, merge_size):
            raise UserError(
                f"images are prepared in patches of {stored[0]} and merges of {stored[1]}, but vision_config "
                f"says {patch_size} and {merge_size}"
            )
        found = {
            "crop_size": settings.get("patch_size"),
            "longest": settings.get("max_image_size"),
            "image_mean": numbers(settings.get("image_mean")),
            "image_std": numbers(settings.get("image_std")),
            "rescale_factor": settings.get("rescale_factor"),
            "mode": _mode(settings),
        }
        made = StepImageProcessor(patch_size, merge_size, tile_size, **_given(found))
        if made.crop_size % (patch_size * merge_size) or tile_size % (patch_size * merge_size):
            raise UserError(
                f"images are cut into {made.crop_size} and {tile_size} pixels; allowed: multiples of "
                f"{patch_size * merge_size}, the side of a token"
            )
        return made

    @property
    def max_patches(self) -> int:
        """That the tower reads at a time."""
        crops = STEP_CROPS_AT_A_TIME * (self.crop_size // self.patch_size) ** 2
        return max(crops, (self.tile_size // self.patch_size) ** 2)

    def _window(self, height: int, width: int) -> int:
        """Returns pixels along each side of a crop before it is resized; 0: there are none."""
        short, long = sorted((height, width))
        if long <= self.tile_size:
            return short if long > 1.5 * short else 0
        return min(short, self.crop_size) if long > 4 * short else self.crop_size

    def plan(self, height: int, width: int) -> tuple[tuple[int, int], int, tuple[int, int]]:
        """Returns height and width of what is cut, and of a crop, and how many rows and columns there are of
        them.

        Raises ValueError for an image that is too thin.
        """
        longest = max(height, width)
        if longest > self.longest:
            scale = self.longest / longest
            height, width = max(1, int(height * scale)), max(1, int(width * scale))
        window = self._window(height, width) if self.cuts else 0
        if not window:
            return (height, width), 0, (0, 0)
        rows, columns = (
            side // window + (side % window > 0.2 * window) if side >= window else 0
            for side in (height, width)
        )
        sizes = rows * window or height, columns * window or width
        rows, columns = max(1, rows), max(1, columns)
        if rows * columns > max(_STEP_CROPS, math.ceil(self.longest / self.crop_size) ** 2):
            raise ValueError(f"an image that is cut into {rows} x {columns} parts is too thin")
        return sizes, window, (rows, columns)

    def preprocess(self, images: Sequence[Image.Image], return_tensors: str) -> dict[str, Any]:
        """`pixel_values` float32 `[P, 3, patch, patch]`, crop by crop and all of the image last, and
        `image_grid_thw`: crops, and rows and columns of patches of one.
        """
        assert return_tensors == "np", "only numpy arrays are made here"
        (image,) = images
        pixels = _bytes_of(image)
        height, width = pixels.shape[-2:]
        longest = max(height, width)
        if min(height, width) < _STEP_THIN and longest > 4 * min(height, width):
            pixels = pad(pixels, (0, longest - width, 0, longest - height))
            height = width = longest
        content, window, (rows, columns) = self.plan(height, width)
        scale = min(1.0, self.longest / longest)
        smaller = _resized(pixels, max(1, int(height * scale)), max(1, int(width * scale)), self.mode)
        whole = self._patches(_resized(smaller, self.tile_size, self.tile_size, self.mode))
        crops = []
        if window:
            cut = _resized(pixels, *content, self.mode)
            for top in range(rows):
                for left in range(columns):
                    crop = cut[..., top * window : (top + 1) * window, left * window : (left + 1) * window]
                    crops.append(self._patches(_resized(crop, self.crop_size, self.crop_size, self.mode)))
        side, whole_side = self.crop_size // self.patch_size, self.tile_size // self.patch_size
        return {
            "pixel_values": torch.cat([*crops, whole]).numpy(),
            "image_grid_thw": np.array([[len(crops), side, side]]),
            "tiles": (rows, columns),
            "whole_tokens": (whole_side // self.merge_size, whole_side // self.merge_size),
        }

    def _patches(self, square: Tensor) -> Tensor:
        """Returns float32 `[P, 3, patch, patch]` of uint8 `[1, 3, side, side]`, row by row."""
        mean, std = (
            (torch.tensor(values) * (1.0 / self.rescale_factor)).view(3, 1, 1)
            for values in (self.image_mean, self.image_std)
        )
        normal = square[0].float().sub_(mean).div_(std)
        patch, count = self.patch_size, square.shape[-1] // self.patch_size
        patches = normal.view(3, count, patch, count, patch).permute(1, 3, 0, 2, 4)
        return patches.reshape(-1, 3, patch, patch)


@dataclass(frozen=True, slots=True)
class PooledImageProcessor:
    """Gemma 4's: as large as a number of tokens allows, in proportion. Filled by `from_settings`."""

    patch_size: int = 16
    merge_size: int = 3  # Patches along each side of a token.
    max_tokens: int = 280
    rescale_factor: float = 1 / 255
    mode: str = "bicubic"

    @staticmethod
    def from_settings(settings: Mapping[str, Any]) -> PooledImageProcessor:
        """Raises UserError for pixels that are normalised, which the tower does for itself."""
        if settings.get("do_normalize"):
            raise UserError("do_normalize of the image processor is true; allowed: false")
        found = {
            "patch_size": settings.get("patch_size"),
            "merge_size": settings.get("pooling_kernel_size"),
            "max_tokens": settings.get("max_soft_tokens"),
            "rescale_factor": settings.get("rescale_factor"),
            "mode": _mode(settings),
        }
        return PooledImageProcessor(**_given(found))

    @property
    def max_patches(self) -> int:
        """The most patches of one image."""
        return self.max_tokens * self.merge_size**2

    def tokens(self, height: int, width: int) -> tuple[int, int]:
        """Returns rows and columns of tokens. Raises ValueError for an image that is too thin."""
        side = self.merge_size * self.patch_size
        scale = math.sqrt(self.max_patches * self.patch_size**2 / (height * width))
        rows, columns = math.floor(scale * height / side), math.floor(scale * width / side)
        if rows == columns == 0:
            raise ValueError(
                f"an image of {height} x {width} pixels has no place in {self.max_tokens} tokens"
            )
        if rows == 0:
            rows, columns = 1, min(width // height, self.max_tokens)
        elif columns == 0:
            rows, columns = min(height // width, self.max_tokens), 1
        return rows, columns

    def preprocess(self, images: Sequence[Image.Image], return_tensors: str) -> dict[str, Any]:
        """`pixel_values` float32 `[P, patch * patch * 3]`, row by row, and `image_grid_thw`."""
        assert return_tensors == "np", "only numpy arrays are made here"
        (image,) = images
        rows, columns = (count * self.merge_size for count in self.tokens(image.height, image.width))
        patch = self.patch_size
        pixels = _resized(_bytes_of(image), rows * patch, columns * patch, self.mode)
        scaled = (pixels[0] * self.rescale_factor).numpy()
        patches = scaled.reshape(3, rows, patch, columns, patch).transpose(1, 3, 2, 4, 0)
        return {
            "pixel_values": np.ascontiguousarray(patches.reshape(rows * columns, -1)),
            "image_grid_thw": np.array([[1, rows, columns]]),
        }
