"""Serves mailboxes besides gRPC, with the same engine, when the configuration names one.

Each engine with requests of its own has a mailbox (`parallel.data_parallel_size`), and each mailbox a loop
here. One request is computed at a time, with all threads: what two engines ask for at once has its turn.
"""

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
from moebius.mailbox.plan import mailbox_geometry, mailbox_names
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
        self._servers: tuple[MailboxServer, ...] = ()
        self._engine: ExpertEngine | None = None
        self._started = False
        self._lock = threading.Lock()

    def attach(self, engine: ExpertEngine, model: MoeGeometry, request: SliceRequest, identity: str) -> None:
        """Checks geometry and identity and claims the index of each mailbox; does nothing without one.

        A mailbox that does not exist yet is created: an engine may take minutes until it needs it.
        Raises MailboxError naming what differs.
        """
        index, servers = request.split_index, []
        for name in mailbox_names(self._config):
            opened = open_mailbox(name, mailbox_geometry(self._config, model))
            servers.append(
                MailboxServer(name, index, engine.backend, num_threads=engine.num_threads, identity=identity)
            )
            del opened  # held until here, so that others did not replace it as a leftover
            log.info("mailbox attached", mailbox=name, server_index=index)
        with self._lock:
            self._servers = tuple(servers)
            self._engine = engine

    def beat(self) -> None:
        """Signals life while weights are read; from any thread."""
        for server in self._servers:
            server.beat()

    def note_damage(self) -> None:
        """Notifies the engines of an expert that is damaged; from any thread."""
        for server in self._servers:
            server.note_damage()

    def note_problem(self, problem: str) -> None:
        """Notifies the engines why not all requested experts are computed; empty: all are. Any thread."""
        for server in self._servers:
            server.note_problem(problem)

    def start(self) -> None:
        """Starts answering, outstanding requests of a dead predecessor first.

        Raises IdentityMismatch if the predecessor had packed other weights.
        """
        with self._lock:
            if self._servers and self._engine is not None:
                for server in self._servers:
                    server.start(self._engine.weights_digest)
                self._started = True

    def drain(self, timeout_s: float) -> bool:
        """Finishes outstanding requests, then leaves; returns False if still busy after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        servers = self._servers if self._started else ()
        idle = [server.drain(max(0.0, deadline - time.monotonic())) for server in servers]
        return all(idle)

    def stop(self) -> None:
        """Leaves after the request being computed; unanswered ones stay for a successor."""
        for server in self._servers:
            server.stop()

    @property
    def has_ended(self) -> bool:
        """Returns whether a serve loop ended by itself: a mailbox was shut down, or a client rejected it."""
        return self._started and any(not server.is_running for server in self._servers)

    @property
    def progress(self) -> dict[str, int]:
        """Returns by mailbox a counter that stops only if the loop that serves it does."""
        if not self._started:
            return {}
        return {
            server.mailbox_name: server_health(server.mailbox_name)[server.server_index].progress
            for server in self._servers
        }

    @property
    def awaits_first_call(self) -> bool:
        """Whether it serves mailboxes none of whose engines has called yet, or is there yet.

        It is unknown for a process that replaced another: its engine may have nothing to compute.
        """
        if not self._servers or not self._started or self._servers[0].generation > 1:
            return False
        healths = (server_health(server.mailbox_name)[server.server_index] for server in self._servers)
        return all(health.calls == 0 for health in healths)

    @property
    def rejection(self) -> str:
        """Returns why a client rejected this server; empty: none did."""
        return next((server.rejection for server in self._servers if server.rejection), "")

    def record_spans(self) -> None:
        """Passes sampled requests to the recorder."""
        calls = [call for server in self._servers for call in server.take_traced_calls()]
        for call in calls:
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
