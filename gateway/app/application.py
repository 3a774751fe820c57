"""Assembles the HTTP application: routes, and pure ASGI middleware around them.

Pure ASGI because wrapping request and response objects would hide the client's disconnect from streams.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.apis.registry import POOLED, TRANSLATIONS
from gateway.app.background import BackgroundResponses
from gateway.app.batch_routes import router as batch_router
from gateway.app.cache_routes import router as cache_router
from gateway.app.conversation_routes import router as conversation_router
from gateway.app.embedding_routes import router as embedding_router
from gateway.app.file_routes import router as file_router
from gateway.app.mcp_routes import router as mcp_router
from gateway.app.message_batch_routes import router as message_batch_router
from gateway.app.native_routes import router as native_router
from gateway.app.openapi import install_openapi
from gateway.app.response_routes import router as response_router
from gateway.app.routes import create_chat_completion, create_completion, live_router, router
from gateway.app.sleep_routes import router as sleep_router
from gateway.app.slot_routes import router as slot_router
from gateway.app.state import Gateway
from gateway.app.translated_routes import router as api_router
from gateway.processes.shared import Shared
from gateway.prompts.fork_server import EarlyServer
from gateway.schemas.batches import MessageBatchRequest
from gateway.schemas.errors import MESSAGES_PATH, install_error_handlers
from gateway.schemas.mcp import McpCall
from gateway.schemas.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from gateway.telemetry.tracing import TracingMiddleware
from gateway.transport.admission import DrainMiddleware
from gateway.transport.keys import KeyMiddleware, OriginMiddleware
from gateway.transport.streaming import ClientGone
from gateway.web.live import LiveFigures
from gateway.web.mcp import McpServers
from gateway.web.pages import page_router
from moebius import __version__
from moebius.config import GatewayConfig, MoebiusConfig
from moebius.errors import UserError
from moebius.network.api_keys import ApiKeys, KeyLimits
from moebius.network.web_origins import ANY, WebOrigins, origin_pattern

logger = structlog.get_logger(__name__)

# Probes, metrics and documentation stay open, as load balancers and scrapers bring no key.
_OPEN_PATHS = frozenset(
    {"/", "/health", "/v1/health", "/ping", "/ready", "/metrics", "/version", "/openapi.json", "/docs"}
)
_OPEN_PREFIX = "/web/"  # the page's own files: the data that they show needs the key
_QUIET_PATHS = frozenset({"/health", "/v1/health", "/ping", "/ready", "/metrics", "/v1/live"})  # polled
_MAX_REQUEST_ID = 128
_SCHEMAS: tuple[type[BaseModel], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    MessageBatchRequest,
    McpCall,
)
_ROUTERS = (
    router,
    api_router,
    response_router,
    conversation_router,
    embedding_router,
    native_router,
    slot_router,
    cache_router,
    sleep_router,
    file_router,
    batch_router,
    message_batch_router,
)
_OFTEN = {"/v1/chat/completions": create_chat_completion, "/v1/completions": create_completion}


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
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                if scope["path"].startswith(MESSAGES_PATH):
                    headers["Request-Id"] = request_id  # Anthropic's name for it
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


def is_open(path: str) -> bool:
    """Returns whether a path needs no API key."""
    return path in _OPEN_PATHS or path.startswith(_OPEN_PREFIX)


_CLIENT_CLOSED = 499  # nginx's number, for the log line: the client is gone


def _log_broken(error: UserError) -> None:
    logger.error("the gateway cannot serve", reason=str(error))


async def _on_client_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED)


def create_app(
    config: MoebiusConfig,
    on_broken: Callable[[UserError], None] = _log_broken,
    shared: Shared | None = None,
    early: EarlyServer | None = None,
) -> FastAPI:
    """Creates the application; it connects to the engine when started and answers 503 until the engine does.

    `on_broken` is called with the reason when the model's files cannot be used; `shared` is the state shared
    with other processes of its port, and `early` what prompt processes are forked from.
    Raises ConfigError for a key file that cannot be used.
    """
    gateway = Gateway(config, on_broken, shared, early)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await gateway.open(app)
        try:
            yield
        finally:
            await gateway.close()

    app = FastAPI(
        title="Moebius",
        version=__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        # The framework's pages load scripts from other hosts; ours is in gateway/web.
        docs_url=None,
        redoc_url=None,
        # Its own telemetry depends on the environment; ours is configured by the settings alone.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.gateway = gateway
    app.state.background = BackgroundResponses(gateway)
    install_error_handlers(app)
    app.add_exception_handler(ClientGone, _on_client_gone)
    for one in _ROUTERS:
        app.include_router(one)
    app.include_router(page_router(config.gateway.web_page))
    if config.gateway.web_page:
        servers, kib = config.gateway.web_mcp_servers, config.gateway.web_mcp_result_kib
        app.state.mcp_servers = McpServers(servers, config.gateway.web_mcp_timeout_s, kib * 1024)
        app.include_router(mcp_router)
    if config.gateway.live_view:
        app.state.live_figures = LiveFigures(lambda replica: gateway.engine.live(replica))
        app.include_router(live_router)
    described = [*_SCHEMAS, *(schema for schema, _ in (*TRANSLATIONS.values(), *POOLED.values()))]
    install_openapi(app, described, config.gateway.strict_parameters)
    # Polled paths are matched first, without the framework's handling of parameters and dependencies, which
    # they do not have. Everything else about them, also the document, is as declared.
    app.router.routes[:0] = [Route(path, endpoint, methods=["POST"]) for path, endpoint in _OFTEN.items()]
    _add_middleware(app, config, gateway)
    return app


def _add_middleware(app: FastAPI, config: MoebiusConfig, gateway: Gateway) -> None:
    """Adds the middleware, outermost last. Raises ConfigError for a key file that cannot be used."""
    app.add_middleware(HeadMiddleware)
    app.add_middleware(DrainMiddleware, drain=gateway.drain, failed=gateway.metrics.failed)
    keys = ApiKeys(config.gateway.api_key, config.gateway.api_key_file)
    if keys.required:
        settings = config.gateway
        limits = KeyLimits(
            settings.key_requests_in_flight, settings.key_requests_per_minute, settings.key_tokens_per_minute
        )
        app.add_middleware(
            KeyMiddleware,
            keys=keys,
            is_open=is_open,
            defaults=limits,
            metrics=gateway.metrics,
            table=gateway.shared.keys,
        )
    add_web_middleware(app, config.gateway, keys)
    app.add_middleware(TracingMiddleware)


def add_web_middleware(app: FastAPI, settings: GatewayConfig, keys: ApiKeys) -> None:
    """Adds what answers browsers, refuses foreign pages, and gives every answer an id, around all so far."""
    origins = settings.cors_origins
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[ANY] if ANY in origins else [],
            allow_origin_regex=origin_pattern(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
            max_age=3600,
        )
    app.add_middleware(
        OriginMiddleware,
        rules=WebOrigins(settings.host, settings.allowed_hosts, origins),
        needs_key=lambda path: keys.required and not is_open(path),
    )
    app.add_middleware(RequestContextMiddleware)


class HeadMiddleware:
    """Answers HEAD on every path that answers GET, with the same status and headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app({**scope, "method": "GET"}, receive, send_head)
