"""The engine process: load, warm up, serve, drain."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import grpc
import structlog
import uvloop
from prometheus_client import REGISTRY

from gpu_service.assembly.ahead import AheadOfWake
from gpu_service.assembly.build import Built, WarmUpGate, build_engine, model_info
from gpu_service.assembly.kept_experts import keep_experts
from gpu_service.cache.tiers.prefix_tiers import PrefixTiers
from gpu_service.core.interface import NullObserver
from gpu_service.engine import step_check
from gpu_service.experts.adaptive import metrics as placement_metrics
from gpu_service.experts.client import ExpertUnavailable
from gpu_service.experts.fetching import metrics as fetch_metrics
from gpu_service.experts.resident import metrics as watch_metrics
from gpu_service.memory.ledger import export
from gpu_service.memory.shares import share_figures
from gpu_service.server.live import make_live_experts
from gpu_service.server.profiler import EngineProfiler
from gpu_service.server.readiness import SERVICE_NAME, HealthReport, Readiness
from gpu_service.server.responses import OutputRouter
from gpu_service.server.servicer import EngineServicer, Service
from gpu_service.server.sleep import EngineSleep, export_sleep, make_sleep
from gpu_service.server.validation import Bounds
from gpu_service.server.vllm_engine import SERVICE_NAME as VLLM_SERVICE_NAME
from gpu_service.server.vllm_engine import VllmEngineServicer
from gpu_service.telemetry.figures import export_figures
from gpu_service.telemetry.metrics import EngineMetrics, EngineTelemetry
from moebius.checkpoint.gguf.files import served_name
from moebius.config import MoebiusConfig
from moebius.errors import USER_ERROR_EXIT, UserError, report_failure
from moebius.mailbox import MailboxError
from moebius.models.identity import identity_digest
from moebius.network.grpc_channels import listen
from moebius.network.grpc_refusal import RefuseUndecodableAsync
from moebius.network.tls import configure_tls
from moebius.process.garbage import collect_rarely
from moebius.process.memory import give_back_memory
from moebius.process.operations import Answers, LoopWatch, ProcessState, registry_text, start_operations
from moebius.process.progress import end_imports, note_imports, take_phases
from moebius.process.sleep_mark import FORCED, SleepMark, adopt_files, start_over
from moebius.telemetry import configure_logging, configure_tracing, enable_reflection, export_metrics
from moebius.telemetry.certificates import CertificateCollector
from protos import engine_pb2, engine_pb2_grpc, vllm_engine_pb2_grpc

_log = structlog.get_logger(__name__)
# What a user can fix, or what another process says: the message is the cause.
_EXPECTED = (UserError, ValueError, OSError, MailboxError, ExpertUnavailable)
_Loaded = tuple[Built, EngineTelemetry, engine_pb2.GetModelInfoResponse]
_POLL_S = 0.05
# In place of an exit status: the process starts over, asleep.
_SLEEPS = 256
# For prefixes that lower tiers do not have yet; what is left is computed again.
_COPY_S = 60.0
# For calls to send their last message, and for the step that is computed while the engine ends.
_LAST_WORDS_S = 1.0
_LAST_STEP_S = 5.0
# Prompts of a million tokens are 4 MB of varints; logprobs of them are larger.
_MESSAGE_BYTES = 256 * 1024 * 1024
# A gateway pings through silent streams, every 30 s; a server refuses pings closer than five minutes apart
# unless set otherwise, and ends the connection with all its calls.
MIN_PING_INTERVAL_MS = 10_000


def run(config: MoebiusConfig) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status. What went wrong is the last line on stderr."""
    adopt_files()
    configure_logging(config.telemetry, "gpu")
    cpus = os.sched_getaffinity(0)
    tracing = configure_tracing(config.telemetry, "moebius-gpu", _attributes(config))
    metrics, end_metrics = None, _nothing
    try:
        configure_tls(config.security)
        state = ProcessState("still loading")
        watch = LoopWatch(config.supervisor.hang_timeout_s)
        answers = Answers(registry_text, lambda: watch.judged(state))
        host, allowed = config.telemetry.metrics_host, config.gateway.allowed_hosts
        REGISTRY.register(CertificateCollector())
        metrics = start_operations(config.gpu.gpu_metrics_port, host, answers, allowed)
        end_metrics = export_metrics(config.telemetry, "moebius-gpu", REGISTRY.collect, _attributes(config))
        status, in_order = _run(config, state, watch)
    except _EXPECTED as error:
        report_failure(str(error))
        status = USER_ERROR_EXIT if isinstance(error, ValueError) else getattr(error, "exit_status", 1)
        in_order = _is_alone(config)
    except Exception as error:  # of torch or ourselves: here the traceback helps
        _log.exception("gpu_service ended by an error")
        report_failure(f"{type(error).__name__}: {error} (its traceback is above)")
        status, in_order = 1, _is_alone(config)
    finally:
        end_metrics()
        tracing.shutdown()
        if metrics is not None:
            metrics.close()
    if status == _SLEEPS:
        start_over(cpus)
    if not in_order:
        _leave(status)
    return status


