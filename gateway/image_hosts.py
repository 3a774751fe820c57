"""Fetches images from hosts, without becoming a way into the network that the gateway stands in."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

import httpx

from moebius.config import ImageConfig

ANY_HOST = "*"
_MIB = 2**20
_LONGEST_URL = 8192
# IPv4 addresses as translators write them into IPv6 (RFC 6052).
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class ImageRefused(ValueError):
    """One image can not be used; the message says why and what is allowed."""


async def from_host(url: str, config: ImageConfig) -> bytes:
    """The file at `url`, or as much of it as shows that it is larger than allowed.

    A host named in `image_url_hosts` may be anywhere. One that only `*` allows must have public addresses
    alone, and the connection goes to an address that was checked: asking again could give another one.
    Redirects are not followed: they would lead to hosts that nobody checked.

    Raises:
        ImageRefused: the host is not allowed, or did not give the image.
    """
    if len(url) > _LONGEST_URL:
        raise ImageRefused(f"the URL is longer than {_LONGEST_URL} characters")
    try:
        # The parser that the request is made with decides which host is asked for; no other one.
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
    """Proxies of the environment are no setting of ours."""
    return httpx.AsyncClient(timeout=config.image_url_timeout_s, trust_env=False)


async def public_addresses(target: httpx.URL) -> list[str]:
    """All addresses of the URL's host. Raises ImageRefused when it has none or one that is not public."""
    loop = asyncio.get_running_loop()
    host = target.raw_host.decode("ascii")
    try:
        found = await loop.getaddrinfo(host, target.port or 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ImageRefused(f"the host {target.host!r} is not known") from None
    addresses = [str(address[4][0]) for address in found]
    if not all(map(is_public, addresses)):
        # Which address it has is not told: names inside a network are not for those outside.
        raise ImageRefused(
            f"images are not fetched from {target.host!r}, whose address is not public; allowed: public "
            "hosts, and those that image_url_hosts names"
        )
    return addresses


def is_public(text: str) -> bool:
    """Whether an address is one of the public network, also where it wraps an IPv4 address in an IPv6 one."""
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
    """Asks one address after the other until a connection is made; None: the host itself."""
    for address in addresses[:-1]:
        try:
            return await _fetched(client, target, address, most)
        except httpx.ConnectError:
            continue  # as browsers do: a host's next address may be reachable
    return await _fetched(client, target, addresses[-1], most)


async def _fetched(client: httpx.AsyncClient, target: httpx.URL, address: str | None, most: int) -> bytes:
    """The body, or as much of it as shows that it is too large."""
    url, headers, extensions = target, {}, {}
    if address is not None:
        url = target.copy_with(host=address)
        # Server and certificate are still those of the name.
        headers = {"Host": target.netloc.decode("ascii")}
        extensions = {"sni_hostname": target.raw_host.decode("ascii")}
    data = bytearray()
    async with client.stream("GET", url, headers=headers, extensions=extensions) as response:
        if response.status_code != httpx.codes.OK:
            raise ImageRefused(f"the image could not be fetched: status {response.status_code}")
        async for chunk in response.aiter_bytes():
            data += chunk
            if len(data) > most:
                break
    return bytes(data)
