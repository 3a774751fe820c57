"""Reads images of chat messages from data URLs, and from hosts and files that the configuration allows."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from urllib.parse import unquote_to_bytes, urlsplit

import httpx

from gateway.generation.data_images import DecodedImage, ImageRefused, check_image
from gateway.generation.job import PromptJob
from gateway.schemas.errors import ApiError
from gateway.schemas.requests import ImageUrl
from moebius.config import ImageConfig
from moebius.image_files import read_below
from protos import engine_pb2

ANY_HOST = "*"
_MIB = 2**20
_LONGEST_URL = 8192
# IPv4 addresses as translators write them into IPv6 (RFC 6052).
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


async def from_host(url: str, config: ImageConfig) -> bytes:
    """Returns the file at `url`, or as much of it as shows that it is larger than allowed.

    A host named in `image_url_hosts` may have any address. One that only `*` allows must have only public
    addresses, and the connection uses a checked one: resolving again could return another.
    Redirects are not followed: they would lead to unchecked hosts.

    Raises:
        ImageRefused: the host is not allowed, or did not give the image.
    """
    if len(url) > _LONGEST_URL:
        raise ImageRefused(f"the URL is longer than {_LONGEST_URL} characters")
    try:
        # The parser that makes the request also determines the host to check.
        target = httpx.URL(url)
    except (httpx.InvalidURL, ValueError) as error:
        raise ImageRefused(f"the URL of the image is not valid: {error}") from error
    host, allowed = target.host, config.image_url_hosts
    if ANY_HOST not in allowed and host not in allowed:
        raise ImageRefused(
            f"images are not fetched from {host!r}; allowed hosts (image_url_hosts): "
            + (", ".join(allowed) or "none, send a data URL")
        )
    try:
        async with asyncio.timeout(config.image_url_timeout_s), make_client(config) as client:
            addresses = [None] if host in allowed else await public_addresses(target)
            return await _first_answer(client, target, addresses, int(config.max_image_mib * _MIB))
    except TimeoutError:
        raise ImageRefused(f"{host} did not answer within {config.image_url_timeout_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ImageRefused(f"the image could not be fetched: {type(error).__name__} {error}") from error


def make_client(config: ImageConfig) -> httpx.AsyncClient:
    """Returns a client that ignores the environment's proxies."""
    return httpx.AsyncClient(timeout=config.image_url_timeout_s, trust_env=False)


async def public_addresses(target: httpx.URL) -> list[str]:
    """Returns all addresses of the URL's host. Raises ImageRefused if there are none or one is not public."""
    loop = asyncio.get_running_loop()
    host = target.raw_host.decode("ascii")
    try:
        found = await loop.getaddrinfo(host, target.port or 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ImageRefused(f"the host {target.host!r} is not known") from None
    addresses = [str(address[4][0]) for address in found]
    if not all(map(is_public, addresses)):
        # The message does not contain the address: names inside a network are not for those outside.
        raise ImageRefused(
            f"images are not fetched from {target.host!r}, whose address is not public; allowed: public "
            "hosts, and those that image_url_hosts names"
        )
    return addresses


def is_public(text: str) -> bool:
    """Returns whether an address is public, also if it wraps an IPv4 address in an IPv6 one."""
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if address.is_site_local or address.teredo is not None:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


async def _first_answer(
    client: httpx.AsyncClient, target: httpx.URL, addresses: list[str] | list[None], most: int
) -> bytes:
    """Tries one address after the other until a connection is made; None is the host itself."""
    for address in addresses[:-1]:
        try:
            return await _fetched(client, target, address, most)
        except httpx.ConnectError:
            continue  # as browsers do: a host's next address may be reachable
    return await _fetched(client, target, addresses[-1], most)


async def _fetched(client: httpx.AsyncClient, target: httpx.URL, address: str | None, most: int) -> bytes:
    """Returns the body, or as much of it as shows that it is too large.

    Images are compressed already. A host that compresses them again could make a small piece so large that
    unpacking it would delay all others, before anything is known of its size.
    """
    url, extensions = target, {}
    headers = {"Accept-Encoding": "identity"}
    if address is not None:
        url = target.copy_with(host=address)
        # The server name and certificate remain those of the host name.
        headers["Host"] = target.netloc.decode("ascii")
        extensions = {"sni_hostname": target.raw_host.decode("ascii")}
    data = bytearray()
    async with client.stream("GET", url, headers=headers, extensions=extensions) as response:
        if response.status_code != httpx.codes.OK:
            raise ImageRefused(f"the image could not be fetched: status {response.status_code}")
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding.strip().lower() not in ("", "identity"):
            raise ImageRefused(
                f"{target.host} sent the image with Content-Encoding {encoding[:40]!r}; allowed: none"
            )
        async for chunk in response.aiter_bytes():
            data += chunk
            if len(data) > most:
                break
    return bytes(data)


# Bytes that one call to the engine can carry besides its prompt (its server takes 256 MiB).
_MAX_BYTES = 240 * _MIB


# OpenAI's names for sizes other than the checkpoint's own.
_DETAILS: Mapping[str | None, engine_pb2.ImageDetail] = {"low": engine_pb2.IMAGE_DETAIL_LOW}


async def add_images(
    job: PromptJob,
    places: Sequence[tuple[str, ImageUrl | DecodedImage]],
    config: ImageConfig,
) -> None:
    """Adds all images to the job, in order; `places`: the parameter name and the image of each.

    Raises:
        ApiError: 400 that names the part at fault.
    """
    files = await asyncio.gather(*(_collected(place, image, config) for place, image in places))
    if sum(map(len, files)) > _MAX_BYTES:
        raise _refused(
            "messages", f"the images together are larger than {_MAX_BYTES // _MIB} MiB", "image_too_large"
        )
    for _, image in places:
        job.request.images.add(detail=_DETAILS.get(image.detail, engine_pb2.IMAGE_DETAIL_HIGH))
    job.images = files


def _refused(param: str, message: str, code: str) -> ApiError:
    return ApiError(400, message, param=param, code=code)


async def _collected(place: str, image: ImageUrl | DecodedImage, config: ImageConfig) -> bytes:
    if isinstance(image, DecodedImage):
        return image.data if isinstance(image.data, bytes) else bytes(image.data)
    try:
        scheme = image.url.partition(":")[0].lower()
        source = _SOURCES.get(scheme)
        if source is None:
            allowed = ", ".join(["data", *_SOURCES])
            raise ImageRefused(f"URLs of images begin with {allowed}, not with {scheme[:20]!r}")
        data = await source(image.url, config)
        check_image(data, config)
    except ValueError as error:
        raise _refused(place, str(error), "invalid_image") from error
    return data


async def _from_file(url: str, config: ImageConfig) -> bytes:
    parts = urlsplit(url)
    if not config.image_dir or parts.netloc not in ("", "localhost"):
        raise ImageRefused("local files are not allowed here (image_dir); send a data URL")
    path = unquote_to_bytes(parts.path).decode("utf-8", "replace")
    return await asyncio.to_thread(read_below, config.image_dir, path, int(config.max_image_mib * _MIB))


_SOURCES: Mapping[str, Callable[[str, ImageConfig], Awaitable[bytes]]] = {
    "file": _from_file,
    "http": from_host,
    "https": from_host,
}