def _nothing() -> None:
    """There is nothing to end yet."""


def _attributes(config: MoebiusConfig) -> dict[str, int]:
    return {"moebius.rank": config.parallel.rank}


def _run(config: MoebiusConfig, state: ProcessState, watch: LoopWatch) -> tuple[int, bool]:
    if config.parallel.rank > 0:
        return run_follower(config, state), True
    return uvloop.run(_serve(config, state, watch))


def _is_alone(config: MoebiusConfig) -> bool:
    """Returns whether everything was closed after a failure; ranks of a group can only be closed together."""
    return config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size == 1


def _leave(status: int) -> NoReturn:
    """Ends the process now: a thread inside a library would abort it if Python's end met it there."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def make_server(
    servicer: EngineServicer,
    address: str,
    min_ping_interval_ms: int = MIN_PING_INTERVAL_MS,
    reflect: bool = False,
) -> tuple[grpc.aio.Server, HealthReport, int]:
    """Returns a server with engine, health and, if `reflect`, reflection: bound but not started; and its
    port.

    Raises UserError when the address cannot be bound.
    """
    options = [
        ("grpc.max_receive_message_length", _MESSAGE_BYTES),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", min_ping_interval_ms),
    ]
    server = grpc.aio.server(interceptors=[RefuseUndecodableAsync()], options=options)
    engine_pb2_grpc.add_EngineServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    add_vllm = vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server
    add_vllm(VllmEngineServicer(servicer), server)  # type: ignore[no-untyped-call]
    report = HealthReport(server, [VLLM_SERVICE_NAME])
    if reflect:
        enable_reflection(server, SERVICE_NAME, VLLM_SERVICE_NAME)
    try:
        port = listen(server, address)
    except RuntimeError as error:
        raise UserError(f"gpu_address: cannot listen on {address!r}: {error}") from error
    return server, report, port


class _Signals:
    """SIGTERM and SIGINT: the first one asks for the end, the second one for a quick end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.stop, self.hurry = asyncio.Event(), asyncio.Event()
        # Nothing is left to be done but to close: a further signal ends the process.
        self.closing = False
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self.closing:
            _leave(1)
        (self.hurry if self.stop.is_set() else self.stop).set()


