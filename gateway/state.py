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

from gateway.admission import Admission, Drain, shutting_down
from gateway.apis.stored_responses import ResponseStore, check_store
from gateway.clients import client_of
from gateway.errors import ApiError
from gateway.model import ServedModel, load_served_model
from gateway.prompts.contract import Kind, ModelFiles, Prepared, WorkerSetup
from gateway.prompts.pool import BodyReceiver, PromptPool
from gateway.replicas.replica_set import ReplicaSet
from gateway.streaming import run_until_disconnect
from gateway.telemetry import GatewayMetrics, GenAiMetrics
from gateway.text.tokenizer import Tokenizer
from gateway.workers.metrics import engine_metrics
from gateway.workers.shared import Shared, alone
from moebius.config import MoebiusConfig
from protos import engine_pb2

logger = structlog.get_logger(__name__)
RETRY_S = 0.25
_LISTEN_S = 60.0  # a process that could not serve for so long says so itself
_MIB = 2**20
_TEXT_KINDS = frozenset({"completions", "tokenize", "detokenize"})


class ModelFilesError(Exception):
    """Tokenizer or chat template cannot be read; the message names the file."""


class Gateway:
    """Configuration, engine connection, admission, metrics; made by `create_app`, opened by its lifespan."""

    def __init__(
        self, config: MoebiusConfig, on_broken: Callable[[str], None], shared: Shared | None = None
    ) -> None:
        """`on_broken` is called, in the event loop, with the sentence that says why no model can be served:
        its files are wrong, which waiting does not fix. `shared`: with other processes of the port."""
        self.shared = shared or alone()
        self.config = config
        self._on_broken = on_broken
        self.metrics = GatewayMetrics()
        self.genai = GenAiMetrics()
        self.admission = Admission(config.gateway.max_queued_requests, self.metrics, self.shared.places)
        self._bodies = BodyReceiver(self._max_body_bytes)
        self._prompts = PromptPool(config.gateway.prompt_workers, config.gateway.max_queued_requests)
        self.drain = Drain()
        check_store(config.gateway)
        self._responses: ResponseStore | None = None
        self._engine: ReplicaSet | None = None
        self._model: ServedModel | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._last_status = ""

    @property
    def _max_body_bytes(self) -> int:
        return int(self.config.gateway.max_body_mib * _MIB)

    @property
    def _parsers(self) -> tuple[str, str]:
        return self.config.gateway.tool_call_parser, self.config.gateway.reasoning_parser

    @property
    def responses(self) -> ResponseStore:
        """What clients may go on from; exists while the application runs."""
        assert self._responses is not None, "the application is not running"
        return self._responses

    @property
    def engine(self) -> ReplicaSet:
        """The connections; exist while the application runs."""
        assert self._engine is not None, "the application is not running"
        return self._engine

    async def open(self) -> None:
        """Opens the channel and begins to ask the engine for its model, without waiting for it."""
        settings = self.config.gateway
        self._engine = ReplicaSet(settings.engines or (settings.engine_address,), self.metrics.replicas)
        await self._engine.open()
        self._responses = ResponseStore.of(settings)
        self._connecting = asyncio.create_task(self._connect())
        if self.shared.listens_when_ready:
            await asyncio.wait({self._connecting}, timeout=_LISTEN_S)

    async def close(self) -> None:
        """Stops connecting and closes the channel."""
        if self._connecting is not None:
            self._connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._connecting
        await self._prompts.close()
        if self._responses is not None:
            self._responses.close()
        await self.engine.close()

    async def _connect(self) -> None:
        """Reads the files, then asks until the engine answers: both are started together, in any order."""
        settings = self.config.model
        try:
            # Before the engine is there: loading it may take half an hour, and wrong files stay wrong.
            tokenizer = await self._read_tokenizer(settings.model) if settings.model else None
            if tokenizer is not None:
                await self._prompts.spawn(self._model_files(settings.model))
            info = await self._model_info()
            directory = info.tokenizer_path or info.model_path
            tokenizer = tokenizer or await self._read_tokenizer(directory)
            model = load_served_model(
                info, tokenizer, settings.served_model_name, settings.model_aliases, self._parsers
            )
            await self._prompts.start(self._worker_setup(info, settings.model or directory))
            self._model = model
        except Exception as error:
            self._on_broken(f"the model cannot be served: {error}")
            return
        self.metrics.set_model(self._model.name)
        logger.info(
            "model is known",
            model=self._model.name,
            max_model_len=self._model.max_context_length,
            tool_call_parser=self._model.tool_parser or "none",
            reasoning_parser=self._model.reasoning_parser or "none",
        )

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

    def _model_files(self, tokenizer_dir: str) -> ModelFiles:
        return ModelFiles(tokenizer_dir, self.config.gateway.chat_template)

    def _worker_setup(self, info: engine_pb2.GetModelInfoResponse, tokenizer_dir: str) -> WorkerSetup:
        """What the processes that prepare prompts need to know."""
        settings = self.config.gateway
        return WorkerSetup(
            model_info=info.SerializeToString(),
            files=self._model_files(tokenizer_dir),
            served_name=self.config.model.served_model_name,
            aliases=self.config.model.model_aliases,
            parsers=self._parsers,
            responses=self.responses,
            images=self.config.images,
            max_body_bytes=self._max_body_bytes,
            memory_bytes=int(settings.prompt_memory_gib * 2**30),
            cpu_s=settings.prompt_timeout_s,
            strict_parameters=settings.strict_parameters,
        )

    async def generation(self, request: Request, kind: Kind) -> Prepared:
        """A generation request read, validated and tokenised; see `prepare`."""
        prepared = await self.prepare(request, kind)
        assert isinstance(prepared, Prepared)
        self.metrics.ignored(prepared.ignored)
        return prepared

    async def prepare(self, request: Request, kind: Kind) -> Prepared | bytes:
        """What the request's body asks for, ready for the engine, or the JSON that answers it.

        Raises:
            ApiError: the body is refused, or the model is not known yet.
            ClientGone: the client left.
        """
        model = self.model()
        images = self.config.images
        takes_images = kind not in _TEXT_KINDS and model.supports_vision
        # Base64 takes four characters for three bytes.
        extra = (
            int(images.max_images_per_request * images.max_image_mib * _MIB * 4 / 3) if takes_images else 0
        )
        async with self._bodies.receive(request, extra) as body:
            client = client_of(request.scope)
            return await run_until_disconnect(request, self._prompts.prepare(kind, body, client))

    async def render_metrics(self) -> bytes:
        """Prometheus text, of all processes of this port, of all engines and of their expert servers."""
        own = self.metrics.render() if self.shared.metrics is None else await self.shared.metrics()
        return own + await asyncio.to_thread(engine_metrics, await self.engine.metrics())

    @property
    def is_ready(self) -> bool:
        """Whether the model is known."""
        return self._model is not None

    async def not_ready(self) -> str:
        """Why a request sent now would not be answered; empty: it would."""
        try:
            await self.ready_model()
        except ApiError as error:
            return error.message
        return ""

    async def ready_model(self) -> ServedModel:
        """The served model when a request sent now would be answered; else ApiError 503 with the reason."""
        if self.drain.has_begun:
            raise shutting_down()
        model = self.model()
        if self.shared.all_ready is not None and not await self.shared.all_ready():
            raise ApiError(503, "a gateway process is starting", code="engine_unavailable", retry_after_s=1)
        if not await self.engine.is_serving():
            raise ApiError(
                503,
                f"the engine is not serving: {self.engine.not_ready or 'it is starting, stopping or gone'}",
                code="engine_unavailable",
                retry_after_s=2,
            )
        return model

    def model(self) -> ServedModel:
        """The served model; ApiError 503 until the engine has described it."""
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
        model.check_name(name)
        return model


def gateway_of(request: Request) -> Gateway:
    """The shared state of the application that got `request`."""
    return cast(Gateway, request.app.state.gateway)
