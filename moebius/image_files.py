"""Image files from outside: opened with care, by Pillow, in the few formats that are allowed."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import ExifTags, Image, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP")
_MEGAPIXEL = 1_000_000
# By EXIF's orientation, what makes an image upright.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class ImageFileError(ValueError):
    """The bytes are no image that may be used; the message says what is wrong and what is allowed."""


def open_image(data: bytes, max_megapixels: float) -> Image.Image:
    """Returns the image of a file; only its header is read so far. Raises ImageFileError."""
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
    """Returns the image with its pixels, as RGB, upright; the first frame of several.

    Raises ImageFileError.
    """
    image = open_image(data, max_megapixels)
    try:
        image.load()
        turn = _UPRIGHT.get(_orientation(image))
        return (image if turn is None else image.transpose(turn)).convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise ImageFileError(f"the image is damaged: {error}") from error


def _orientation(image: Image.Image) -> int:
    """EXIF's; 1, which is upright, where it has none or damaged metadata.

    Not by `ImageOps.exif_transpose`, which also rewrites the metadata, and raises whatever it meets in it.
    """
    try:
        found = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # as many kinds of errors as of damage
        return 1
    return found if isinstance(found, int) else 1


def read_below(directory: str, path: str, max_bytes: int) -> bytes:
    """Returns a file below `directory`, links resolved, or its first `max_bytes` + 1 bytes.

    Raises ImageFileError.
    """
    root = Path(directory).resolve()
    file = (root / path).resolve()
    if not (file.is_relative_to(root) and file.is_file()):
        raise ImageFileError("there is no such file below image_dir")
    with file.open("rb") as opened:
        return opened.read(max_bytes + 1)