async def _serve(config: MoebiusConfig, state: ProcessState, watch: LoopWatch) -> tuple[int, bool]:
    """Returns the exit status, and whether everything was closed."""
    loop = asyncio.get_running_loop()
    beating = asyncio.create_task(watch.beat())
    signals = _Signals(loop)
    servicer = EngineServicer(make_sleep(config))
    server, report, _ = make_server(
        servicer, config.gpu.gpu_address, reflect=config.telemetry.grpc_reflection
    )
    report.state = state
    export_sleep(servicer.sleep, _model_name(config))
    loaded = await _loaded(config, servicer.sleep, server, report, signals)
    if loaded is None:
        return 0, False
    built, telemetry, info = loaded
    router = OutputRouter(loop)
    built.engine.on_output = router.on_output
    bounds = Bounds(built.model_config.vocab_size, built.context_limit, config.gpu.random_seed)
    preparer = None if built.vision is None else built.vision.preparer
    live = make_live_experts(config, built)
    profiler = _make_profiler(config, built, telemetry, has_experts=live is not None)
    servicer.service = Service(
        *(built.engine, router, telemetry, bounds, info, config.gpu.page_size, built.recorder),
        *(preparer, live, built.compiler, profiler, identity_digest(info.identity)),
        *(built.page_bytes, built.tiers),
    )
    readiness = Readiness(report, built.engine, built.experts, built.watch)
    servicer.problem = lambda: readiness.problem
    built.engine.on_lost = lambda reason: _set_from_thread(loop, readiness.lost)
    give_back_memory()
    collect_rarely()
    _log.info(
        "ready",
        address=config.gpu.gpu_address,
        model=info.served_model_name,
        identity=servicer.service.model_identity,
        phases=take_phases(),
    )
    servicer.sleep.loaded()
    built.serves()
    tasks = [beating, asyncio.create_task(readiness.watch())]
    tasks.append(asyncio.create_task(servicer.sleep.watch_idleness(info, lambda: servicer.running > 0)))
    sleeps = await _until_end(servicer, built, readiness, signals, config.supervisor.stop_timeout_s)
    signals.closing = True
    servicer.end_streams()
    await server.stop(_LAST_WORDS_S)
    for task in tasks:
        task.cancel()
    if live is not None:
        await live.close()
    if readiness.lost.is_set():
        # Nothing of the device can be closed in order; the supervisor starts this process again.
        return 1, False
    in_order = await asyncio.to_thread(built.close, _LAST_STEP_S)
    if not in_order:
        _log.warning("a step is still computing: leaving without its end", seconds=_LAST_STEP_S)
    elif sleeps:
        await asyncio.to_thread(keep_experts, config, built)
    return _SLEEPS if sleeps else 0, in_order


async def _loaded(
    config: MoebiusConfig,
    sleep: EngineSleep,
    server: grpc.aio.Server,
    report: HealthReport,
    signals: _Signals,
) -> _Loaded | None:
    """Starts the server and returns the loaded model, once it is wanted; None: a signal came first.

    Health says that a sleeping engine serves, also while it wakes: a request sent then is answered.
    """
    stopping, ahead = asyncio.create_task(signals.stop.wait()), None
    if sleep.resume():
        await report.set(True)
        await server.start()
        _log.info("asleep")
        ahead = AheadOfWake(config)
        waking = asyncio.create_task(sleep.waking.wait())
        await asyncio.wait((waking, stopping), return_when=asyncio.FIRST_COMPLETED)
        if signals.stop.is_set():
            await server.stop(0)
            return None
        ahead.wake()
        sleep.mark.clear()
        end_imports()
        _log.info("waking up")
    else:
        note_imports()
        await report.set(False, why="still loading")
        await server.start()
    begin = time.monotonic()
    loading = _start_loading(config, asyncio.get_running_loop(), ahead)
    await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
    interrupted = not loading.done()
    stopping.cancel()
    if interrupted or loading.exception() is not None:
        await server.stop(0)  # a server dropped while it runs would complain of its closed event loop
    if interrupted:
        _log.info("stopped while loading")
        return None
    loaded = loading.result()
    if ahead is not None:
        ahead.forget()
    # Phases, some of which run beside others, are in the line with which the engine becomes ready.
    _log.info("loaded", seconds=round(time.monotonic() - begin, 3))
    return loaded


