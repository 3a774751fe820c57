"""Grammars compiled in a process apart, within a budget of processor time that the kernel enforces.

What compiling costs does not follow from a grammar's size: 56 KB of rules can take 20 s, and neither
llguidance nor a regular expression can be interrupted from within. So a grammar is compiled here first, with
the limits that it will be enforced with; what takes longer than its budget, or more memory than is allowed,
is refused. The process that is started reads the libraries and forks the one that compiles, again whenever
that has been ended: within a few milliseconds.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
import traceback

from moebius.grammar.compile import GrammarError, OverBudget, compiled
from protos.engine_pb2 import Constraint

# Processor time of one grammar, seconds: of those that others may wait for, and at most.
QUICK_S, MOST_S = 0.05, 1.0
TOO_SLOW = f"compiling it takes more than {MOST_S:g} s of processor time: make it smaller"
NOT_IN_TIME = "the process that compiles it does not answer: try again later"
_MEMORY = 2**30  # bytes a grammar may take beyond what the process has when it starts
# A process that has not started or answered by then hangs. What compiling may cost is processor time alone,
# which the kernel counts: on a busy machine the answer may come late.
_HANGS_S = 120.0
_TRIES = 2  # something else may have killed the process
_REQUEST = struct.Struct("!dI")  # processor seconds, bytes of the constraint that follows
# Processor seconds that it took, one of the three below, bytes of the text that follows.
_ANSWER = struct.Struct("!dBI")
_GRAMMAR, _REASON, _SIGNAL = range(3)
_READY = b"R"


class GrammarProcess:
    """One process, started when it is first needed. Any thread may ask; one grammar is compiled at a time."""

    def __init__(self, forks: bool = False) -> None:
        """`forks`: it begins as a fork of this process, which has read the libraries and has no threads."""
        self._forks = forks
        self._lock = threading.Lock()
        self._process: int | None = None  # its id
        self._channel: socket.socket | None = None
        self._is_up = False
        self.spent_s = 0.0  # processor time of all grammars that were compiled in time

    def compiled(self, constraint: Constraint, cpu_s: float = MOST_S) -> str:
        """llguidance's grammar of a constraint that has one.

        Args:
            constraint: what an output has to be.
            cpu_s: processor time it may take, seconds.
        Raises:
            OverBudget: it takes more than that, or too much memory.
            GrammarError: it cannot be enforced.
            OSError: the process cannot be started.
        """
        data = constraint.SerializeToString()
        with self._lock:
            for _ in range(_TRIES):
                try:
                    kind, text = self._ask(_REQUEST.pack(cpu_s, len(data)) + data)
                except TimeoutError:
                    self._end()
                    raise OverBudget(NOT_IN_TIME) from None
                except ConnectionError:
                    kind, text = _SIGNAL, str(int(signal.SIGKILL))
                if kind != _SIGNAL:
                    break
                if int(text) == signal.SIGPROF:
                    raise OverBudget(TOO_SLOW)
                self._end()  # what was asked and what is answered may no longer belong together
                if int(text) != signal.SIGKILL:  # an allocation failed, or a stack is full
                    break
        if kind == _SIGNAL:
            raise OverBudget(f"compiling it takes more than {_MEMORY >> 20} MiB of memory: make it smaller")
        if kind == _REASON:
            raise GrammarError(text)
        return text

    def start(self) -> None:
        """Starts the process, without waiting for it; it is started when it is needed in any case."""
        with self._lock:
            self._start()

    def close(self) -> None:
        """Ends the process; it would also end with this one."""
        with self._lock:
            self._end()

    def _start(self) -> socket.socket:
        if self._channel is None:
            ours, theirs = socket.socketpair()
            with theirs:
                self._process = _fork_with(theirs) if self._forks else _spawn_with(theirs)
            self._channel = ours
            self._is_up = False
        return self._channel

    def _ask(self, message: bytes) -> tuple[int, str]:
        """Returns the answer and its kind; ConnectionError when the process is gone, TimeoutError when it
        hangs.
        """
        channel = self._start()
        if not self._is_up:
            channel.settimeout(_HANGS_S)
            self._is_up = _received(channel, 1) == _READY
        channel.sendall(message)
        took_s, kind, length = _ANSWER.unpack(_received(channel, _ANSWER.size))
        self.spent_s += took_s
        return kind, _received(channel, length).decode()

    def _end(self) -> None:
        """Lets the process go; the one that compiles ends by itself, as its socket does."""
        process, channel, self._process, self._channel = self._process, self._channel, None, None
        if process is not None and channel is not None:
            channel.close()
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # another one has waited for it
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)


class BudgetedCompiler:
    """Two such processes: grammars that take long wait for one another, and others do not wait for them."""

    def __init__(self) -> None:
        self._quick, self._patient = GrammarProcess(), GrammarProcess()

    def compiled(self, constraint: Constraint) -> str:
        """Returns what `GrammarProcess.compiled` does, within `MOST_S`."""
        try:
            return self._quick.compiled(constraint, QUICK_S)
        except OverBudget:
            return self._patient.compiled(constraint, MOST_S)

    def close(self) -> None:
        """Ends the processes."""
        self._quick.close()
        self._patient.close()


def _received(channel: socket.socket, size: int) -> bytearray:
    """Returns exactly `size` bytes; ConnectionError when the other side is gone."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = channel.recv_into(view)
        if count == 0:
            raise ConnectionError("the other side is gone")
        view = view[count:]
    return data


