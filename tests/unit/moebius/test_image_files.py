"""Guards image files from clients: whatever they hold, they are an image or refused."""

from __future__ import annotations

import io

import pytest
from PIL import Image, ImageOps

from moebius.image_files import decode_image

ORIENTATION, DESCRIPTION, RESOLUTION = 0x0112, 0x010E, 0x011A


def photo(orientation: int) -> bytes:
    """Returns a JPEG file, 3 pixels wide and 2 high, with metadata."""
    image = Image.linear_gradient("L").resize((3, 2)).convert("RGB")
    image.putpixel((0, 0), (250, 20, 90))
    exif = image.getexif()
    exif[ORIENTATION], exif[DESCRIPTION], exif[RESOLUTION] = orientation, "words", (72, 1)
    file = io.BytesIO()
    image.save(file, "JPEG", exif=exif)
    return file.getvalue()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_upright(orientation: int) -> None:
    """Each of the eight orientations that cameras note, as Pillow turns them."""
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(photo(orientation))))
    found = decode_image(photo(orientation), 1.0)
    assert (found.size, found.tobytes()) == (expected.size, expected.tobytes())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("entry", "damaged"),
    [
        (b"\x01\x0e\x00\x02", b"\x01\x00\x00\x02"),  # a text where a number belongs
        (b"\x01\x1a\x00\x05", b"\x01\x1a\x00\x07"),  # bytes where a fraction belongs
        (b"MM\x00*", b"MM\x00\x00"),
    ],
)
def test_damaged_metadata_costs_no_image(entry: bytes, damaged: bytes) -> None:
    """Pillow raises various errors for entries of wrong types; the pixels are whole all the same."""
    file = photo(6)
    assert file.count(entry) == 1
    assert decode_image(file.replace(entry, damaged), 1.0).size in ((2, 3), (3, 2))