async def _until_end(
    servicer: EngineServicer, built: Built, readiness: Readiness, signals: _Signals, timeout_s: float
) -> bool:
    """Serves until a signal, a loss or sleep, and lets running calls end; returns whether it is sleep."""
    events = (signals.stop, readiness.lost, servicer.sleep.wanted)
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()

    def ends() -> bool:
        return signals.stop.is_set() or readiness.lost.is_set()

    if not ends() and await fall_asleep(servicer, built.tiers, ends):
        return True
    servicer.sleep.mark.clear()
    await drain(servicer, readiness, timeout_s, signals.hurry)
    return False


async def fall_asleep(servicer: EngineServicer, tiers: PrefixTiers | None, ends: Callable[[], bool]) -> bool:
    """Refuses new calls and returns when the running ones have ended and lower tiers have their prefixes.

    False: `ends` came first. Calls are ended by force only.
    """
    service, sleep = servicer.service, servicer.sleep
    assert service is not None, "it is served"
    servicer.draining = True
    _log.info("falling asleep", running=servicer.running, force=sleep.force)
    copied_by = None
    while servicer.running or not (tiers is None or tiers.is_copied):
        if ends():
            return False
        if servicer.running and sleep.force:
            service.router.end_all(FORCED)
        elif not servicer.running:
            copied_by = copied_by or time.monotonic() + _COPY_S
            if time.monotonic() > copied_by:
                break
        await asyncio.sleep(_POLL_S)
    sleep.quiet.set()
    return True


def _make_profiler(
    config: MoebiusConfig, built: Built, telemetry: EngineTelemetry, has_experts: bool
) -> EngineProfiler:
    return EngineProfiler(
        config.experts.expert_addresses if has_experts else (),
        built.experts,
        built.model_config.num_layers,
        lambda: telemetry.steps,
        lambda: 0 if built.streamer is None else built.streamer.ring.operations,
    )


async def drain(
    servicer: EngineServicer, readiness: Readiness, timeout_s: float, hurry: asyncio.Event
) -> None:
    """Refuses new calls and returns when the running ones have ended, by themselves or with UNAVAILABLE.

    They are ended after `timeout_s`, by `hurry`, and at once when no step can be computed: a lost expert
    server may be going away like this process.
    """
    servicer.draining = True
    await readiness.drain()
    _log.info("draining", running=servicer.running, timeout_s=timeout_s)
    deadline = time.monotonic() + timeout_s
    while servicer.running and time.monotonic() < deadline:
        if hurry.is_set() or readiness.problem or readiness.lost.is_set():
            break
        await asyncio.sleep(_POLL_S)
    if servicer.running and servicer.service is not None:
        _log.warning("calls are ended before their outputs have", calls=servicer.running)
        servicer.service.router.end_all("the engine is shutting down")


def _set_from_thread(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is gone when the process is stopping
        loop.call_soon_threadsafe(event.set)


def _start_loading(
    config: MoebiusConfig, loop: asyncio.AbstractEventLoop, ahead: AheadOfWake | None
) -> asyncio.Future[_Loaded]:
    """Loads in a daemon thread: a load cannot be interrupted, so it must not outlive a SIGTERM."""
    future: asyncio.Future[_Loaded] = loop.create_future()

    def settle(outcome: concurrent.futures.Future[_Loaded]) -> None:
        error = outcome.exception()
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(outcome.result())

    def load() -> None:
        outcome: concurrent.futures.Future[_Loaded]
        outcome = concurrent.futures.Future()
        try:
            outcome.set_result(_load(config, ahead))
        except BaseException as error:  # it is raised again in the event loop
            outcome.set_exception(error)
        with contextlib.suppress(RuntimeError):  # the loop is gone when the process is stopping
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=load, name="load", daemon=True).start()
    return future


