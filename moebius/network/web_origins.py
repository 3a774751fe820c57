"""Which web pages may use a server, by headers that browsers send and pages can not change.

A page of any site can have its browser send a POST to whatever address the browser reaches, this machine's
own included, and no question is asked before it (a "simple request" of the Fetch standard). The browser
names the page's site in `Origin`: a request that names another site than the server's own is refused, unless
the settings allow that site. And a site can have its own name resolve to 127.0.0.1 (DNS rebinding): its page
then is of the same origin as the server, and only the name in `Host` shows it. So a server that listens on
this machine alone answers to names of this machine, and to those that the settings allow.

What is no browser sends none of `Origin` and `Sec-Fetch-Site`, and nothing here concerns it.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

ANY = "*"
# How this machine is named where no name is to be resolved.
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
_PORTS = {"http": 80, "https": 443}
_SHOWN = 80
# A scheme and what follows it, without a path; * stands for any part.
_ORIGIN = re.compile(r"[a-zA-Z*][a-zA-Z0-9+.*-]*://[^/?#@\s]+|null|\*")
_HOST = re.compile(r"\*|(\*\.)?[^\s*:/?#@,]+|\[?[0-9a-fA-F:.]*:[0-9a-fA-F:.]*\]?")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def checked_origins(values: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the origins of a setting as browsers write them; ValueError for what no browser could send."""
    for value in values:
        if not _ORIGIN.fullmatch(value):
            raise ValueError(
                f"allowed are origins as https://page.example or http://localhost:3000, without a path, in "
                f"which * stands for any part: {value!r} is none"
            )
    return tuple(value.lower() for value in values)


def checked_hosts(values: tuple[str, ...]) -> tuple[str, ...]:
    """Host names of a setting, in lower case; ValueError for what is none."""
    for value in values:
        if not _HOST.fullmatch(value):
            raise ValueError(
                "allowed are host names without scheme and port, as models.example, *.example or *: "
                f"{value!r} is none"
            )
    return tuple(value.lower().strip("[]").rstrip(".") for value in values)


def checked_urls(values: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the URLs of a setting as they are; ValueError for what is no http or https URL with a host."""
    for value in values:
        try:
            parts = urlsplit(value)
            is_right = parts.scheme in _PORTS and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_right = False
        if not is_right or value != value.strip():
            raise ValueError(f"allowed are URLs as https://tools.example/mcp: {value!r} is none")
    return values


def origin_pattern(origins: Iterable[str]) -> str:
    """Returns a regular expression that matches the whole of an allowed origin; * in one of `origins` is any
    part.
    """
    return "|".join(".*" if one == ANY else re.escape(one).replace(r"\*", "[^/]*") for one in origins)


@dataclass(frozen=True)
class Sender:
    """What a request's headers say of where it comes from; filled by the caller that has the request."""

    method: str
    host: str  # empty: HTTP/1.0 needs none, and browsers always send it
    origin: str = ""  # empty: no browser, or nothing that a page may not do with any address
    fetch_site: str = ""  # `Sec-Fetch-Site`; empty: no browser, or an older one, or plain HTTP in a network
    # `X-Forwarded-Host`, by proxies that rewrite `Host`. A page can not add it without asking first.
    forwarded_hosts: tuple[str, ...] = ()

    @property
    def asks_first(self) -> bool:
        """Returns whether a browser asks before it sends what a page wants to (a preflight)."""
        return self.method == "OPTIONS" and bool(self.origin)


class WebOrigins:
    """The rules of one server."""

    def __init__(self, listens_on: str, hosts: tuple[str, ...] = (), origins: tuple[str, ...] = ()) -> None:
        """`listens_on`: address or name that the server binds to; `hosts` and `origins`: the settings
        `allowed_hosts` and `cors_origins`."""
        self._own = listens_on.lower()
        self._is_local = is_local_address(listens_on)
        self._hosts = hosts
        self._origins = re.compile(origin_pattern(origins)) if origins else None
        # Few are seen, and each request brings one.
        self._host_is_allowed = functools.lru_cache(256)(self._judge_host)

    def refused_host(self, sender: Sender) -> str:
        """Returns why the server does not answer to the name that the request has for it; empty: it does."""
        if not sender.host or self._host_is_allowed(sender.host):
            return ""
        name = sender.host[:_SHOWN]
        if self._is_local:
            return (
                f"this server answers on its own machine only, of which {name!r} is no name: use "
                "localhost or 127.0.0.1, or allow the name (--allowed-hosts)"
            )
        return f"{name!r} is none of the names that this server answers to (--allowed-hosts)"

    def _judge_host(self, host: str) -> bool:
        if ANY in self._hosts or not (self._is_local or self._hosts):
            return True
        place = split_host(host)
        if place is None:
            return False
        name, _ = place
        # An address is what it is: only names can be made to mean another machine than their own.
        address = _address(name)
        if address is not None and (_is_local(address) or not self._is_local):
            return True
        if name == self._own or name == "localhost" or name.endswith(".localhost"):
            return True
        return any(name == one or (one.startswith("*.") and name.endswith(one[1:])) for one in self._hosts)

    def refused_origin(self, sender: Sender) -> str:
        """Returns why a page that sends the request may not; empty: it may, or no page sends it."""
        origin, site = sender.origin, sender.fetch_site
        if site == "same-origin":  # as the browser sees it, whatever a proxy makes of names
            return ""
        if not origin:
            # Some browsers leave out a form's origin, but say that it is another one.
            reads = sender.method in ("GET", "HEAD", "OPTIONS")
            return "" if reads or site in ("", "none") else self._foreign("another site")
        if self._origins is not None and self._origins.fullmatch(origin.lower()):
            return ""
        if any(is_same_place(origin, host) for host in (sender.host, *sender.forwarded_hosts)):
            return ""
        return self._foreign(repr(origin[:_SHOWN]))

    def _foreign(self, whose: str) -> str:
        return f"web pages of {whose} may not use this server: --cors-origins names those that may"


def split_host(host: str) -> tuple[str, int | None] | None:
    """Returns name and port of a `Host` header, in lower case and without brackets; None: it is none."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:/?#@\[\]]+))(?::(\d{0,5}))?", host)
    if found is None:
        return None
    name = (found[1] or found[2]).lower()
    return name.removesuffix(".") or name, int(found[3]) if found[3] else None


def is_same_place(origin: str, host: str) -> bool:
    """Returns whether a page of `origin` came from the server that a request calls `host`.

    Schemes are not compared: behind a proxy that ends TLS the server's own is another.
    """
    try:
        parts = urlsplit(origin)
        port = parts.port
    except ValueError:
        return False
    place = split_host(host)
    if place is None or not parts.hostname:
        return False
    default = _PORTS.get(parts.scheme)
    return (parts.hostname.removesuffix("."), port or default) == (place[0], place[1] or default)


def is_local_address(listens_on: str) -> bool:
    """Returns whether only this machine reaches a server that binds to this address or name."""
    address = _address(listens_on)
    if address is not None:
        return address.is_loopback
    if listens_on.lower() == "localhost":
        return True
    try:
        found = socket.getaddrinfo(listens_on, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(
        ipaddress.ip_address(str(one[4][0]).split("%")[0]).is_loopback for one in found
    )


def _is_local(address: Address) -> bool:
    """0.0.0.0 is what users copy from the line that says where a server listens; it means this machine."""
    mapped = getattr(address, "ipv4_mapped", None) or address
    return bool(mapped.is_loopback or mapped.is_unspecified)


def _address(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return None
