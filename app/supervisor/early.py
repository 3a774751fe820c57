"""The first processes of a system without GPUs: forks of the supervisor, which then become its services.

To check a model the supervisor imports half of what a service needs, so that a fork saves that half of the
service's start, and shares its memory. It forks while it has one thread and nothing open; each fork waits for
its command. What is started later, after a death, is a program of its own (`child.py`), and so is everything
where there is a GPU, whose driver does not survive a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from typing import IO

from app.supervisor.child import tie_to_parent
from app.supervisor.placement import find_gpus, runs_on_gpus
from moebius.config import MoebiusConfig
from moebius.process.memory import give_back_memory

ROLES = ("expert", "gpu", "gateway")
# What two or all services import, without threads and without open files.
_SHARED = (
    *("grpc_health.v1.health_pb2_grpc", "uvloop", "protos.engine_pb2_grpc", "protos.expert_pb2_grpc"),
    *("moebius.grammar.process", "moebius.image_files", "moebius.experts.slices", "moebius.models.identity"),
    *("moebius.network.grpc_channels", "moebius.network.grpc_refusal", "moebius.process.operations"),
    *("moebius.telemetry", "moebius.telemetry.certificates"),
)
_POLL_S = 0.02
# The place of a service's arguments in `python -P -m moebius ROLE --config FILE`.
_FIRST_ARGUMENT = 4
# Fields of /proc/self/stat from its third one on: where the command line lies that `ps` shows.
_ARGUMENTS_BEGIN, _ARGUMENTS_END = 45, 46


class EarlyChild:
    """A fork that waits for its command, with what `ManagedProcess` uses of a `Popen`."""

    def __init__(self, others: Iterable[EarlyChild]) -> None:
        """Forks. `others`: those that wait already. Raises OSError."""
        command_read, self._command = os.pipe()
        output_read, output_write = os.pipe()
        self.returncode: int | None = None
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._command)
            os.close(output_read)
            for other in others:
                os.close(other._command)
                other.stdout.close()
            _run(parent, command_read, output_write)
        os.close(command_read)
        os.close(output_write)
        with contextlib.suppress(OSError):  # the child has done it
            os.setpgid(self.pid, self.pid)
        self.stdout: IO[bytes] = os.fdopen(output_read, "rb")

    def become(self, command: Sequence[str], cpus: Sequence[int]) -> None:
        """Has it run `command`, a service's, on `cpus` (none: all). Raises OSError when it has ended."""
        data = json.dumps({"command": command, "cpus": cpus}).encode()
        try:
            os.write(self._command, data)
        finally:
            os.close(self._command)

    def drop(self) -> None:
        """Ends it without a command."""
        os.close(self._command)
        self.wait()
        self.stdout.close()

    def poll(self) -> int | None:
        """Returns the exit status if it has ended (negative: by that signal), else None."""
        if self.returncode is None:
            process, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if process else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status. Raises TimeoutError when it has not ended after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} has not ended")
            time.sleep(_POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class EarlyChildren:
    """Those that are not used yet, by role. Leaving it as a context ends them."""

    def __init__(self, config: MoebiusConfig) -> None:
        """Forks a process for each role, unless the system has GPUs or this process has other threads."""
        self._waiting: dict[str, EarlyChild] = {}
        if runs_on_gpus(config, find_gpus()) or threading.active_count() > 1:
            return
        for name in _SHARED:
            importlib.import_module(name)
        # A collection would write to pages that the forks share; now it would find nothing, in 0.1 s.
        gc.freeze()
        give_back_memory()
        sys.stdout.flush()
        sys.stderr.flush()
        for role in ROLES:
            with contextlib.suppress(OSError):  # it is started later, which may work then
                self._waiting[role] = EarlyChild(self._waiting.values())

    def __enter__(self) -> EarlyChildren:
        return self

    def __exit__(self, *_: object) -> None:
        while self._waiting:
            self._waiting.popitem()[1].drop()

    def take(self, command: Sequence[str], cpus: Sequence[int]) -> EarlyChild | None:
        """Returns a process that runs `command` from now on; None: none is left for it."""
        arguments = command[_FIRST_ARGUMENT:]
        if not arguments or arguments[0] not in self._waiting or not _fits(_shown(arguments)):
            return None
        child = self._waiting.pop(arguments[0])
        try:
            child.become(command, cpus)
        except OSError:
            child.wait()
            child.stdout.close()
            return None
        return child


def _shown(arguments: Sequence[str]) -> bytes:
    return b"".join(part.encode(errors="surrogateescape") + b"\0" for part in ("moebius", *arguments))


def _command_line() -> tuple[int, int]:
    """Returns where this process's command line lies: address and bytes."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    begin, end = int(fields[_ARGUMENTS_BEGIN]), int(fields[_ARGUMENTS_END])
    return begin, end - begin


def _fits(shown: bytes) -> bool:
    """Whether `ps` can show it: the fork has the room of the supervisor's own command line."""
    return len(shown) <= _command_line()[1]


def _run(parent: int, command_read: int, output_write: int) -> None:
    """The fork: waits for its command, runs it and ends; does not return."""
    status: object = 1
    try:
        tie_to_parent(parent)
        os.setpgid(0, 0)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output_write, 1)
        os.dup2(output_write, 2)
        with os.fdopen(command_read, "rb") as file:
            data = file.read()
        status = _become(json.loads(data)) if data else 0
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        # The end of the interpreter would clean up what is the supervisor's.
        os._exit(status if isinstance(status, int) else 1)


def _become(request: dict[str, list[str]]) -> int:
    """Runs a service's command as its program would; returns the exit status."""
    from app.exits import exit_with
    from app.services import run_service

    command = request["command"]
    arguments = command[_FIRST_ARGUMENT:]
    begin, size = _command_line()
    ctypes.memset(begin, 0, size)
    ctypes.memmove(begin, _shown(arguments), len(_shown(arguments)))
    if request["cpus"]:
        os.sched_setaffinity(0, map(int, request["cpus"]))
    if not sys.flags.safe_path:
        del sys.path[0]  # as -P does
    # An engine that falls asleep runs its command line again.
    sys.argv, sys.orig_argv = [command[0], *arguments], command
    role, _, settings_file = arguments
    exit_with(lambda: run_service(role, settings_file))  # type: ignore[arg-type]  # one of ROLES
