"""What is asked of each process, and how it is seen that it is ready, alive or hangs.

A process lives while it shows a sign of life: a counter of its progress moves, or, where it has none, it
answers. One that shows none may still be busy with something long (it loads, it compiles, the machine is
so crowded that it gets no CPU), and is given far longer. One that is neither is taken for hung.

All time counts only while somebody looks: when the supervisor itself was stopped or starved, or the machine
slept, everybody else may have been, too.
"""

from __future__ import annotations

import http.client
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.supervisor.weight_files import WeightFile
    from moebius.mailbox import ServerState

PROBE_TIMEOUT_S = 1.0


class Probe(ABC):
    """One question to one process; answers within about PROBE_TIMEOUT_S and never raises."""

    @abstractmethod
    def ready(self) -> bool:
        """True when the process can do its work now."""


class Liveness(ABC):
    """Signs of life of one process. Called from the thread that watches it."""

    @abstractmethod
    def sign(self, pid: int, timeout_s: float) -> object:
        """A value that differs from call to call as long as process `pid` lives; None: no sign.

        Returns after about `timeout_s` seconds at the latest and never raises.
        """

    def requests_served(self, pid: int) -> int | None:
        """Requests that process `pid`, which may have ended, has answered since its start.

        None: they are not counted, or not any more. Never raises.
        """
        return None


_UNIX = "unix:"


@dataclass(frozen=True)
class GrpcProbe(Probe, Liveness):
    """`grpc.health.v1` says SERVING for `service` at `address`; any answer is a sign of life."""

    address: str
    service: str

    def ready(self) -> bool:
        """Asks once, on a fresh connection, so that a restarted process is found at once."""
        from grpc_health.v1 import health_pb2

        return self._status(PROBE_TIMEOUT_S) == int(health_pb2.HealthCheckResponse.SERVING)

    def sign(self, pid: int, timeout_s: float) -> object:
        """Returns the time of the answer, whatever it says."""
        return None if self._status(timeout_s) is None else time.monotonic()

    def _status(self, timeout_s: float) -> int | None:
        """Returns the status; 0 (UNKNOWN) when it is refused; None when there is no answer."""
        if self.address.startswith(_UNIX) and not os.path.exists(self.address.removeprefix(_UNIX)):
            return None  # nor was there a connection to try, which takes a hundred times as long
        import grpc
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        from moebius.network.grpc_channels import open_channel

        request = health_pb2.HealthCheckRequest(service=self.service)
        # Channels of one address would share a connection, and its pauses between attempts to connect.
        options = [("grpc.use_local_subchannel_pool", 1)]
        with open_channel(self.address, options) as channel:
            try:
                return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s).status)
            except grpc.RpcError as error:
                silent = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
                return None if error.code() in silent else 0


