"""Addresses of replicas: a host name stands for all its addresses, also later ones (a headless service)."""

from __future__ import annotations

import asyncio
import ipaddress
import socket


def is_name(address: str) -> bool:
    """Returns whether `address` (host:port or unix:path) names a host whose addresses may change."""
    if address.startswith(("unix:", "unix-abstract:")):
        return False
    host = address.rpartition(":")[0].strip("[]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


async def resolved(address: str) -> list[str] | None:
    """Returns all addresses of a name, sorted; of one family only, as both lead to the same replicas. None:
    the name cannot be resolved now."""
    host, _, port = address.rpartition(":")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, ValueError):
        return None
    for family in (socket.AF_INET, socket.AF_INET6):
        hosts = sorted({str(entry[4][0]) for entry in found if entry[0] == family})
        if hosts:
            return [f"[{one}]:{port}" if family == socket.AF_INET6 else f"{one}:{port}" for one in hosts]
    return None
