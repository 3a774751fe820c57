"""The expert process: `moebius expert`."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent import futures
from types import FrameType
from typing import TYPE_CHECKING

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from expert_service.errors import LoadCancelled
from expert_service.host import ExpertHost, LoadSettings
from expert_service.mailbox_service import FirstCall, MailboxService, Standstill
from expert_service.placement import place_process
from expert_service.segment import find_load_record
from expert_service.servicer import ExpertServicer
from expert_service.spans import SpanRecorder
from moebius.config import MoebiusConfig
from moebius.errors import StartupError, UserError, WrongIdentity
from moebius.experts.slices import SliceRequest
from moebius.kernels.weight_segment import segment_path
from moebius.mailbox import IdentityMismatch, MailboxError
from moebius.mailbox.plan import grpc_message_bytes, mailbox_names
from moebius.models.geometry import MoeGeometry
from moebius.network.grpc_channels import listen
from moebius.network.grpc_refusal import RefuseUndecodable
from moebius.network.tls import configure_tls
from moebius.process.memory import give_back_memory
from moebius.process.progress import note_imports, take_phases
from moebius.process.wakeup import Wakeup
from moebius.telemetry import configure_logging, configure_tracing, enable_reflection, export_metrics
from protos import expert_pb2, expert_pb2_grpc

if TYPE_CHECKING:
    from moebius.process.operations import ProcessState

SERVICE = expert_pb2.DESCRIPTOR.services_by_name["Expert"].full_name
# Each open Compute stream holds a thread; the control calls and health watches need some as well.
GRPC_THREADS = 32
GRPC_GRACE_S = 1.0
POLL_S = 1.0

log = structlog.get_logger(__name__)


class RejectedByEngine(UserError):
    """The weights are right, but results computed with them are not: a new process may work."""

    exit_status = 1


class ExpertProcess:
    """The process's parts and lifetime: listen, load, serve, drain."""

    def __init__(self, config: MoebiusConfig) -> None:
        self._config = config
        self._stop = Wakeup()
        # A second signal: outstanding requests are no longer finished.
        self._skips_drain = False
        experts = config.experts
        placement = place_process(experts)
        self._spans = SpanRecorder(
            {"moebius.expert.server": experts.split_index, "moebius.expert.numa_node": placement.numa_node}
        )
        self._mailbox = MailboxService(config, self._spans)
        settings = LoadSettings(
            experts.max_requantise_error,
            experts.calibrate_kernels,
            experts.batch_invariant_experts,
            experts.expert_weights_dir,
            config.model.identity_file,
            experts.verify_interval_s,
            self._slot_bytes(),
        )
        self._serving = False
        self._is_stuck = False
        self._host = ExpertHost(
            placement,
            self._mailbox.attach,
            self._on_loaded,
            settings,
            self._mailbox.beat,
            self._mailbox.note_damage,
            self._mailbox.note_problem,
        )
        self._health = health.HealthServicer()
        self._server = self._make_server()

    def _slot_bytes(self) -> int:
        """Returns `LoadSettings.slot_bytes`. Raises StartupError for settings that do not say enough."""
        experts = self._config.experts
        if experts.cold_experts != "disk":
            return 0
        if not experts.expert_weights_dir or not experts.expert_memory_gib:
            raise StartupError(
                "cold_experts: disk needs a directory (--expert-weights-dir) and how much RAM holds some "
                "experts (--expert-memory-gib)"
            )
        return int(experts.expert_memory_gib * 2**30)

    def _make_server(self) -> grpc.Server:
        """Returns the server; health reports that the process lives, and does not serve yet."""
        limit = grpc_message_bytes(self._geometry())
        bounds = [("grpc.max_receive_message_length", limit), ("grpc.max_send_message_length", limit)]
        threads = futures.ThreadPoolExecutor(GRPC_THREADS)
        server = grpc.server(threads, options=bounds, interceptors=[RefuseUndecodable()])
        servicer = ExpertServicer(self._host, self._spans, self._drain)
        register: Callable[..., None] = expert_pb2_grpc.add_ExpertServicer_to_server
        register(servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._config.telemetry.grpc_reflection:
            enable_reflection(server, SERVICE)
        self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        self._health.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
        return server

    def _geometry(self) -> MoeGeometry | None:
        """Returns the geometry of a predecessor or the configuration; None: the model comes with `Load`."""
        settings, experts = self._config.model, self._config.experts
        if not settings.model:
            return None
        if experts.expert_weights_dir:
            path = segment_path(experts.expert_weights_dir, experts.split_index)
            request = SliceRequest.from_config(self._config)
            record = find_load_record(path, request, experts.batch_invariant_experts)
            if record is not None:
                return record.model
        # Imported here, since it is slow, and the restart of a process has to be fast.
        from moebius.models.served import read_served_geometry

        return read_served_geometry(self._config)

    def run(self) -> int:
        """Runs until SIGTERM, SIGINT or the mailbox's shutdown; returns the process's exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        experts = self._config.experts
        host = self._config.telemetry.metrics_host
        metrics = None
        if experts.expert_metrics_port:
            from expert_service.metrics import make_registry
            from moebius.process.operations import Answers, registry_text, start_operations

            registry = make_registry(self._host)
            answers = Answers(lambda: registry_text(registry), self._process_state)
            allowed = self._config.gateway.allowed_hosts
            metrics = start_operations(experts.expert_metrics_port, host, answers, allowed)
        end_metrics = self._export_metrics()
        self._listen(experts.expert_address)
        try:
            note_imports()
            if self._config.model.model:
                self._host.load(SliceRequest.from_config(self._config))
            self._serve()
        except LoadCancelled:
            log.info("stopped while loading")
        except IdentityMismatch as error:
            raise WrongIdentity(f"{error}. Restart all processes to serve what is there now") from error
        except (MailboxError, ValueError) as error:
            raise StartupError(str(error)) from error
        finally:
            self._shut_down()
            end_metrics()
            if metrics is not None:
                metrics.close()
        return 0

    def _export_metrics(self) -> Callable[[], None]:
        """Exports metrics over OTLP, if configured; returns the function that ends it."""
        settings = self._config.telemetry
        if not settings.otlp_endpoint:
            return lambda: None
        from expert_service.metrics import make_registry

        collect = make_registry(self._host).collect
        return export_metrics(settings, "moebius-expert", collect, self._spans.attributes)

    def _process_state(self) -> ProcessState:
        """Returns the health service's state, for probes over HTTP."""
        from moebius.process.operations import ProcessState

        not_ready = self._host.problem if self._serving else "still loading, or draining"
        return ProcessState(not_ready, "the serve loop stands still" if self._is_stuck else "")

    def _listen(self, address: str) -> None:
        try:
            port = listen(self._server, address)
        except RuntimeError as error:
            raise StartupError(f"cannot listen on {address} (--expert-address)") from error
        self._server.start()
        log.info("listening", address=address, port=port)

    def _on_loaded(self) -> None:
        loaded = self._host.loaded
        give_back_memory()
        self._mailbox.start()
        self._health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        self._serving = True
        if loaded is not None:
            log.info(
                "experts loaded",
                experts=[loaded.part.expert_begin, loaded.part.expert_end],
                intermediate=[loaded.part.intermediate_begin, loaded.part.intermediate_end],
                format=loaded.weight_format,
                packed_bytes=loaded.engine.packed_bytes,
                seconds=round(loaded.seconds, 3),
                phases=take_phases(),
                isa=loaded.engine.isa,
                threads=loaded.engine.num_threads,
            )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # A handler runs between two bytecodes of the main thread, so it must not take locks.
        self._host.cancel_load()
        self._skips_drain = self._stop.is_set()
        self._stop.set()

    def _serve(self) -> None:
        limit_s = self._config.supervisor.hang_timeout_s
        standstills = {name: Standstill(limit_s) for name in mailbox_names(self._config)}
        first_call = FirstCall(self._config.experts.mailbox)
        while not self._stop.wait(POLL_S) and not self._mailbox.has_ended:
            self._mailbox.record_spans()
            self._spans.flush()
            first_call.look(self._mailbox.awaits_first_call)
            progress = self._mailbox.progress
            lasting = [name for name, still in standstills.items() if still.lasts(progress.get(name))]
            if lasting:
                # Reports failure, so that a kubelet's liveness probe restarts the process.
                log.error("a serve loop stands still", mailboxes=lasting, hang_timeout_s=limit_s)
                self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
                self._is_stuck = True
        if self._mailbox.rejection:
            raise RejectedByEngine(f"the engine has sent this server away: {self._mailbox.rejection}")

    def _drain(self, timeout_s: float | None) -> bool:
        """Drains both transports; None waits without a limit."""
        self._serving = False
        self._health.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
        begin = time.monotonic()
        idle = self._host.drain(timeout_s)
        while timeout_s is None:
            if self._mailbox.drain(POLL_S):
                return True
        return idle and self._mailbox.drain(max(0.0, timeout_s - (time.monotonic() - begin)))

    def _shut_down(self) -> None:
        deadline = time.monotonic() + self._config.supervisor.stop_timeout_s
        while not (idle := self._drain(POLL_S / 4)):
            if self._skips_drain or time.monotonic() > deadline:
                break
        self._mailbox.stop()
        # A call that ended at an invalid message stays registered in gRPC: its end would never come.
        self._server.stop(GRPC_GRACE_S).wait(2 * GRPC_GRACE_S)
        self._mailbox.record_spans()
        self._spans.flush(0)
        log.info("stopped", idle=idle)


def run(config: MoebiusConfig) -> int:
    """Serves one slice of the experts until a signal or the mailbox ends it. Call from the main thread.

    Without a model the process waits for `Expert.Load`. Returns the exit status 0; raises StartupError
    when the address is taken, the checkpoint is unusable or the mailbox does not fit, WrongIdentity when it
    would compute something else than its predecessor or its neighbours, RejectedByEngine.
    """
    name = f"expert-{config.experts.split_index}"
    configure_logging(config.telemetry, name)
    tracing = configure_tracing(config.telemetry, "moebius-expert")
    try:
        configure_tls(config.security)
        try:
            process = ExpertProcess(config)
        except ValueError as error:
            raise StartupError(str(error)) from error
        return process.run()
    finally:
        tracing.shutdown()