@dataclass(frozen=True)
class HttpProbe(Probe, Liveness):
    """`GET path` at host:port answers 200; any answer is a sign of life."""

    host: str
    port: int
    path: str

    def ready(self) -> bool:
        """Asks once; anything but 200 is no."""
        return self._status(PROBE_TIMEOUT_S) == 200

    def sign(self, pid: int, timeout_s: float) -> object:
        """Returns the time of the answer, whatever it says."""
        return None if self._status(timeout_s) is None else time.monotonic()

    def _status(self, timeout_s: float) -> int | None:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            connection.request("GET", self.path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


@dataclass(frozen=True)
class MailboxLiveness(Liveness):
    """The progress of expert server `index` in mailbox `name`: it counts while waiting and while computing.

    Its gRPC answers count before it serves the mailbox only: they come from other threads.
    """

    name: str
    index: int
    grpc: GrpcProbe

    def sign(self, pid: int, timeout_s: float) -> object:
        """Returns the counter, once the process has claimed its index."""
        found = self._state()
        if found is None or found.pid != pid:
            return self.grpc.sign(pid, timeout_s)
        answered = self.grpc.sign(pid, timeout_s) if found.state == "loading" else None
        return answered or found.progress

    def requests_served(self, pid: int) -> int | None:
        """Returns what the mailbox says, which outlives the process.

        Answers of a server that was refused do not count.
        """
        found = self._state()
        if found is None or found.pid not in (pid, 0):
            return None
        if found.refusal:
            return 0
        return found.calls if found.pid == pid else None

    def _state(self) -> ServerState | None:
        """Returns the server's state; None when there is no such mailbox, or no such server."""
        from moebius.mailbox import MailboxError, server_health

        try:
            return server_health(self.name)[self.index]
        except (MailboxError, IndexError):
            return None


@dataclass(frozen=True)
class ProcessSpec:
    """One child process."""

    # Unique; the prefix of its log lines, e.g. "expert-0".
    name: str
    # The program and its arguments; the program as an absolute path.
    command: tuple[str, ...]
    probe: Probe
    # Processes of a lower stage are stopped, and gone, before a higher one is asked to stop.
    stop_stage: int
    # CPUs the process may run on; empty: those of the supervisor.
    cpus: tuple[int, ...] = ()
    # Processes of the same group are restarted together; empty: alone.
    group: str = ""
    # Its signs of life; None: others notice its silence, only that it is stopped is seen here.
    liveness: Liveness | None = None
    # Its group's leader, on another host, drains and then tells it to end; asked only when that is late.
    ends_with_leader: bool = False


@dataclass(frozen=True)
class Segment:
    """A shared-memory segment that lives as long as the supervisor, whatever happens to the processes."""

    # Name under /dev/shm, without a slash.
    name: str
    # Creates it; called once, before any process starts.
    create: Callable[[], object]


@dataclass(frozen=True)
class Plan:
    """Everything one supervisor runs."""

    # Holds the run file and the sockets; removed at the end.
    directory: Path
    # In the order of their start; no process waits for another one to start.
    processes: tuple[ProcessSpec, ...]
    segments: tuple[Segment, ...] = ()
    # Memory of the expert servers that outlives them, but not the supervisor.
    weights: tuple[WeightFile, ...] = ()
    # The same of the engine's prefixes in RAM.
    prefixes: tuple[WeightFile, ...] = ()
    # (path, content) of files the processes read; written, readable by the owner only, before any start.
    files: tuple[tuple[Path, str], ...] = ()
    # Whether log lines are JSON objects, which take no prefix.
    json_logs: bool = False


@dataclass(frozen=True)
class Timing:
    """Seconds; filled from the `supervisor` section of the configuration."""

    ready_timeout_s: float
    restart_backoff_s: float
    restart_backoff_max_s: float
    stop_timeout_s: float
    hang_timeout_s: float


PROC = Path("/proc")
# proc_pid_stat(5): running or waiting for a CPU; inside the kernel, mostly for a disk; stopped by a debugger.
_OCCUPIED = frozenset("RDt")
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Activity:
    """One look at all threads of a process; filled by `read_activity`."""

    # By SIGSTOP or the like, so that nothing runs until SIGCONT.
    stopped: bool
    # At this moment a thread runs, wants to run, waits inside the kernel or is held by a debugger.
    occupied: bool
    # Seconds since its start that its threads used a CPU, or were ready to and waited for one.
    demand_s: float


def read_activity(pid: int) -> Activity | None:
    """Reads it from /proc; None when the process has ended."""
    try:
        own = _fields(PROC / str(pid) / "stat")
        threads = os.listdir(PROC / str(pid) / "task")
    except OSError:
        return None
    # utime and stime, of threads that have ended, too.
    demand_s = (int(own[11]) + int(own[12])) / _CLOCK_TICKS
    occupied = False
    for thread in threads:
        try:
            directory = PROC / str(pid) / "task" / thread
            occupied = occupied or _fields(directory / "stat")[0] in _OCCUPIED
            demand_s += int((directory / "schedstat").read_text().split()[1]) * 1e-9
        except OSError:  # the thread has ended, or the kernel is one without CONFIG_SCHED_INFO
            continue
    return Activity(own[0] == "T", occupied, demand_s)


def _fields(path: Path) -> list[str]:
    """Those after the program's name, which stands in parentheses and may hold anything; first the state."""
    return path.read_text().rpartition(")")[2].split()


READY_POLL_S = 0.05
# At most so long between two looks, and for one answer. Both are parts of `hang_timeout_s` where it is short.
LONGEST_INTERVAL_S = 2.0
LONGEST_ANSWER_S = 5.0
# Who computes without a sign of life gets this many times `hang_timeout_s`.
BUSY_FACTOR = 20
# Share of a CPU that counts as computing; timers of an idle process take far less.
BUSY_SHARE = 0.1


@dataclass(frozen=True)
class Hang:
    """Why a process is taken for hung; filled by `Silence.verdict` and `ManagedProcess.hang`."""

    # Seconds without a sign of life.
    silent_s: float
    evidence: str

    def __str__(self) -> str:
        return f"no sign of life for {self.silent_s:.0f} s ({self.evidence})"


class Silence:
    """How long a process has shown no sign of life, and how long it has not even been busy."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._silent_s = 0.0
        self._idle_s = 0.0
        self._stopped = False

    def note(self, elapsed_s: float, alive: bool, busy: bool = False, stopped: bool = False) -> None:
        """One look, `elapsed_s` after the one before."""
        self._silent_s = 0.0 if alive else self._silent_s + elapsed_s
        self._idle_s = 0.0 if alive or busy else self._idle_s + elapsed_s
        self._stopped = stopped

    def verdict(self) -> Hang | None:
        """Returns the hang; None while the process may still be alive."""
        if self._idle_s >= self._limit_s:
            what = "it is stopped, as by SIGSTOP" if self._stopped else "it does not compute either"
            return Hang(self._silent_s, what)
        if self._silent_s >= self._limit_s * BUSY_FACTOR:
            return Hang(self._silent_s, "it computes, but nothing comes of it")
        return None


class Watch:
    """The watch over one process from its start to its end. Attributes may be read by any thread."""

    def __init__(self, spec: ProcessSpec, pid: int, hang_timeout_s: float) -> None:
        self._spec, self._pid = spec, pid
        self._interval_s = min(LONGEST_INTERVAL_S, hang_timeout_s / 10)
        self._answer_s = min(LONGEST_ANSWER_S, hang_timeout_s / 5)
        self._silence = Silence(hang_timeout_s)
        self._sign: object = None
        self._activity: Activity | None = None
        self._looked_at = time.monotonic()
        self._stop = threading.Event()
        # Whether its probe has said yes.
        self.ready = False
        # Requests that it has answered since, as of the last look; where none are counted, 1 for being ready.
        self.served = 0
        self.hang: Hang | None = None

    def start(self) -> None:
        """Begins to watch, in a thread that ends with `stop`."""
        threading.Thread(target=self._run, name=f"watch-{self._spec.name}", daemon=True).start()

    def stop(self) -> None:
        """Asks the thread to end; does not wait for a question that is open."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self.ready:
                self.ready = self._spec.probe.ready()
            if time.monotonic() - self._looked_at >= self._interval_s:
                self.look()
            self._stop.wait(self._interval_s if self.ready else min(READY_POLL_S, self._interval_s))

    def look(self) -> None:
        """Asks for a sign of life; without one, asks the kernel."""
        liveness, activity = self._spec.liveness, None
        sign = liveness.sign(self._pid, self._answer_s) if liveness is not None else None
        alive = sign is not None and sign != self._sign
        if not alive:
            activity = read_activity(self._pid)
            if activity is None:  # it has ended, which others see
                return
            alive = liveness is None and not activity.stopped
        now = time.monotonic()
        # A longer pause than ours says that we did not get to look.
        elapsed_s = min(now - self._looked_at, self._interval_s + self._answer_s)
        busy = activity is not None and self._is_busy(activity, now - self._looked_at)
        self._silence.note(elapsed_s, alive, busy, activity is not None and activity.stopped)
        self._sign = self._sign if sign is None else sign
        self._activity, self._looked_at = activity, now
        if alive and self.ready:
            self.served = self._count(1)
        self.hang = self._silence.verdict()

    def served_at_end(self) -> int:
        """Returns the number of requests that it had answered when it ended, also those since the
        last look.
        """
        return self._count(self.served)

    def _count(self, uncounted: int) -> int:
        liveness = self._spec.liveness
        found = None if liveness is None else liveness.requests_served(self._pid)
        return uncounted if found is None else found

    def _is_busy(self, activity: Activity, elapsed_s: float) -> bool:
        """Returns whether it computed, or wanted to, since the look before."""
        if activity.stopped:
            return False
        if activity.occupied or self._activity is None:
            return True
        return activity.demand_s - self._activity.demand_s >= BUSY_SHARE * elapsed_s
