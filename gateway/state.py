"""What the routes of one application share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

import grpc
import structlog
from starlette.requests import Request

from gateway.admission import Admission
from gateway.engine_client import EngineClient
from gateway.errors import ApiError
from gateway.metrics import GatewayMetrics
from gateway.model import ServedModel, load_served_model
from gateway.text.tokenizer import Tokenizer
from moebius.config import MoebiusConfig
from protos import engine_pb2

logger = structlog.get_logger(__name__)
RETRY_S = 0.25


class ModelFilesError(Exception):
    """Tokenizer or chat template can not be read; the message names the file."""


class Gateway:
    """Configuration, engine connection, admission, metrics; made by `create_app`, opened by its lifespan."""

    def __init__(self, config: MoebiusConfig, on_broken: Callable[[str], None]) -> None:
        """`on_broken` is called, in the event loop, with the sentence that says why no model can be served:
        its files are wrong, which waiting does not mend."""
        self.config = config
        self._on_broken = on_broken
        self.metrics = GatewayMetrics()
        self.admission = Admission(config.gateway.max_queued_requests, self.metrics)
        self._engine: EngineClient | None = None
        self._model: ServedModel | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._last_status = ""

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
        """Reads the files, then asks until the engine answers: both are started together, in any order."""
        settings = self.config.model
        try:
            # Before the engine is there: loading it may take half an hour, and wrong files stay wrong.
            tokenizer = await self._read_tokenizer(settings.model) if settings.model else None
            info = await self._model_info()
            directory = info.tokenizer_path or info.model_path
            tokenizer = tokenizer or await self._read_tokenizer(directory)
            self._model = load_served_model(info, tokenizer, settings.served_model_name)
        except Exception as error:
            self._on_broken(f"the model can not be served: {error}")
            return
        self.metrics.set_model(self._model.name)
        logger.info("model is known", model=self._model.name, max_model_len=self._model.max_context_length)

    async def _read_tokenizer(self, directory: str) -> Tokenizer:
        """Tokenizer and chat template. Raises ModelFilesError naming the file or directory at fault."""
        template = self.config.gateway.chat_template
        try:
            return await asyncio.to_thread(Tokenizer.from_dir, Path(directory), template)
        except Exception as error:
            # The libraries that read these files raise whatever they like, often without a name.
            text, named = str(error) or type(error).__name__, (directory, template)
            is_named = any(path and path in text for path in named)
            raise ModelFilesError(text if is_named else f"{template or directory}: {text}") from error

    async def _model_info(self) -> engine_pb2.GetModelInfoResponse:
        """The engine's answer, however long it takes to be there."""
        while True:
            try:
                return await self.engine.model_info()
            except grpc.aio.AioRpcError as error:
                status = error.code().name
                if status != self._last_status:  # once per change: an engine that loads is no warning
                    logger.info("waiting for the engine", address=self.engine.address, status=status)
                self._last_status = status
                await asyncio.sleep(RETRY_S)

    def model(self) -> ServedModel:
        """The served model; ApiError 503 until the engine has told which."""
        if self._model is None:
            raise ApiError(
                503,
                "the model is not ready: the engine is still loading, or is not there",
                code="engine_unavailable",
                retry_after_s=2,
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
