"""The certificates of authorities that httpx trusts: read once, rather than by each of its calls."""

from __future__ import annotations

import functools
import os
import ssl
from typing import Any

import certifi
import httpx


@functools.cache
def _context_of(file: str, _modified_ns: int) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=file)


def _shared_context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    """Returns what `httpx.create_ssl_context` gives; the same object where only the default file is asked
    for.
    """
    named = os.environ if trust_env else {}
    file = named.get("SSL_CERT_FILE") or ("" if named.get("SSL_CERT_DIR") else certifi.where())
    if verify is not True or cert is not None or not file:
        return httpx.create_ssl_context(verify, cert, trust_env)
    return _context_of(file, os.stat(file).st_mtime_ns)


def share_contexts() -> None:
    """Clients made from now on share a context.

    httpx makes one for each client and each call like `httpx.get`, plain HTTP or not. That takes a processor
    20 ms, and was most of what waiting for a server took.
    """
    httpx._transports.default.create_ssl_context = _shared_context  # type: ignore[attr-defined]
