"""Image files from outside: opened with care, by Pillow, in the few formats that are allowed."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP")
_MEGAPIXEL = 1_000_000


class ImageFileError(ValueError):
    """The bytes are no image that may be used; the message says what is wrong and what is allowed."""


def open_image(data: bytes, max_megapixels: float) -> Image.Image:
    """The image of a file; only its header is read so far. Raises ImageFileError."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise ImageFileError(f"not a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file") from None
    except (Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        raise ImageFileError(f"not a readable image: {error}") from error
    width, height = image.size
    if width * height > max_megapixels * _MEGAPIXEL:
        raise ImageFileError(
            f"{width} x {height} pixels are more than {max_megapixels:g} megapixels (max_image_megapixels)"
        )
    return image


def decode_image(data: bytes, max_megapixels: float) -> Image.Image:
    """The image with its pixels, as RGB, upright; the first frame of several. Raises ImageFileError."""
    image = open_image(data, max_megapixels)
    try:
        image.load()
        return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise ImageFileError(f"the image is damaged: {error}") from error


def read_below(directory: str, path: str, max_bytes: int) -> bytes:
    """A file below `directory`, links resolved, or its first `max_bytes` + 1 bytes. Raises ImageFileError."""
    root = Path(directory).resolve()
    file = (root / path).resolve()
    if not (file.is_relative_to(root) and file.is_file()):
        raise ImageFileError("there is no such file below image_dir")
    with file.open("rb") as opened:
        return opened.read(max_bytes + 1)
