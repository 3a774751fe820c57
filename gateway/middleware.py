"""Pure ASGI middleware: request ids, authentication, one log line per request.

Pure ASGI because wrapping request and response objects would hide the client's disconnect from streams.
"""

from __future__ import annotations

import time
import uuid

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import ApiError
from moebius.api_keys import ApiKeys

logger = structlog.get_logger(__name__)

# Probes, metrics and documentation stay open, as load balancers and scrapers bring no key.
_OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version", "/openapi.json", "/docs", "/redoc"})
_QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
_MAX_REQUEST_ID = 128


class RequestContextMiddleware:
    """Gives each request an id, taken from X-Request-Id when sent, echoes it and binds it to log lines."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get("x-request-id", "")
        request_id = sent if 0 < len(sent) <= _MAX_REQUEST_ID and sent.isprintable() else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        status, started = 0, time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            finally:
                log = logger.debug if scope["path"] in _QUIET_PATHS else logger.info
                log(
                    "http request",
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    seconds=round(time.perf_counter() - started, 4),
                )


class AuthMiddleware:
    """Requires `Authorization: Bearer <key>` on every path but probes, metrics and documentation."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection."""
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS and scope["method"] != "OPTIONS":
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            # Headers are read as latin-1; the bytes that were sent count.
            if scheme.lower() != "bearer" or not self._keys.accepts(key.strip().encode("latin-1")):
                error = ApiError(
                    401, "missing or wrong API key: send 'Authorization: Bearer KEY'", code="invalid_api_key"
                )
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)