def _model_name(config: MoebiusConfig) -> str:
    return config.model.served_model_name or served_name(Path(config.model.model).resolve())


def _load(config: MoebiusConfig, ahead: AheadOfWake | None = None) -> _Loaded:
    """Everything slow, off the event loop, so that health checks are answered meanwhile."""
    name = _model_name(config)
    metrics = EngineMetrics(name)
    telemetry = EngineTelemetry(metrics, config.telemetry.expert_span_ratio)
    gate = WarmUpGate()
    built = build_engine(config, telemetry, gate.on_output, ahead)
    try:
        info = model_info(config, built)
        _warm_up(config, built, gate, metrics, name)
    except BaseException:
        # Alone: other ranks would take it for an end in order, and hide this cause with theirs.
        if _is_alone(config):
            built.close()
        raise
    telemetry.enabled = True
    return built, telemetry, info


def _warm_up(
    config: MoebiusConfig, built: Built, gate: WarmUpGate, metrics: EngineMetrics, name: str
) -> None:
    """The engine's first steps. Raises UserError when they do not end well."""
    gpu = config.gpu
    metrics.describe_cache(gpu.page_size, built.num_pages, gpu.prefix_caching, built.context_limit)
    metrics.describe_limits(built.engine.scheduler.limits.max_num_seqs)
    if built.self_test is not None:
        metrics.describe_self_test(built.self_test.worst_by_layer)
    built.engine.start()
    timeout_s = config.supervisor.ready_timeout_s
    gate.run(built.engine, built.model_config.vocab_size, timeout_s, built.warm_up_tokens)
    if built.recorder is not None and config.placement.expert_recorder != "off":
        # What the warm-up chose is no request's.
        built.recorder.start(config.placement.expert_recorder)
    built.group.serving()
    built.memory.seal()
    if built.memory.ledger is not None:
        export(built.memory.ledger, name)
    if built.placement is not None:
        placement_metrics.export(built.placement, name)
    export_figures(share_figures(built.memory_shares), name, REGISTRY)
    if built.elastic is not None:
        export_figures(built.elastic.figures, name, REGISTRY)
    if built.tiers is not None:
        export_figures(built.tiers.figures, name, REGISTRY)
    if built.fetcher is not None:
        fetch_metrics.export(built.fetcher, name)
    if built.check is not None:
        # First steps compile and load.
        built.check.forget()
        step_check.export(built.check, name)
    if built.watch is not None:
        watch_metrics.export(built.watch, name)


def run_follower(config: MoebiusConfig, state: ProcessState) -> int:
    """Runs a rank that serves no client: it repeats what rank 0 does until rank 0 ends.

    Loads this rank's part and runs it to the end; returns the exit status. `state` says when it has loaded.

    A group that is lost ends the process from within (`parallel.join.end_process`). While the engine sleeps
    this waits, and when it falls asleep `_SLEEPS` is returned.
    """
    rank, mark = config.parallel.rank, SleepMark(config.model.sleep_file)
    ahead = None
    if mark.exists:
        ahead = AheadOfWake(config)
        while mark.exists:
            time.sleep(_POLL_S)
        ahead.wake()
        end_imports()
    else:
        note_imports()
    built = build_engine(config, NullObserver(), lambda deltas: None, ahead)
    if ahead is not None:
        ahead.forget()

    # What a handler does may interrupt itself, so it takes no locks: another thread does the work.
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()

    def stop() -> None:
        # Alone it cannot leave in order: the others would wait for it.
        built.group.fail(f"stopped by {signal.Signals(signals.get()).name}")

    threading.Thread(target=stop, name="stop", daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: signals.put(number))
    built.engine.start()
    state.not_ready = ""
    _log.info("ready", rank=rank, phases=take_phases())
    # Returns when rank 0 has sent the end.
    built.engine.join()
    built.close()
    if not mark.exists:
        return 0
    keep_experts(config, built)
    return _SLEEPS
