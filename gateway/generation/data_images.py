"""Images from request bodies, decoded in the process that reads the body, so that no stream waits for it."""

from __future__ import annotations

import binascii
import pickle
from dataclasses import dataclass
from typing import Any, SupportsIndex

from gateway.schemas.errors import ApiError
from gateway.schemas.requests import ImageUrl
from moebius.config import ImageConfig
from moebius.image_files import open_image

_MIB = 2**20


class ImageRefused(ValueError):
    """One image cannot be used; the message says why and what is allowed."""


@dataclass(frozen=True)
class DecodedImage:
    """An image file; filled by `with_data`. With pickle protocol 5 its bytes may travel separately."""

    data: bytes | pickle.PickleBuffer
    detail: str | None  # ImageUrl.detail

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return DecodedImage, (pickle.PickleBuffer(self.data), self.detail)


def with_data(
    places: list[tuple[str, ImageUrl]], config: ImageConfig
) -> list[tuple[str, ImageUrl | DecodedImage]]:
    """Returns `places` with decoded files instead of data URLs; other URLs stay.

    Raises ApiError 400 that names the part at fault.
    """
    return [(place, _with_data(place, image, config)) for place, image in places]


def _with_data(place: str, image: ImageUrl, config: ImageConfig) -> ImageUrl | DecodedImage:
    if image.url[:5].lower() != "data:":
        return image
    try:
        data = from_data_url(image.url, config)
        check_image(data, config)
    except ValueError as error:
        raise ApiError(400, str(error), param=place, code="invalid_image") from error
    return DecodedImage(data, image.detail)


def check_image(data: bytes, config: ImageConfig) -> None:
    """Raises ValueError for a file that is too large, or is no usable image."""
    if len(data) > config.max_image_mib * _MIB:
        raise ImageRefused(_too_large(config))
    open_image(data, config.max_image_megapixels)


def from_data_url(url: str, config: ImageConfig) -> bytes:
    """Returns the data of an RFC 2397 URL; not by `urlsplit`, which would keep the URL in its cache."""
    kind, comma, payload = url.partition(":")[2].partition(",")
    media, *options = kind.split(";")
    if not (comma and media.lower().startswith("image/") and options[-1:] == ["base64"]):
        raise ImageRefused("a data URL must begin with data:image/TYPE;base64,")
    if len(payload) * 3 // 4 > config.max_image_mib * _MIB + 3:
        raise ImageRefused(_too_large(config))
    try:
        return binascii.a2b_base64(payload, strict_mode=True)
    except ValueError as error:  # binascii.Error, and letters beyond ASCII
        raise ImageRefused(f"the data URL is not valid base64: {error}") from error


def _too_large(config: ImageConfig) -> str:
    return f"the image is larger than {config.max_image_mib:g} MiB (max_image_mib)"
