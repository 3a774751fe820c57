"""One of several gateway processes: `python -m gateway.workers.member`, its channel as standard input.

It sends a heartbeat each second, which a process with a blocked event loop cannot do, and its state.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import struct
import sys
from typing import Any

import uvloop
from prometheus_client import CollectorRegistry

from gateway.app.server import GatewayServer, server_for
from gateway.processes.shared import KeyTable, Places, Shared
from gateway.telemetry.combined import Samples, samples_of
from gateway.workers.channel import HEARTBEAT_S, Channel, ChannelClosed, Heartbeat, MemberSetup, bound_socket
from moebius.errors import UserError, WrongIdentity
from moebius.network.tls import configure_tls
from moebius.process.garbage import collect_rarely
from moebius.telemetry import configure_logging, configure_tracing, export_metrics

_SAMPLES_EVERY = 5  # beats: later counts are lost with a killed process


class Member:
    """One serving process."""

    def __init__(self, setup: MemberSetup) -> None:
        self._channel = Channel(self._answer)
        places = Places(setup.count, setup.index, setup.places)
        keys = KeyTable(setup.count, setup.index, setup.places)
        self._server: GatewayServer = server_for(
            setup.config,
            Shared(
                places, keys, self._all_metrics, self._why_not_ready, setup.listens_when_ready, setup.files
            ),
        )
        self._setup = setup

    @property
    def registry(self) -> CollectorRegistry:
        """The registry of this process's metrics."""
        return self._server.metrics.registry

    async def run(self, connection: socket.socket) -> int:
        """Serves until a signal, or until the first process has ended. Returns the exit code."""
        talking = asyncio.create_task(self._talk(connection))
        beating = asyncio.create_task(self._beat())
        try:
            gateway = self._setup.config.gateway
            await self._server.serve([bound_socket(gateway.host, gateway.port)])
            with contextlib.suppress(ChannelClosed):
                if self._server.broken is not None:
                    # A process that was never ready has no effect on those that are.
                    is_own = isinstance(self._server.broken, WrongIdentity) and not self._server.is_ready
                    await self._channel.ask("refused" if is_own else "broken", self._server.broken)
                await self._channel.ask("leaving", samples_of(self._server.metrics.registry))
        finally:
            for task in (talking, beating):
                task.cancel()
            await asyncio.gather(talking, beating, return_exceptions=True)
        return 0 if self._server.started else 1

    async def _talk(self, connection: socket.socket) -> None:
        await self._channel.run(connection)
        self._server.should_exit = True  # no process is left to replace or stop this one

    async def _beat(self) -> None:
        beats = 0
        while True:
            with contextlib.suppress(ChannelClosed):
                samples = None if beats % _SAMPLES_EVERY else samples_of(self._server.metrics.registry)
                self._channel.notify("beat", self._heartbeat(samples))
            beats += 1
            await asyncio.sleep(HEARTBEAT_S)

    def _heartbeat(self, samples: Samples | None = None) -> Heartbeat:
        return Heartbeat(self._server.is_ready, samples, self._server.gateway.refusal)

    async def _answer(self, name: str, _value: Any) -> Any:
        if name == "retire":
            self._server.retire()
            return None
        if name == "page":
            return await self._server.gateway.render_metrics()
        if name == "not_ready":
            return await self._server.gateway.not_ready()
        assert name == "samples", name
        return samples_of(self._server.metrics.registry)

    async def _why_not_ready(self) -> str:
        if self._server.is_ready:  # else the first process knows it only after the next beat
            self._channel.notify("beat", self._heartbeat())
        return str(await self._channel.ask("why_not_ready"))

    async def _all_metrics(self) -> bytes:
        answer = await self._channel.ask("metrics")
        assert isinstance(answer, bytes)
        return answer


def _first_message(connection: socket.socket) -> MemberSetup:
    header = connection.recv(4, socket.MSG_WAITALL)
    (length,) = struct.unpack("!I", header)
    setup = pickle.loads(connection.recv(length, socket.MSG_WAITALL))
    assert isinstance(setup, MemberSetup)
    return setup


def main() -> int:
    """Runs one process. Returns the exit code."""
    connection = socket.socket(fileno=os.dup(0))
    setup = _first_message(connection)
    configure_logging(setup.config.telemetry, "gateway")
    tracing = configure_tracing(setup.config.telemetry, "moebius-gateway")
    try:
        configure_tls(setup.config.security)
        member = Member(setup)
        end_metrics = export_metrics(setup.config.telemetry, "moebius-gateway", member.registry.collect)
        collect_rarely()
        try:
            return uvloop.run(member.run(connection))
        finally:
            end_metrics()
    except UserError as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 1
    finally:
        tracing.shutdown()


if __name__ == "__main__":
    sys.exit(main())