def _spawn_with(channel: socket.socket) -> int:
    """Returns the id of a new process whose standard input is `channel`."""
    command = [sys.executable, "-P", "-m", "moebius.grammar.process"]
    actions = [(os.POSIX_SPAWN_DUP2, channel.fileno(), 0)]
    return os.posix_spawn(sys.executable, command, os.environ, file_actions=actions)


def _fork_with(channel: socket.socket) -> int:
    """Returns the id of a fork whose standard input is `channel`, and which has none of the other files."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            os.dup2(channel.fileno(), 0)
            for number in map(int, os.listdir("/proc/self/fd")):
                if number > 2:
                    with contextlib.suppress(OSError):  # the listing's own
                        os.close(number)
            status = main()
        finally:
            os._exit(status)
    return process


def _answer_all(channel: socket.socket) -> None:
    """Compiles what comes, until the other side is gone."""
    incoming = io.BufferedReader(socket.SocketIO(channel, "r"))
    while len(header := incoming.read(_REQUEST.size)) == _REQUEST.size:
        cpu_s, length = _REQUEST.unpack(header)
        constraint = Constraint.FromString(incoming.read(length))
        started = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            kind, text = _GRAMMAR, compiled(constraint)
        except GrammarError as error:
            kind, text = _REASON, str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.sendall(_message(kind, text, time.process_time() - started))


def _limit_memory() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = used + _MEMORY if hard == resource.RLIM_INFINITY else min(hard, used + _MEMORY)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def main() -> int:
    """Runs until the other side closes the socket, which is the standard input. Returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # for the process that started this one
        signal.signal(number, signal.SIG_IGN)
    _limit_memory()
    channel = socket.socket(fileno=0)
    try:
        channel.sendall(_READY)
        while True:
            ended_by = os.waitstatus_to_exitcode(os.waitpid(_fork(channel), 0)[1])
            if ended_by >= 0:
                return ended_by
            channel.sendall(_message(_SIGNAL, str(-ended_by), 0.0))
    except ConnectionError:
        return 0


def _fork(channel: socket.socket) -> int:
    """Returns the id of a new process that compiles what comes."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            _answer_all(channel)
            status = 0
        except MemoryError:
            signal.raise_signal(signal.SIGABRT)
        except ConnectionError:
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)
    return process


def _message(kind: int, text: str, took_s: float) -> bytes:
    data = text.encode()
    return _ANSWER.pack(took_s, kind, len(data)) + data


if __name__ == "__main__":
    sys.exit(main())
