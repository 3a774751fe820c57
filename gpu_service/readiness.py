"""Whether a request sent now would be answered, as the health service reports it."""

from __future__ import annotations

import asyncio

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from gpu_service.engine.engine import Engine
from gpu_service.experts.client import ExpertClient
from protos import engine_pb2

_log = structlog.get_logger(__name__)
SERVICE_NAME = engine_pb2.DESCRIPTOR.services_by_name["Engine"].full_name
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_LOOK_EVERY_S = 0.5


class HealthReport:
    """The standard health service: "" says that the process works, the engine service that it would answer.

    A process that still loads, drains or waits for expert servers works: nobody should kill it for that.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self._servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set(self, serving: bool, works: bool = True) -> None:
        """What whoever asks from now on, and whoever watches, gets as an answer."""
        await self._servicer.set("", _SERVING if works else _NOT_SERVING)
        await self._servicer.set(SERVICE_NAME, _SERVING if serving else _NOT_SERVING)


class Readiness:
    """Looks at the engine and its expert servers, also while nothing is computed, and reports changes."""

    def __init__(
        self,
        report: HealthReport,
        engine: Engine,
        experts: ExpertClient | None,
        look_every_s: float = _LOOK_EVERY_S,
    ) -> None:
        self._report = report
        self._engine = engine
        self._experts = experts
        self._look_every_s = look_every_s
        self._draining = False
        # Why a request sent now would have to wait, or could not be computed at all; empty: it would not.
        self.problem = ""
        # Set when the engine computes nothing any more.
        self.lost = asyncio.Event()

    async def watch(self) -> None:
        """Never returns; until it is cancelled, health follows what it finds."""
        await self._tell()
        while True:
            problem = await asyncio.to_thread(self._look)
            if not self._engine.is_alive:
                self.lost.set()
            if problem != self.problem:
                self.problem = problem
                if problem:
                    _log.warning("not ready", reason=problem)
                else:
                    _log.info("ready again")
                await self._tell()
            await asyncio.sleep(self._look_every_s)

    async def drain(self) -> None:
        """Not ready from now on, whatever else is well."""
        self._draining = True
        await self._tell()

    async def _tell(self) -> None:
        ready = not self.problem and not self._draining
        await self._report.set(ready, works=self._engine.is_alive)

    def _look(self) -> str:
        if not self._engine.is_alive:
            return "the engine has ended"
        problem = "" if self._experts is None else self._experts.problem()
        if not problem and self._engine.is_recovering:
            problem = "steps wait for lost expert servers"
        return problem
