"""Whether a request would be answered now, and if not, why: looked at all the time, for probes and calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from gpu_service.engine.engine import Engine
from gpu_service.experts.client import ExpertClient
from gpu_service.experts.resident.watch import ResidentWatch
from moebius.process.operations import NOT_READY_METADATA, ProcessState
from protos import engine_pb2 as pb

_log = structlog.get_logger(__name__)
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Engine"].full_name
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_LOOK_EVERY_S = 0.5
# Of a reason in an answer's metadata, bytes: there is a limit to all of it together.
_MOST_REASON = 2048


class _ExplainedHealth(health.aio.HealthServicer):  # type: ignore[misc]
    """The standard service, whose answers also bring the reason in their trailing metadata."""

    # Why a request sent now would not be answered; empty: it would.
    not_ready = ""

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        """Answers as the standard says."""
        if self.not_ready:
            reason = self.not_ready.encode()[:_MOST_REASON]
            context.set_trailing_metadata(((NOT_READY_METADATA, reason),))
        return await super().Check(request, context)


class HealthReport:
    """The standard health service: "" says that the process works, the engine service that it would answer.

    A process that still loads, drains or waits for expert servers works: it should not be killed for that.
    """

    def __init__(self, server: grpc.aio.Server, others: Sequence[str] = ()) -> None:
        """`others`: services that serve when the engine's does."""
        self._others = others
        self._servicer = _ExplainedHealth()
        self.state = ProcessState()  # the same for probes over HTTP; set by the server that answers those
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set(self, serving: bool, works: bool = True, why: str = "") -> None:
        """Sets the answer to calls from now on, and to those that watch; `why` it does not serve."""
        self.state.not_ready = "" if serving else why or "not serving"
        self.state.broken = "" if works else why or "the engine has ended"
        self._servicer.not_ready = self.state.not_ready
        await self._servicer.set("", _SERVING if works else _NOT_SERVING)
        for name in (SERVICE_NAME, *self._others):
            await self._servicer.set(name, _SERVING if serving else _NOT_SERVING)


_ENDED = "the engine has ended"


class Readiness:
    """Looks at the engine and its expert servers, also while nothing is computed, and reports changes."""

    def __init__(
        self,
        report: HealthReport,
        engine: Engine,
        experts: ExpertClient | None,
        watch: ResidentWatch | None = None,
        look_every_s: float = _LOOK_EVERY_S,
    ) -> None:
        self._report = report
        self._engine = engine
        self._experts, self._watch = experts, watch
        self._look_every_s = look_every_s
        self._draining = False
        # Why a request sent now would have to wait, or could not be computed at all; empty: it would not.
        self.problem = ""
        # Set when the engine computes nothing any more, after health says so.
        self.lost = asyncio.Event()

    async def watch(self) -> None:
        """Never returns; until it is cancelled, health follows what it finds."""
        await self._tell()
        while True:
            problem = await asyncio.to_thread(self._look)
            if problem != self.problem:
                self.problem = problem
                if problem:
                    _log.warning("not ready", reason=problem)
                else:
                    _log.info("ready again")
                await self._tell()
            if problem == _ENDED:  # of the same look: a waiting caller finds what health says already
                self.lost.set()
            await asyncio.sleep(self._look_every_s)

    async def drain(self) -> None:
        """Makes the process not ready from now on, whatever else is well."""
        self._draining = True
        await self._tell()

    async def _tell(self) -> None:
        ready = not self.problem and not self._draining
        why = self.problem or ("shutting down" if self._draining else "")
        await self._report.set(ready, works=self._engine.is_alive, why=why)

    def _look(self) -> str:
        if not self._engine.is_alive:
            return _ENDED
        problem = "" if self._experts is None else self._experts.problem()
        if not problem and self._watch is not None:
            problem = self._watch.problem
        if not problem and self._engine.is_recovering:
            problem = "steps wait for lost expert servers"
        return problem
