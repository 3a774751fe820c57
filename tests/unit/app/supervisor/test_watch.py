"""Guards who is taken for hung: who shows no sign of life and computes nothing, and no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from app.supervisor import health
from app.supervisor.health import (
    BUSY_FACTOR,
    Activity,
    GrpcProbe,
    Liveness,
    MailboxLiveness,
    Probe,
    ProcessSpec,
    Silence,
    Timing,
    Watch,
    read_activity,
)
from app.supervisor.process import MOST_CREDIT, ManagedProcess
from moebius._kernels_testing import EchoBackend
from moebius.errors import USER_ERROR_EXIT
from moebius.mailbox import Mailbox, MailboxGeometry, MailboxServer
from tests.helpers.waiting import wait_until

LIMIT_S = 10.0
IDLE = Activity(stopped=False, occupied=False, demand_s=0.0)


@dataclass
class Script(Probe, Liveness):
    """Says what it is set to say; a sign of None is silence."""

    is_ready: bool = True
    next_sign: object = None
    count: int | None = None

    def ready(self) -> bool:
        """Returns what was set."""
        return self.is_ready

    def sign(self, pid: int, timeout_s: float) -> object:
        """Returns what was set."""
        return self.next_sign

    def requests_served(self, pid: int) -> int | None:
        """Returns what was set."""
        return self.count


@dataclass
class World:
    """A clock that only the test moves, and the kernel's answers; filled by `world`."""

    now: float = 1000.0
    activity: Activity | None = IDLE
    script: Script = field(default_factory=Script)

    def monotonic(self) -> float:
        """Returns the clock."""
        return self.now


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Replaces clock and kernel for `Watch`."""
    made = World()
    monkeypatch.setattr(health, "time", made)
    monkeypatch.setattr(health, "read_activity", lambda pid: made.activity)
    return made


def watched(world: World, liveness: bool = True) -> Watch:
    """A watch whose looks the test takes itself."""
    life = world.script if liveness else None
    return Watch(ProcessSpec("gpu", ("/bin/true",), world.script, 0, liveness=life), 1, LIMIT_S)


def looks(world: World, watch: Watch, seconds: float, step_s: float = 1.0) -> None:
    """Looks once per step until `seconds` have passed."""
    for _ in range(round(seconds / step_s)):
        world.now += step_s
        watch.look()


def test_silent_and_idle_is_hung() -> None:
    """A process counts as hung after the limit, not before; one sign of life begins it again."""
    silence = Silence(LIMIT_S)
    for _ in range(9):
        silence.note(1.0, alive=False)
    assert silence.verdict() is None
    silence.note(1.0, alive=True)
    for _ in range(9):
        silence.note(1.0, alive=False)
    assert silence.verdict() is None
    silence.note(1.0, alive=False, stopped=True)
    hang = silence.verdict()
    assert hang is not None
    assert str(hang) == "no sign of life for 10 s (it is stopped, as by SIGSTOP)"


def test_a_frozen_process_is_noticed(world: World) -> None:
    """Neither answers nor CPU time: hung soon after the limit; the same with a counter that stands still."""
    for sign in (None, ("generation", 3)):
        world.script.next_sign = sign
        frozen = watched(world)
        looks(world, frozen, LIMIT_S - 1)
        assert frozen.hang is None
        looks(world, frozen, LIMIT_S)
        assert frozen.hang is not None


def test_who_computes_in_silence_is_waited_for(world: World) -> None:
    """A call of minutes, a load, a compilation: CPU time stands for life, though not for ever."""
    busy = watched(world)
    for second in range(round(LIMIT_S * 10)):
        world.activity = Activity(stopped=False, occupied=False, demand_s=second * 0.5)
        looks(world, busy, 1)
    assert busy.hang is None
    for second in range(round(LIMIT_S * BUSY_FACTOR)):
        world.activity = Activity(stopped=False, occupied=False, demand_s=50 + second * 0.5)
        looks(world, busy, 1)
    assert busy.hang is not None
    assert "nothing comes of it" in busy.hang.evidence


def test_who_waits_for_a_cpu_or_a_disk_is_waited_for(world: World) -> None:
    """A crowded machine: threads that want to run, or are inside the kernel, do not hang."""
    crowded = watched(world)
    world.activity = Activity(stopped=False, occupied=True, demand_s=0.0)
    looks(world, crowded, LIMIT_S * 5)
    assert crowded.hang is None


def test_time_without_looks_does_not_count(world: World) -> None:
    """The supervisor was stopped, or the machine slept: all others may have been, too."""
    asleep = watched(world)
    world.script.next_sign = 1
    looks(world, asleep, 1)
    looks(world, asleep, 2 * 3600, step_s=3600)
    assert asleep.hang is None
    looks(world, asleep, LIMIT_S * 2)
    assert asleep.hang is not None


def test_a_process_without_answers_hangs_only_when_stopped(world: World) -> None:
    """Ranks but the first have no server: sleeping is no hang, being stopped is."""
    follower = watched(world, liveness=False)
    looks(world, follower, LIMIT_S * BUSY_FACTOR * 2)
    assert follower.hang is None
    world.activity = Activity(stopped=True, occupied=False, demand_s=0.0)
    looks(world, follower, LIMIT_S)
    assert follower.hang is not None
    assert "SIGSTOP" in follower.hang.evidence


def test_served_is_seen_after_ready(world: World) -> None:
    """A sign of life of a process that is not ready yet is no work done."""
    loading = watched(world)
    world.script.next_sign = 1
    looks(world, loading, 1)
    assert not loading.served
    loading.ready = True
    world.script.next_sign = 2
    looks(world, loading, 1)
    assert loading.served == 1
    assert loading.served_at_end() == 1


def test_answers_between_the_last_look_and_the_end_count(world: World) -> None:
    """Killed a moment after it was ready, a process may have worked; one that was sent away has not."""
    brief = watched(world)
    brief.ready = True
    world.script.count = 3
    assert brief.served_at_end() == 3
    world.script.next_sign = 1
    looks(world, brief, 1)
    world.script.count = 0
    assert brief.served_at_end() == 0


@contextmanager
def program(source: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python program that has begun."""
    command = [sys.executable, "-S", "-c", f"print(flush=True)\n{source}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_activity_tells_computing_sleeping_and_stopped() -> None:
    """What /proc says of real processes."""

    def seen(pid: int, wanted: Callable[[Activity], bool]) -> None:
        wait_until(lambda: (found := read_activity(pid)) is not None and wanted(found))

    with program("while True: pass") as process:
        seen(process.pid, lambda now: now.occupied and now.demand_s > 0.1)
        os.kill(process.pid, signal.SIGSTOP)
        seen(process.pid, lambda now: now.stopped and not now.occupied)
    with program("import signal; signal.pause()") as process:
        seen(process.pid, lambda now: not now.stopped and not now.occupied)
    assert read_activity(process.pid) is None


def test_a_mailbox_server_beats_and_serves() -> None:
    """An idle server's counters move; others' counters are not taken for its own; no request, not served."""
    name = f"moebius-test-watch-{os.getpid()}"
    mailbox = Mailbox.create(name, MailboxGeometry(2, 64, 2, 1, 4, 1, "float32"))
    grpc = GrpcProbe("unix:/nonexistent/expert.sock", "any")
    life = MailboxLiveness(name, 0, grpc)
    try:
        assert life.sign(os.getpid(), 0.5) is None
        backend = EchoBackend(64)
        server = MailboxServer(name, 0, backend, heartbeat_s=0.01)
        server.start()
        first = life.sign(os.getpid(), 0.5)
        assert first is not None
        wait_until(lambda: life.sign(os.getpid(), 0.5) != first)
        assert life.sign(os.getpid() + 1, 0.5) is None
        assert life.requests_served(os.getpid()) == 0
        assert life.requests_served(os.getpid() + 1) is None, "another process's"
        server.stop()
        assert life.sign(os.getpid(), 0.5) is None
        assert life.requests_served(os.getpid()) is None
    finally:
        del mailbox
        Mailbox.unlink(name)


def test_a_server_that_accepts_and_never_answers_is_silent(tmp_path: Path) -> None:
    """The server is silent, as a stopped one: the kernel connects for it.

    The question ends by its deadline.
    """
    import socket

    address = str(tmp_path / "gpu.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        begin = time.monotonic()
        assert GrpcProbe(f"unix:{address}", "any").sign(1, 0.2) is None
        assert time.monotonic() - begin < 10


def test_a_restart_that_the_system_refuses_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a process was killed for want of memory there may be none for its successor at first."""
    spec = ProcessSpec("p", (sys.executable, "-c", "import time; time.sleep(60)"), Script(), 0)
    timing = Timing(60, restart_backoff_s=0, restart_backoff_max_s=5, stop_timeout_s=5, hang_timeout_s=60)
    process = ManagedProcess(spec, timing, json_logs=False)
    process.start()
    process.kill()
    process.note_exit(now=100.0)
    start = subprocess.Popen

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert not process.restart_if_due(now=100.0)
    monkeypatch.setattr(subprocess, "Popen", start)
    try:
        assert not process.restart_if_due(now=104.0)
        assert process.restart_if_due(now=105.0)
        assert process.pid is not None
        assert process.restarts == 1
    finally:
        process.kill()


class Brief(Script):
    """Each start of the process answers as many requests as `counts` says, and ends."""

    counts: Iterator[int | None]

    def requests_served(self, pid: int) -> int | None:
        """Asked once for each start, at its end."""
        return next(self.counts)


def pauses_of(counts: list[int | None], program: str = "pass") -> list[float]:
    """Pauses before the restarts of a process whose starts answer requests, with a backoff of 1 s."""
    script = Brief(is_ready=False)
    script.counts = iter(counts)
    spec = ProcessSpec("p", (sys.executable, "-S", "-c", program), script, 0, liveness=script)
    timing = Timing(60, restart_backoff_s=1, restart_backoff_max_s=4, stop_timeout_s=5, hang_timeout_s=60)
    process, pauses = ManagedProcess(spec, timing, json_logs=False, jitter=lambda least, most: most), []
    process.start()
    try:
        for _ in counts:
            wait_until(lambda: process.exit_code is not None)
            pauses.append(process.note_exit(now=0.0))
            assert process.restart_if_due(now=pauses[-1])
    finally:
        process.kill()
    return pauses


def test_answered_requests_earn_restarts_at_once() -> None:
    """Restarts are earned also of starts that answer none: a killer every few seconds meets some that are not
    ready yet.
    """
    assert pauses_of([3, 0, 0, 0, 0]) == [0.0, 0.0, 0.0, 1.0, 2.0]
    assert pauses_of([1, 0, 1, 0, 0, 1, 0]) == [0.0, 1.0, 0.0, 1.0, 2.0, 0.0, 1.0]
    many = pauses_of([1000] + [0] * (MOST_CREDIT + 1))
    assert many == [0.0] * MOST_CREDIT + [1.0, 2.0], "what is saved up ends"


def test_who_never_answers_backs_off() -> None:
    """A process that dies again and again without having worked."""
    assert pauses_of([0, None, 0, 0]) == [1.0, 2.0, 4.0, 4.0]


def test_an_error_of_the_user_is_no_matter_of_credit() -> None:
    """Files that are being replaced, or settings: the few attempts that there are need time between them."""
    broken = f"raise SystemExit({USER_ERROR_EXIT})"
    assert pauses_of([1000, 0, 0], broken) == [1.0, 2.0, 4.0]
