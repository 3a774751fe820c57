"""What the routes of one application share."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Literal, cast

import grpc
import structlog
from starlette.requests import Request

from gateway.admission import Admission
from gateway.engine_client import EngineClient
from gateway.errors import ApiError
from gateway.metrics import GatewayMetrics
from gateway.model import ServedModel, load_served_model
from moebius.config import MoebiusConfig

logger = structlog.get_logger(__name__)
RETRY_S = 0.25


class Gateway:
    """Configuration, engine connection, admission, metrics; made by `create_app`, opened by its lifespan."""

    def __init__(self, config: MoebiusConfig) -> None:
        self.config = config
        self.metrics = GatewayMetrics()
        self.admission = Admission(config.gateway.max_queued_requests, self.metrics)
        self._engine: EngineClient | None = None
        self._model: ServedModel | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._problem = "connecting"

    @property
    def engine(self) -> EngineClient:
        """The connection; exists while the application runs."""
        assert self._engine is not None, "the application is not running"
        return self._engine

    async def open(self) -> None:
        """Opens the channel and begins to ask the engine for its model, without waiting for it."""
        self._engine = EngineClient(self.config.gateway.engine_address)
        self._connecting = asyncio.create_task(self._connect())

    async def close(self) -> None:
        """Stops connecting and closes the channel."""
        if self._connecting is not None:
            self._connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._connecting
        await self.engine.close()

    async def _connect(self) -> None:
        """Asks until the engine answers: gateway and engine are started together, in any order."""
        while self._model is None:
            try:
                info = await self.engine.model_info()
                self._model = await asyncio.to_thread(
                    load_served_model,
                    info,
                    self.config.model.model,
                    self.config.model.served_model_name,
                    self.config.gateway.chat_template,
                )
            except grpc.aio.AioRpcError as error:
                self._note_problem(f"engine at {self.engine.address}: {error.code().name}", "info")
                await asyncio.sleep(RETRY_S)
            except Exception as error:
                # Wrong files do not get better by asking every quarter second, but may be put right.
                self._note_problem(f"model files: {error}", "warning")
                await asyncio.sleep(20 * RETRY_S)
        self.metrics.set_model(self._model.name)
        logger.info("model is known", model=self._model.name, max_model_len=self._model.max_context_length)

    def _note_problem(self, problem: str, level: Literal["info", "warning"]) -> None:
        """Logs why there is no model yet, once per change; an engine that still loads is no warning."""
        if problem != self._problem:
            getattr(logger, level)("waiting for the model", reason=problem)
        self._problem = problem

    def model(self) -> ServedModel:
        """The served model; ApiError 503 until the engine has told which."""
        if self._model is None:
            raise ApiError(
                503, f"the model is not ready: {self._problem}", code="engine_unavailable", retry_after_s=2
            )
        return self._model

    def model_named(self, name: str | None) -> ServedModel:
        """The served model when `name` is its name (or None); ApiError 404 naming `model` otherwise."""
        model = self.model()
        if name is not None and name != model.name:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has {model.name!r}",
                param="model",
                code="model_not_found",
            )
        return model


def gateway_of(request: Request) -> Gateway:
    """The shared state of the application that got `request`."""
    return cast(Gateway, request.app.state.gateway)
