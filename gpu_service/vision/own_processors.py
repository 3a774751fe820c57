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
from torch.nn.functional import interpolate

from moebius.errors import UserError

# Numbers of `resample`, as Pillow has them.
_RESAMPLE = {2: "bilinear", 3: "bicubic"}
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
Tensor = torch.Tensor


def _bytes_of(image: Image.Image) -> Tensor:
    """uint8 `[1, 3, height, width]`."""
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None].contiguous()


def _resized(pixels: Tensor, height: int, width: int, mode: str) -> Tensor:
    """uint8 `[1, 3, height, width]` of uint8 `[1, 3, H, W]`."""
    if pixels.shape[-2:] == (height, width):
        return pixels
    return interpolate(pixels, (height, width), mode=mode, align_corners=False, antialias=True)


def numbers(values: Sequence[float] | None) -> tuple[float, ...] | None:
    """A list of config files as floats; None stays None."""
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
        """Of one image, with all of its tiles."""
        return (self.max_tiles + 1) * (self.tile_size // self.patch_size) ** 2

    def tiles(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the canvas: the one that grows least, else the one that shrinks least."""
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
        """Height and width of the image on its canvas, whose rest is black."""
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
        """In bfloat16, as the model was trained."""
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
        """Of one image."""
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
        """float32; scale and mean are joined as the reference does it."""
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
        """Of one image."""
        return self.max_tokens * self.merge_size**2

    def tokens(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens. Raises ValueError for an image that is too thin."""
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
