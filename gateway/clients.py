"""Identifies the client of a request, for fair shares (`moebius/fair_shares.py`): by key, else by address."""

from __future__ import annotations

import hashlib
import ipaddress

from starlette.types import Scope

from gateway.keys import KeyUse

_BYTES = 16


def client_of(scope: Scope) -> str:
    """Returns a hash that identifies the client; gateways with the same keys agree on it.

    It is that of the key's name, or without keys of the connection's address (of IPv6 the /64 network that a
    site has). `X-Forwarded-For` counts only if a proxy on this machine sends it: anyone else could write
    anything there. All clients behind another proxy count as one, unless they send keys.
    """
    use: KeyUse | None = scope.get("state", {}).get("key_use")
    if use is not None:
        return _hashed(f"key {use.name}")
    address = (scope.get("client") or ("",))[0]
    return _hashed(f"address {_network(address)}")


def _network(address: str) -> str:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address  # of a socket that has none
    if found.version == 6 and found.ipv4_mapped is None:
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(getattr(found, "ipv4_mapped", None) or found)


def _hashed(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=_BYTES, person=b"moebius client").hexdigest()
