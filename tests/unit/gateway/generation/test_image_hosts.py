"""Guards that images from hosts are no way into the gateway's own network."""

from __future__ import annotations

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from gateway.generation import images as images_module
from gateway.generation.images import ImageRefused, from_host, is_public  # type: ignore[attr-defined]
from moebius.config import ImageConfig

INSIDE = (
    "127.0.0.1", "127.8.8.8", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "0.0.0.0", "224.0.1.1", "240.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fd00::1",
    "fec0::1", "ff0e::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "2002:7f00:1::1",
    "64:ff9b::7f00:1", "64:ff9b:1::7f00:1", "2001:0:7f00:1::1",
)  # fmt: skip
OUTSIDE = ("93.184.216.34", "1.1.1.1", "2606:4700:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101")


def test_addresses_inside_are_not_public() -> None:
    """Loopback, private, link-local, shared, reserved and multicast, plain or inside an IPv6 address."""
    assert [address for address in INSIDE if is_public(address)] == []
    assert [address for address in OUTSIDE if not is_public(address)] == []


class Web:
    """Answers requests by script, and names by a list; replaces the network of images."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []
        self.handle: Callable[[httpx.Request], httpx.Response] = lambda request: httpx.Response(200)
        transport = httpx.MockTransport(self._respond)
        monkeypatch.setattr(
            images_module, "make_client", lambda _config: httpx.AsyncClient(transport=transport)
        )
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", self._resolve, raising=False)

    async def _resolve(self, host: str, port: int, **_: Any) -> list[Any]:
        if not self.answers:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(0, 0, 0, "", (address, port)) for address in self.answers.pop(0)]

    def _respond(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return self.handle(request)


EVERYWHERE = ImageConfig(image_url_hosts=("*", "inside.example"))


async def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that means another address when asked again (DNS rebinding) is not asked again; Host header and
    the certificate's name stay the URL's."""
    web = Web(monkeypatch, ["93.184.216.34"], ["127.0.0.1"])
    web.handle = lambda request: httpx.Response(200, content=b"image")
    assert await from_host("https://pictures.example:8443/a.png?b=c", EVERYWHERE) == b"image"
    (request,) = web.requests
    assert str(request.url) == "https://93.184.216.34:8443/a.png?b=c"
    assert request.headers["host"] == "pictures.example:8443"
    assert request.extensions["sni_hostname"] == "pictures.example"


async def test_one_address_inside_is_enough_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """All addresses of a name must be public; the answer does not tell which one was not."""
    web = Web(monkeypatch, ["93.184.216.34", "10.0.0.7"])
    with pytest.raises(ImageRefused, match="not public") as caught:
        await from_host("http://mixed.example/a.png", EVERYWHERE)
    assert "10.0.0.7" not in str(caught.value)
    assert web.requests == []


async def test_redirects_are_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A public host cannot send the gateway inside."""
    web = Web(monkeypatch, ["93.184.216.34"])
    web.handle = lambda request: httpx.Response(302, headers={"Location": "http://127.0.0.1/secret"})
    with pytest.raises(ImageRefused, match="status 302"):
        await from_host("http://pictures.example/a.png", EVERYWHERE)
    assert len(web.requests) == 1


@pytest.mark.parametrize("encoding", ["gzip", "GZIP, identity", "deflate", "zstd", "x" * 100_000])
async def test_what_a_host_has_compressed_is_not_taken_apart(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """A few kilobytes could become gigabytes, on the loop that serves everybody: they are not asked for, and
    refused unread. A host that names no compression, or names that there is none, is served."""
    web = Web(monkeypatch, *[["93.184.216.34"]] * 3)
    bomb = gzip.compress(b" " * 2_000_000)
    web.handle = lambda _: httpx.Response(200, headers={"Content-Encoding": encoding}, stream=Unread(bomb))
    with pytest.raises(ImageRefused, match="Content-Encoding") as caught:
        await from_host("http://pictures.example/a.png", EVERYWHERE)
    assert len(str(caught.value)) < 200
    for none in ({"Content-Encoding": "identity"}, {}):
        web.handle = lambda _, none=none: httpx.Response(200, headers=none, content=b"image")
        assert await from_host("http://pictures.example/a.png", EVERYWHERE) == b"image"
    assert [request.headers["accept-encoding"] for request in web.requests] == ["identity"] * 3


class Unread(httpx.AsyncByteStream):
    """A body that must not be read."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def __aiter__(self) -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield self.data


async def test_a_body_without_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The download ends once the body is larger than an image may be, whatever its Content-Length said."""
    web = Web(monkeypatch, ["93.184.216.34"])
    taken: list[int] = []

    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            while True:
                taken.append(1)
                yield b" " * 2**16

    web.handle = lambda _: httpx.Response(200, headers={"Content-Length": "10"}, stream=Endless())
    config = ImageConfig(image_url_hosts=("*",), max_image_mib=1)
    found = await from_host("http://pictures.example/a.png", config)
    assert len(found) > 2**20
    assert len(taken) == 17


async def test_the_next_address_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose first address cannot be reached still gives its image."""
    web = Web(monkeypatch, ["2606:4700:4700::1111", "93.184.216.34"])

    def only_v4(request: httpx.Request) -> httpx.Response:
        if ":" in request.url.host:
            raise httpx.ConnectError("unreachable", request=request)
        return httpx.Response(200, content=b"image")

    web.handle = only_v4
    assert await from_host("http://pictures.example/a.png", EVERYWHERE) == b"image"
    assert [request.url.host for request in web.requests] == ["2606:4700:4700::1111", "93.184.216.34"]


async def test_a_named_host_may_be_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is named in image_url_hosts is trusted, inside as well: nothing is resolved beforehand."""
    web = Web(monkeypatch)
    web.handle = lambda request: httpx.Response(200, content=b"image")
    assert await from_host("http://inside.example/a.png", EVERYWHERE) == b"image"
    assert web.requests[0].url.host == "inside.example"


async def test_unknown_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name without an address is the client's mistake."""
    Web(monkeypatch)
    with pytest.raises(ImageRefused, match="not known"):
        await from_host("http://nobody.example/a.png", EVERYWHERE)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "0", "[::1]", "[::ffff:127.0.0.1]", "localhost."],
)
async def test_this_machine_is_not_reached_however_it_is_spelt(host: str) -> None:
    """The real resolver's answers count, not the spelling."""
    config = ImageConfig(image_url_hosts=("*",), image_url_timeout_s=60)
    with pytest.raises(ImageRefused, match=r"not public|not valid|not known"):
        await from_host(f"http://{host}:1/a.png", config)
