"""Refuses requests of other sites' web pages, and those for host names that are not this machine's."""

from __future__ import annotations

from collections.abc import Callable

import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.schemas.errors import ApiError
from moebius.web_origins import Sender, WebOrigins

logger = structlog.get_logger(__name__)
_MAX_LOGGED = 32  # different reasons: clients choose the names in them


class OriginMiddleware:
    """Answers such requests with 403, in every API.

    Where a key is needed, the key decides: unlike a cookie, it is not added by the browser to requests of
    foreign pages, so a page that has it was given it. The name in `Host` is checked nevertheless.
    """

    def __init__(self, app: ASGIApp, rules: WebOrigins, needs_key: Callable[[str], bool]) -> None:
        """`needs_key` returns whether a path requires a key."""
        self._app = app
        self._rules = rules
        self._needs_key = needs_key
        self._logged: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection."""
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        if refusal.message not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(refusal.message)
            logger.warning("a web page was refused", reason=refusal.message, path=scope["path"])
        await refusal.response(scope)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        for sender in _senders(scope):
            if reason := self._rules.refused_host(sender):
                return ApiError(403, reason, code="host_not_allowed")
            if self._needs_key(scope["path"]) and not sender.asks_first:
                continue
            if reason := self._rules.refused_origin(sender):
                return ApiError(403, reason, code="origin_not_allowed")
        return None


def _senders(scope: Scope) -> list[Sender]:
    """Returns the request's origin headers, one entry per `Host`, since each has to be allowed."""
    hosts: list[str] = []
    forwarded: list[str] = []
    origin = site = ""
    for name, raw in scope["headers"]:
        if name == b"host":
            hosts.append(raw.decode("latin-1"))
        elif name == b"origin":
            # Browsers send one `Origin`: joined, several equal none that is allowed.
            origin = f"{origin}, {raw.decode('latin-1')}" if origin else raw.decode("latin-1")
        elif name == b"sec-fetch-site":
            site = raw.decode("latin-1")
        elif name == b"x-forwarded-host":
            forwarded += [part.strip() for part in raw.decode("latin-1").split(",")]
    return [Sender(scope["method"], host, origin, site, tuple(forwarded)) for host in hosts or [""]]
