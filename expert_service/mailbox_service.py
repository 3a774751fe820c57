"""Serves the mailbox besides gRPC, with the same engine, when the configuration names one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

from expert_service.spans import Call, SpanRecorder
from moebius.config import MoebiusConfig
from moebius.experts.slices import SliceRequest
from moebius.kernels import ExpertEngine
from moebius.mailbox import MailboxServer, open_mailbox, server_health
from moebius.mailbox.plan import mailbox_geometry
from moebius.models.geometry import MoeGeometry

log = structlog.get_logger(__name__)


class Standstill:
    """Detects a counter that has not moved for too long although it should always move."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is in seconds."""
        self.limit_s = limit_s
        self._clock = clock
        self._progress: int | None = None
        self._moved_at = clock()

    def lasts(self, progress: int | None) -> bool:
        """Returns whether that is so, at this check; None: nothing is counted yet."""
        if progress is None or progress != self._progress:
            self._progress, self._moved_at = progress, self._clock()
        return self._clock() - self._moved_at > self.limit_s


class FirstCall:
    """Logs every ten seconds that no call has arrived yet, to explain why nothing happens."""

    EVERY_S = 10.0

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`name`: of the mailbox; `clock` is in seconds."""
        self._name, self._clock = name, clock
        self._begin = self._logged_at = clock()

    def look(self, is_awaited: bool) -> None:
        """Checks once; called more often than every ten seconds."""
        now = self._clock()
        if is_awaited and now - self._logged_at >= self.EVERY_S:
            self._logged_at = now
            waited_s = round(now - self._begin)
            log.info("waiting for an engine's first call", mailbox=self._name, waited_s=waited_s)


class MailboxService:
    """Claims this server's index before weights are read ("loading"), answers once they are ("ready")."""

    def __init__(self, config: MoebiusConfig, spans: SpanRecorder) -> None:
        self._config = config
        self._spans = spans
        self._server: MailboxServer | None = None
        self._engine: ExpertEngine | None = None
        self._started = False
        self._lock = threading.Lock()

    def attach(self, engine: ExpertEngine, model: MoeGeometry, request: SliceRequest, identity: str) -> None:
        """Checks geometry and identity and claims the index; does nothing without a configured mailbox.

        A mailbox that does not exist yet is created: an engine may take minutes until it needs it.
        Raises MailboxError naming what differs.
        """
        name = self._config.experts.mailbox
        if not name:
            return
        opened = open_mailbox(name, mailbox_geometry(self._config, model))
        server = MailboxServer(
            name, request.split_index, engine.backend, num_threads=engine.num_threads, identity=identity
        )
        del opened  # held until here, so that others did not replace it as a leftover
        with self._lock:
            self._server = server
            self._engine = engine
        log.info("mailbox attached", mailbox=name, server_index=request.split_index)

    def beat(self) -> None:
        """Signals life while weights are read; from any thread."""
        if self._server is not None:
            self._server.beat()

    def note_damage(self) -> None:
        """Notifies the engine of an expert that is damaged; from any thread."""
        if self._server is not None:
            self._server.note_damage()

    def note_problem(self, problem: str) -> None:
        """Notifies the engine why not all requested experts are computed; empty: all are. From any thread."""
        if self._server is not None:
            self._server.note_problem(problem)

    def start(self) -> None:
        """Starts answering, outstanding requests of a dead predecessor first.

        Raises IdentityMismatch if the predecessor had packed other weights.
        """
        with self._lock:
            if self._server is not None and self._engine is not None:
                self._server.start(self._engine.weights_digest)
                self._started = True

    def drain(self, timeout_s: float) -> bool:
        """Finishes outstanding requests, then leaves; returns False if still busy after `timeout_s`."""
        return self._server is None or not self._started or self._server.drain(timeout_s)

    def stop(self) -> None:
        """Leaves after the request being computed; unanswered ones stay for a successor."""
        if self._server is not None:
            self._server.stop()

    @property
    def has_ended(self) -> bool:
        """Returns whether the serve loop ended by itself: the mailbox was shut down, or a client
        rejected it.
        """
        return self._started and self._server is not None and not self._server.is_running

    @property
    def progress(self) -> int | None:
        """A counter that stops only if the serve loop does; None: no mailbox is served."""
        if self._server is None or not self._started:
            return None
        return server_health(self._server.mailbox_name)[self._server.server_index].progress

    @property
    def awaits_first_call(self) -> bool:
        """Whether it serves a mailbox whose engine has not called yet, or is not there yet.

        It is unknown for a process that replaced another: its engine may have nothing to compute.
        """
        server = self._server
        if server is None or not self._started or server.generation > 1:
            return False
        return server_health(server.mailbox_name)[server.server_index].calls == 0

    @property
    def rejection(self) -> str:
        """Returns why a client rejected this server; empty: none did."""
        return "" if self._server is None else self._server.rejection

    def record_spans(self) -> None:
        """Passes sampled requests to the recorder."""
        if self._server is None:
            return
        for call in self._server.take_traced_calls():
            self._spans.add(
                Call(
                    trace_id=int.from_bytes(call.trace_id, "big"),
                    span_id=int.from_bytes(call.span_id, "big"),
                    layer=call.layer,
                    rows=call.rows,
                    start_unix_ns=call.start_unix_ns,
                    duration_ns=call.duration_ns,
                    transport="mailbox",
                )
            )
