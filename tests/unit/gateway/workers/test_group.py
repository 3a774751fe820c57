"""Guards the first of several gateway processes: every seat is filled again, and by one process only."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.workers import group
from gateway.workers.group import Group
from tests.helpers.gateway_server import gateway_config
from tests.helpers.ports import free_port
from tests.helpers.waiting import until

pytestmark = pytest.mark.timeout(600)
WAIT_S = 200.0

# Reports that it is ready, and ends when it is retired, after some seconds of requests that it finishes.
MEMBER = """
import pickle, socket, struct, sys, time
from gateway.workers.channel import Heartbeat
channel = socket.socket(fileno=0)
data = pickle.dumps((0, False, "beat", Heartbeat(True, {})))
channel.sendall(struct.pack("!I", len(data)) + data)
channel.recv(4, socket.MSG_WAITALL)  # the setup
while b"retire" not in channel.recv(65536):
    pass
time.sleep(float(sys.argv[1]))
"""


class Started:
    """Stands for the start of processes: some fail, and the others are small ones."""

    def __init__(self) -> None:
        self.failures = 0  # failures left for the next starts
        self.running: list[subprocess.Popen[bytes]] = []
        self.finishing_s = 0.0  # how long a retired one still works
        self._start = subprocess.Popen

    def __call__(self, _command: Any, **options: Any) -> subprocess.Popen[bytes]:
        """Replaces `subprocess.Popen`."""
        if self.failures:
            self.failures -= 1
            raise BlockingIOError(11, "Resource temporarily unavailable")
        command = [sys.executable, "-c", MEMBER, str(self.finishing_s)]
        self.running.append(self._start(command, **options))
        return self.running[-1]

    def alive(self) -> list[subprocess.Popen[bytes]]:
        """Returns those that have not ended."""
        return [one for one in self.running if one.poll() is None]


@contextlib.asynccontextmanager
async def two_seats(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Group, Started]]:
    """A running group of two."""
    started = Started()
    monkeypatch.setattr(group.subprocess, "Popen", started)  # type: ignore[attr-defined]
    monkeypatch.setattr(group, "_LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(group, "_LOOK_S", 0.02)
    made = Group(gateway_config("unix:/nowhere", port=free_port(), workers=2))
    running = asyncio.create_task(made.run())
    await until(lambda: len(seated(made)) == 2)
    try:
        yield made, started
    finally:
        made._stop(None)
        await running


def seated(made: Group) -> set[int]:
    """Returns process ids of those that can serve."""
    return {one.popen.pid for one in made._seats if one is not None and one.ready.is_set()}


async def test_a_seat_is_filled_when_processes_can_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that fails for want of memory or processes is tried until it succeeds."""
    async with two_seats(monkeypatch) as (made, started):
        before, started.failures = seated(made), 3
        started.running[0].kill()
        await until(lambda: len(seated(made)) == 2 and seated(made) != before)
        assert started.failures == 0


async def test_signals_that_follow_one_another_leave_one_process_per_seat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A SIGHUP during a replacement causes one more, which waits while those replaced before still work."""
    async with two_seats(monkeypatch) as (made, started):
        before, started.finishing_s = seated(made), 0.5
        for _ in range(3):
            signal.raise_signal(signal.SIGHUP)
            await asyncio.sleep(0.03)
        await until(lambda: len(started.running) == 6 and len(started.alive()) == 2)
        assert seated(made) == {one.pid for one in started.alive()}
        assert not seated(made) & before


async def test_a_process_that_ends_while_it_is_replaced_has_one_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether the restart or the replacement comes first, no process serves without a seat."""
    async with two_seats(monkeypatch) as (made, started):
        signal.raise_signal(signal.SIGHUP)
        await until(lambda: len(started.running) == 3)
        started.running[0].kill()
        await until(lambda: not made._is_replacing)
        await until(lambda: {one.pid for one in started.alive()} == seated(made) and len(seated(made)) == 2)


async def test_nothing_is_started_after_the_end_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A SIGHUP that comes together with SIGTERM does not keep the group from ending."""
    async with two_seats(monkeypatch) as (made, started):
        made._stop(None)
        signal.raise_signal(signal.SIGHUP)
    assert len(started.running) == 2


class Channel:
    """Replaces a process's channel; answers after some seconds."""

    def __init__(self, answer_s: float) -> None:
        self.answer_s = answer_s

    async def ask(self, name: str) -> str:
        """Answers like the real one."""
        await asyncio.sleep(self.answer_s)
        return name


@pytest.mark.parametrize("seconds", [(0.3,), (600.0, 0.0), (0.3, 0.3, 0.3, 0.3)])
async def test_an_engine_that_is_silent_is_no_gateway_that_is_silent(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, ...]
) -> None:
    """A process that waits for its engine answers late, and one that hangs never: probes get an answer within
    their time either way, or a kubelet would restart the gateways where an engine is lost."""
    monkeypatch.setattr(group, "_ANSWER_S", 0.1)
    monkeypatch.setattr(group, "_ANY_ANSWER_S", 10.0)
    made = Group(gateway_config("unix:/nowhere", port=free_port(), workers=2))
    made._processes = [  # type: ignore[assignment]
        SimpleNamespace(ready=asyncio.Event(), channel=Channel(one)) for one in seconds
    ]
    async with asyncio.timeout(40.0):  # less than the one that hangs
        assert await made.not_ready() == "not_ready"
    made._held.close()
