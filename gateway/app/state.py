"""The state that the routes of one application share."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import cast

import grpc
import structlog
from starlette.requests import Request
from starlette.types import ASGIApp

from gateway.apis.registry import POOLED, Kind
from gateway.apis.stored_responses import ResponseStore, check_store
from gateway.batches.files import check_directory
from gateway.batches.outcomes import COUNTERS
from gateway.batches.run import Means
from gateway.batches.runner import BatchRunner
from gateway.batches.slots import Slots
from gateway.batches.store import BatchStore
from gateway.generation.job import Prepared
from gateway.generation.model import ServedModel, load_served_model
from gateway.processes.shared import Shared, alone
from gateway.prompts.fork_server import EarlyServer
from gateway.prompts.pool import PromptPool
from gateway.prompts.process import ModelFiles, WorkerSetup
from gateway.replicas.replica_set import ReplicaSet, SleepRules
from gateway.schemas.errors import ApiError, bad_request
from gateway.telemetry.batches import BatchMetrics
from gateway.telemetry.combined import engine_metrics
from gateway.telemetry.metrics import GatewayMetrics, GenAiMetrics
from gateway.telemetry.repeated import RepeatedWarnings
from gateway.text.model_files import ReadFiles, read_files
from gateway.transport.admission import RETRY_AFTER_S, Admission, BodyReceiver, Drain, shutting_down
from gateway.transport.internal import InternalClient
from gateway.transport.keys import client_of, owner_of
from gateway.transport.streaming import run_until_disconnect
from moebius.config import MoebiusConfig
from moebius.errors import StartupError, UserError, WrongIdentity
from moebius.models.identity import IdentityRecord
from moebius.process.memory import give_back_memory
from moebius.process.sleep_mark import ASLEEP, SleepMark
from protos import engine_pb2

logger = structlog.get_logger(__name__)
RETRY_S = 0.25
REFUSED_S = 30.0  # how long to check whether the right files are back
_LOOK_S = 2.0
_LISTEN_S = 60.0  # a process that cannot serve for longer answers so itself
_MIB = 2**20
_LINE_EXTRA = 2**16  # bytes of a batch's line around its body
_TEXT_KINDS = frozenset({"completions", "tokenize", "detokenize", "batch", "conversation", *POOLED})


class Gateway:
    """Configuration, engine connection, admission, metrics; made by `create_app`, opened by its lifespan."""

    def __init__(
        self,
        config: MoebiusConfig,
        on_broken: Callable[[UserError], None],
        shared: Shared | None = None,
        early: EarlyServer | None = None,
    ) -> None:
        """`on_broken` is called, in the event loop, with the error why no model can be served:
        its files are wrong, which waiting does not fix. `shared`: with other processes of the port. `early`:
        what prompt processes are forked from."""
        self.shared = shared or alone()
        self.config = config
        self._on_broken = on_broken
        self.metrics = GatewayMetrics()
        self.genai = GenAiMetrics()
        self.admission = Admission(config.gateway.max_queued_requests, self.metrics, self.shared.places)
        self._bodies = BodyReceiver(self.max_body_bytes)
        settings = config.gateway
        self._prompts = PromptPool(settings.prompt_workers, settings.max_queued_requests, early)
        self.warnings = RepeatedWarnings()
        self.drain = Drain()
        check_store(config.gateway)
        check_directory(config.gateway)
        self.large_bodies = 0  # bodies of large batches that are being received
        self.batches = BatchStore.of(config.gateway)  # None: no directory is configured
        self._runner: BatchRunner | None = None
        self._responses: ResponseStore | None = None
        self._engine: ReplicaSet | None = None
        self._model: ServedModel | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._last_status = ""
        self._settled = asyncio.Event()  # the model is known, or cannot be served
        self._refusal = ""  # the files that differ from those of other processes

    @property
    def max_body_bytes(self) -> int:
        """Returns the bytes that a body without images may have."""
        return int(self.config.gateway.max_body_mib * _MIB)

    @property
    def _parsers(self) -> tuple[str, str]:
        return self.config.gateway.tool_call_parser, self.config.gateway.reasoning_parser

    @property
    def responses(self) -> ResponseStore:
        """The store of all owners' responses (`responses_of`: of one); exists while the application runs."""
        assert self._responses is not None, "the application is not running"
        return self._responses

    @property
    def engine(self) -> ReplicaSet:
        """The connections to the replicas; exist while the application runs."""
        assert self._engine is not None, "the application is not running"
        return self._engine

    async def open(self, app: ASGIApp | None = None) -> None:
        """Opens the channel and starts asking the engine for its model, without waiting for it.

        `app`: answers the requests of batches; without it none are run.
        """
        settings = self.config.gateway
        sleep = SleepRules(
            SleepMark(self.config.model.sleep_file),
            self.config.gpu.wake_on_request,
            self.config.supervisor.ready_timeout_s,
        )
        addresses = settings.engines or (settings.engine_address,)
        self._engine = ReplicaSet(addresses, self.metrics.replicas, sleep=sleep)
        await self._engine.open()
        self._responses = ResponseStore.of(settings)
        self._connecting = asyncio.create_task(self._connect())
        if self.batches is not None and app is not None:
            slots = Slots(settings.batch_requests, settings.workers, lambda: self.admission.in_flight)
            longest = self.max_body_bytes + _LINE_EXTRA
            metrics = BatchMetrics(self.metrics.registry, COUNTERS)
            means = Means(InternalClient(app), slots, self._read_lines, longest, self.drain, metrics)
            self._runner = BatchRunner(self.batches, means, lambda: self.is_ready)
            self._runner.start()
        if self.shared.listens_when_ready:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._settled.wait(), _LISTEN_S)

    async def close(self) -> None:
        """Stops connecting and closes the channel."""
        if self._connecting is not None:
            self._connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._connecting
        if self._runner is not None:
            await self._runner.close()
        self.warnings.close()
        await self._prompts.close()
        if self._responses is not None:
            self._responses.close()
        await self.engine.close()

    async def _connect(self) -> None:
        """Connects until a model is served, then watches that no other one is.

        Files that differ from those of other processes may be restored, so it retries for a while; meanwhile
        requests and probes are answered with the reason. Then this process ends, and its supervisor learns
        that a restart of it alone does not help.
        """
        refused_at = None
        try:
            while not self.is_ready:
                try:
                    self._model = await self._served_model()
                except WrongIdentity as error:
                    await self._prompts.close()
                    refused_at = refused_at or time.monotonic()
                    if time.monotonic() > refused_at + REFUSED_S:
                        raise
                    self._refuse(str(error))
                    await asyncio.sleep(_LOOK_S)
            self._refusal = ""
            self._announce(self._model)
            self._settled.set()
            await self._watch_engine()
        except WrongIdentity as error:
            self._on_broken(WrongIdentity(f"the model cannot be served: {error}"))
        except Exception as error:
            self._on_broken(StartupError(f"the model cannot be served: {error}"))
        finally:
            self._settled.set()

    def _refuse(self, reason: str) -> None:
        if reason != self._refusal:
            logger.error("the model is not served", reason=reason)
        self._refusal = reason

    async def _served_model(self) -> ServedModel:
        """Reads the files, then asks until the engine answers; gateway and engine may start in any order."""
        settings = self.config.model
        # Before the engine answers: loading may take half an hour, and wrong files stay wrong.
        files = await self._read_files(settings.model) if settings.model else None
        if files is not None:
            await self._prompts.spawn(self._model_files(files))
        info = await self._model_info()
        files = files or await self._read_files(info.tokenizer_path or info.model_path)
        files.check_engine(info.identity)
        model = load_served_model(
            info, files.tokenizer, settings.served_model_name, settings.model_aliases, self._parsers
        )
        await self._prompts.start(self._worker_setup(info, files))
        return model

    def _announce(self, model: ServedModel | None) -> None:
        assert model is not None, "it is known"
        give_back_memory()
        self.metrics.set_model(model.name, model.fingerprint)
        logger.info(
            "model is known",
            model=model.name,
            max_model_len=model.max_context_length,
            system_fingerprint=model.fingerprint or "none",
            tool_call_parser=model.tool_parser or "none",
            reasoning_parser=model.reasoning_parser or "none",
        )

    async def _watch_engine(self) -> None:
        """Raises WrongIdentity once no request has been answered for some time because files have changed:
        all engines have restarted with other files, or no prompt process may start."""
        since = None
        while True:
            await asyncio.sleep(_LOOK_S)
            reason = self._prompts.outage
            if self.engine.other_model:  # nothing else polls a single engine
                reason = await self.engine.why_not_serving()
            if not reason:
                since = None
                continue
            since = since or time.monotonic()
            if time.monotonic() > since + REFUSED_S:
                raise WrongIdentity(reason)

    async def _read_files(self, directory: str) -> ReadFiles:
        """Reads tokenizer and chat template; see `read_files`."""
        template, record = self.config.gateway.chat_template, self.config.model.identity_file
        return await asyncio.to_thread(read_files, directory, template, record, self.shared.files)

    async def _model_info(self) -> engine_pb2.GetModelInfoResponse:
        """Returns the engine's answer, however long it takes to start."""
        while True:
            try:
                return await self.engine.model_info()
            except grpc.aio.AioRpcError as error:
                status = error.code().name
                if status != self._last_status:  # once per change: a loading engine is no warning
                    logger.info("waiting for the engine", address=self.engine.address, status=status)
                self._last_status = status
                await asyncio.sleep(RETRY_S)

    def _model_files(self, files: ReadFiles) -> ModelFiles:
        return ModelFiles(files.directory, self.config.gateway.chat_template, files.parts)

    def _worker_setup(self, info: engine_pb2.GetModelInfoResponse, files: ReadFiles) -> WorkerSetup:
        """Returns the setup of the prompt processes."""
        settings = self.config.gateway
        return WorkerSetup(
            model_info=info.SerializeToString(),
            files=self._model_files(files),
            served_name=self.config.model.served_model_name,
            aliases=self.config.model.model_aliases,
            parsers=self._parsers,
            responses=self.responses,
            images=self.config.images,
            max_body_bytes=self.max_body_bytes,
            memory_bytes=int(settings.prompt_memory_gib * 2**30),
            cpu_s=settings.prompt_timeout_s,
            strict_parameters=settings.strict_parameters,
        )

    async def generation(self, request: Request, kind: Kind) -> Prepared:
        """Returns the generation request, read, validated and tokenised; see `prepare`."""
        prepared = await self.prepare(request, kind)
        assert isinstance(prepared, Prepared)
        self.metrics.ignored(prepared.ignored)
        return prepared

    async def prepare(self, request: Request, kind: Kind) -> Prepared | bytes:
        """Returns the prepared request for the engine, or the JSON that answers it.

        Raises:
            ApiError: the body is refused, or the model is not known yet.
            ClientGone: the client left.
        """
        model = self.model()
        images = self.config.images
        takes_images = kind not in _TEXT_KINDS and model.supports_vision
        # Base64 has four characters for three bytes.
        extra = (
            int(images.max_images_per_request * images.max_image_mib * _MIB * 4 / 3) if takes_images else 0
        )
        async with self._bodies.receive(request, extra) as body:
            client, (owner, _) = client_of(request.scope), owner_of(request.scope)
            return await run_until_disconnect(request, self._prompts.prepare(kind, body, client, owner))

    async def _read_lines(self, data: bytes, owner: str) -> bytes:
        """Reads lines of a batch; see `gateway.apis.batch_lines.read_lines`. Raises ApiError."""
        return await self._answer("batch_lines", data, owner)

    async def read_messages(self, data: bytes, owner: str) -> bytes:
        """Reads some requests of a batch; see `gateway.apis.batch_lines.read_messages`. Raises ApiError."""
        return await self._answer("message_batch", data, owner)

    async def _answer(self, kind: Kind, data: bytes, owner: str) -> bytes:
        """Returns what a prompt process makes of the data. Raises ApiError."""
        self.model()
        answer = await self._prompts.prepare(kind, [data], owner)
        assert isinstance(answer, bytes)
        return answer

    async def render_metrics(self) -> bytes:
        """Returns Prometheus text of all processes of this port, all engines and their expert servers."""
        own = self.metrics.render() if self.shared.metrics is None else await self.shared.metrics()
        return own + await asyncio.to_thread(engine_metrics, await self.engine.metrics())

    @property
    def is_ready(self) -> bool:
        """Returns whether the model is known."""
        return self._model is not None

    async def not_ready(self) -> str:
        """Returns why a request sent now would not be answered, or an empty string if it would."""
        try:
            await self.ready_model()
        except ApiError as error:
            return error.message
        return ""

    async def ready_model(self) -> ServedModel:
        """Returns the served model if a request sent now would be answered, else raises ApiError 503."""
        if self.drain.has_begun:
            raise shutting_down()
        model = self.model()
        if self._prompts.refusal:
            raise _files_changed(self._prompts.refusal)
        others = "" if self.shared.why_not_ready is None else await self.shared.why_not_ready()
        if others:
            raise ApiError(503, others, code="engine_unavailable", retry_after_s=1)
        is_marked = self.engine.sleep.mark.exists
        if is_marked and not self.engine.sleep.wakes_on_request:
            raise ApiError(503, ASLEEP, code="engine_asleep")
        # What falls asleep is gone for some seconds, which requests wait for.
        reason = "" if is_marked else await self.engine.why_not_serving()
        if reason:
            # The reason why processes cannot be restarted: changed files.
            record = IdentityRecord(self.config.model.identity_file)
            why = "; ".join(filter(None, (reason, await asyncio.to_thread(record.refusal))))
            raise ApiError(503, why, code="engine_unavailable", retry_after_s=2)
        problem = self._prompts.problem()
        if problem:
            raise ApiError(503, problem, code="unavailable", retry_after_s=2)
        return model

    @property
    def refusal(self) -> str:
        """Returns the files that differ from those of other processes, which impair this one."""
        return self._refusal or self._prompts.refusal

    def model(self) -> ServedModel:
        """Returns the served model. Raises ApiError 503 until the engine has described it."""
        if self._model is None and self._refusal:
            raise _files_changed(self._refusal)
        if self._model is None:
            raise ApiError(
                503,
                "the model is not ready: the engine is still loading, or is not there",
                code="engine_unavailable",
                retry_after_s=2,
            )
        return self._model

    def model_named(self, name: str | None) -> ServedModel:
        """Returns the served model for its name (or None). Raises ApiError 404 naming `model` otherwise."""
        model = self.model()
        model.check_name(name)
        return model


def _files_changed(reason: str) -> ApiError:
    return ApiError(503, reason, code="model_files_changed", retry_after_s=RETRY_AFTER_S)


def responses_of(request: Request) -> ResponseStore:
    """Returns what the sender of `request` has stored, and where its responses are stored."""
    return gateway_of(request).responses.of_owner(owner_of(request.scope)[0])


def gateway_of(request: Request) -> Gateway:
    """Returns the shared state of the application that got `request`."""
    return cast(Gateway, request.app.state.gateway)


def num_replicas(gateway: Gateway, replica: int) -> int:
    """Returns how many engines there are. Raises ApiError 400 where `replica`, from 0, is none of them."""
    count = len(gateway.engine.replicas)
    if replica >= max(count, 1):
        raise bad_request(f"'replica' is {replica}; there are {count}, counted from 0", "replica")
    return count
