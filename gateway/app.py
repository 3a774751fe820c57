"""Puts the HTTP application together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog
from fastapi import FastAPI, Request, Response
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from starlette.middleware.cors import CORSMiddleware

from gateway.draining import DrainMiddleware
from gateway.errors import install_error_handlers
from gateway.middleware import AuthMiddleware, RequestContextMiddleware
from gateway.openapi import install_openapi
from gateway.routes import chat, completions, models, ops, tokenize
from gateway.schemas.chat import ChatCompletionRequest
from gateway.schemas.completions import CompletionRequest
from gateway.schemas.tokenize import DetokenizeRequest, TokenizeRequest
from gateway.state import Gateway
from gateway.streaming import ClientGone
from moebius import __version__
from moebius.api_keys import ApiKeys
from moebius.config import MoebiusConfig

logger = structlog.get_logger(__name__)
_CLIENT_CLOSED = 499  # nginx's number; nobody reads the answer, but the log line does


def _log_broken(reason: str) -> None:
    logger.error("the gateway can not serve", reason=reason)


async def _on_client_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED)


def create_app(config: MoebiusConfig, on_broken: Callable[[str], None] = _log_broken) -> FastAPI:
    """The application; it connects to the engine when started and answers 503 until the engine does.

    `on_broken` is called with the reason when the model's files can not be used.
    Raises ConfigError for a key file that can not be used.
    """
    gateway = Gateway(config, on_broken)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await gateway.open()
        try:
            yield
        finally:
            await gateway.close()

    app = FastAPI(
        title="Moebius",
        version=__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        # Its own telemetry can be switched by the environment; ours comes from the configuration alone.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.gateway = gateway
    install_error_handlers(app)
    app.add_exception_handler(ClientGone, _on_client_gone)
    for module in (chat, completions, models, ops, tokenize):
        app.include_router(module.router)
    install_openapi(app, [ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest])
    app.add_middleware(DrainMiddleware, drain=gateway.drain, failed=gateway.metrics.failed)
    keys = ApiKeys(config.gateway.api_key, config.gateway.api_key_file)
    if keys.required:
        app.add_middleware(AuthMiddleware, keys=keys)
    if config.gateway.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.gateway.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
            max_age=3600,
        )
    app.add_middleware(RequestContextMiddleware)  # added last: outermost, so every answer has an id
    FastAPIInstrumentor.instrument_app(
        app, excluded_urls="/health,/ready,/metrics", exclude_spans=["receive", "send"]
    )
    return app
