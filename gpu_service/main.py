"""The engine process: load, warm up, serve, drain."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import signal
import threading
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from gpu_service.build import Built, WarmUpGate, build_engine, model_info
from gpu_service.memory.metrics import export
from gpu_service.metrics import EngineMetrics
from gpu_service.output_router import OutputRouter
from gpu_service.parallel.follower import run_follower
from gpu_service.server import EngineServicer, Service
from gpu_service.telemetry import EngineTelemetry
from gpu_service.validation import Bounds
from moebius.checkpoint.gguf.files import served_name
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from moebius.telemetry import configure_logging, configure_tracing, enable_reflection, start_metrics_server
from protos import engine_pb2, engine_pb2_grpc

_log = structlog.get_logger(__name__)
SERVICE_NAME = engine_pb2.DESCRIPTOR.services_by_name["Engine"].full_name
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# Prompts of a million tokens are 4 MB of varints; logprobs of them are larger.
_MESSAGE_BYTES = 256 * 1024 * 1024
# A gateway pings through silent streams, every 30 s; a server refuses pings closer than five minutes apart
# unless told otherwise, and ends the connection with all its calls.
MIN_PING_INTERVAL_MS = 10_000


def run(config: MoebiusConfig) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status."""
    configure_logging(config.telemetry, "gpu")
    tracing = configure_tracing(config.telemetry, "moebius-gpu")
    metrics = start_metrics_server(config.gpu.gpu_metrics_port, host=config.telemetry.metrics_host)
    try:
        if config.parallel.rank > 0:
            return run_follower(config)
        return asyncio.run(_serve(config))
    except (UserError, ValueError, OSError) as error:
        _log.error("gpu_service can not start", error=str(error))
        return 1
    except RuntimeError:  # of the expert client, the mailbox or torch: here the traceback helps
        _log.exception("gpu_service ended by an error")
        return 1
    finally:
        tracing.shutdown()
        if metrics is not None:
            metrics.close()


class HealthReport:
    """The standard health service, for this server as a whole and for the engine service."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set(self, serving: bool) -> None:
        """Readiness: weights loaded, expert servers ready, warm-up done, not draining."""
        for name in ("", SERVICE_NAME):
            await self._servicer.set(name, _SERVING if serving else _NOT_SERVING)


def make_server(
    servicer: EngineServicer,
    address: str,
    min_ping_interval_ms: int = MIN_PING_INTERVAL_MS,
    reflect: bool = False,
) -> tuple[grpc.aio.Server, HealthReport, int]:
    """A server with engine, health and, if `reflect`, reflection: bound but not started; and its port.

    Raises UserError when the address can not be bound.
    """
    options = [
        ("grpc.max_receive_message_length", _MESSAGE_BYTES),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", min_ping_interval_ms),
    ]
    server = grpc.aio.server(options=options)
    engine_pb2_grpc.add_EngineServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    report = HealthReport(server)
    if reflect:
        enable_reflection(server, SERVICE_NAME)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise UserError(f"gpu_address: can not listen on {address!r}: {error}") from error
    return server, report, port


async def _serve(config: MoebiusConfig) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    servicer = EngineServicer()
    server, report, _ = make_server(
        servicer, config.gpu.gpu_address, reflect=config.telemetry.grpc_reflection
    )
    await report.set(False)
    await server.start()
    loading = _start_loading(config, loop)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
    interrupted = not loading.done()
    if interrupted or loading.exception() is not None:
        await server.stop(0)  # a server dropped while it runs would complain of its closed event loop
    if interrupted:
        _log.info("stopped while loading")
        return 0
    built, gate, telemetry = loading.result()
    router = OutputRouter(loop)
    gate.open(router.on_output)
    bounds = Bounds(built.model_config.vocab_size, built.context_limit, config.gpu.random_seed)
    info = model_info(config, built)
    preparer = None if built.vision is None else built.vision.preparer
    servicer.service = Service(
        built.engine, router, telemetry, bounds, info, config.gpu.page_size, built.recorder, preparer
    )
    await report.set(True)
    _log.info("ready", address=config.gpu.gpu_address, model=info.served_model_name)
    lost = asyncio.Event()
    built.engine.on_lost = lambda reason: _set_from_thread(loop, lost)
    losing = asyncio.create_task(lost.wait())
    await asyncio.wait((stopping, losing), return_when=asyncio.FIRST_COMPLETED)
    if lost.is_set():
        await report.set(False)
        await server.stop(1)
        # Nothing of the device can be closed in order; whoever started this process starts it again.
        return 1
    losing.cancel()
    _log.info("draining")
    servicer.draining = True
    await report.set(False)
    await server.stop(config.supervisor.stop_timeout_s / 2)
    await asyncio.to_thread(built.close)
    return 0


def _set_from_thread(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is gone when the process is stopping
        loop.call_soon_threadsafe(event.set)


def _start_loading(
    config: MoebiusConfig, loop: asyncio.AbstractEventLoop
) -> asyncio.Future[tuple[Built, WarmUpGate, EngineTelemetry]]:
    """Loads in a daemon thread: a load can not be interrupted, so it must not outlive a SIGTERM."""
    future: asyncio.Future[tuple[Built, WarmUpGate, EngineTelemetry]] = loop.create_future()

    def settle(outcome: concurrent.futures.Future[tuple[Built, WarmUpGate, EngineTelemetry]]) -> None:
        error = outcome.exception()
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(outcome.result())

    def load() -> None:
        outcome: concurrent.futures.Future[tuple[Built, WarmUpGate, EngineTelemetry]]
        outcome = concurrent.futures.Future()
        try:
            outcome.set_result(_load(config))
        except BaseException as error:  # it is raised again in the event loop
            outcome.set_exception(error)
        with contextlib.suppress(RuntimeError):  # the loop is gone when the process is stopping
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=load, name="load", daemon=True).start()
    return future


def _load(config: MoebiusConfig) -> tuple[Built, WarmUpGate, EngineTelemetry]:
    """Everything slow, off the event loop, so that health checks are answered meanwhile."""
    name = config.model.served_model_name or served_name(Path(config.model.model).resolve())
    metrics = EngineMetrics(name)
    telemetry = EngineTelemetry(metrics, config.telemetry.expert_span_ratio)
    gate = WarmUpGate()
    built = build_engine(config, telemetry, gate.on_output)
    metrics.describe_cache(config.gpu.page_size, built.num_pages, config.gpu.prefix_caching)
    if built.self_test is not None:
        metrics.describe_self_test(built.self_test.worst_by_layer)
    built.engine.start()
    timeout_s = config.supervisor.ready_timeout_s
    gate.run(built.engine, built.model_config.vocab_size, timeout_s, built.warm_up_tokens)
    if built.recorder is not None and config.placement.expert_recorder != "off":
        # What the warm-up chose is no request's.
        built.recorder.start(config.placement.expert_recorder)
    built.memory.seal()
    if built.memory.ledger is not None:
        export(built.memory.ledger, name)
    telemetry.enabled = True
    return built, gate, telemetry
