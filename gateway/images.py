"""Images of chat messages: from data URLs, from hosts and from the directory that the settings allow."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Awaitable, Callable, Mapping, Sequence
from urllib.parse import unquote_to_bytes, urlsplit

from gateway.errors import ApiError
from gateway.image_hosts import ImageRefused, from_host
from gateway.schemas.chat import ImageUrl
from moebius.config import ImageConfig
from moebius.image_files import open_image, read_below
from protos import engine_pb2

_MIB = 2**20
# What one call to the engine can carry beside its prompt (its server takes 256 MiB).
_MOST_BYTES = 240 * _MIB


# Of OpenAI's names, what is not the checkpoint's own size.
_DETAILS: Mapping[str | None, engine_pb2.ImageDetail] = {"low": engine_pb2.IMAGE_DETAIL_LOW}


async def collect_images(
    places: Sequence[tuple[str, ImageUrl]], config: ImageConfig
) -> list[engine_pb2.ImageInput]:
    """All images as the engine takes them, in order; `places`: the name of its parameter and each image.

    Raises:
        ApiError: 400 that names the part at fault.
    """
    files = await asyncio.gather(*(_collected(place, image.url, config) for place, image in places))
    if sum(map(len, files)) > _MOST_BYTES:
        raise _refused(
            "messages", f"the images together are larger than {_MOST_BYTES // _MIB} MiB", "image_too_large"
        )
    details = [_DETAILS.get(image.detail, engine_pb2.IMAGE_DETAIL_HIGH) for _, image in places]
    return [
        engine_pb2.ImageInput(data=data, detail=detail) for data, detail in zip(files, details, strict=True)
    ]


def _refused(param: str, message: str, code: str) -> ApiError:
    return ApiError(400, message, param=param, code=code)


async def _collected(place: str, url: str, config: ImageConfig) -> bytes:
    try:
        scheme = url.partition(":")[0].lower()
        source = _SOURCES.get(scheme)
        if source is None:
            raise ImageRefused(f"URLs of images begin with {', '.join(_SOURCES)}, not with {scheme[:20]!r}")
        data = await source(url, config)
        if len(data) > config.max_image_mib * _MIB:
            raise ImageRefused(_too_large(config))
        open_image(data, config.max_image_megapixels)
    except ValueError as error:
        raise _refused(place, str(error), "invalid_image") from error
    return data


def _too_large(config: ImageConfig) -> str:
    return f"the image is larger than {config.max_image_mib:g} MiB (max_image_mib)"


async def _from_data(url: str, config: ImageConfig) -> bytes:
    """RFC 2397: `data:image/png;base64,...`. Not split by `urlsplit`, which would keep it in its cache."""
    kind, comma, payload = url.partition(":")[2].partition(",")
    media, *options = kind.split(";")
    if not (comma and media.lower().startswith("image/") and options[-1:] == ["base64"]):
        raise ImageRefused("a data URL must begin with data:image/TYPE;base64,")
    if len(payload) * 3 // 4 > config.max_image_mib * _MIB + 3:
        raise ImageRefused(_too_large(config))
    try:
        return await asyncio.to_thread(base64.b64decode, payload, validate=True)
    except binascii.Error as error:
        raise ImageRefused(f"the data URL is not valid base64: {error}") from error


async def _from_file(url: str, config: ImageConfig) -> bytes:
    parts = urlsplit(url)
    if not config.image_dir or parts.netloc not in ("", "localhost"):
        raise ImageRefused("local files are not allowed here (image_dir); send a data URL")
    path = unquote_to_bytes(parts.path).decode("utf-8", "replace")
    return await asyncio.to_thread(read_below, config.image_dir, path, int(config.max_image_mib * _MIB))


_SOURCES: Mapping[str, Callable[[str, ImageConfig], Awaitable[bytes]]] = {
    "data": _from_data,
    "file": _from_file,
    "http": from_host,
    "https": from_host,
}
