"""Processes that have imported what services need, forked by this test process.

Starting an expert server takes a second of a core, an engine five, and tests start hundreds. Programs of
their own are the commands of tests/service/test_demo_command.py and test_docs_commands.py with all that they
start, gateways of test_gateway_process.py, the prompt processes of tests/unit/gateway/prompts, and what
supervisors of tests/service/test_supervisor*.py start that is no service.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from app.supervisor import early
from app.supervisor.child import tie_to_parent
from app.supervisor.process import ManagedProcess
from gateway.prompts import pool, worker
from gateway.prompts.fork_server import EarlyServer, ForkServer, serve_forks
from gateway.workers import group, member
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from tests.helpers import tls_everywhere

ROOT = Path(__file__).resolve().parents[2]
# What a fork becomes: its first byte.
_PROMPTS, _EXPERT, _PROGRAM = b"P", b"E", b"M"
# By what is asked of a warm process. An expert server imports the others when it needs them.
_MODULES = {
    "expert": ("expert_service.main", "expert_service.metrics", "moebius.models.served"),
    "moebius": (
        *("app.cli", "app.commands.running", "app.commands.serve", "app.services", "rich.progress"),
        *("expert_service.main", "gateway.main", "gateway.workers.member", "gpu_service.main"),
        *("gpu_service.assembly.build", "gpu_service.models.common", *early._SHARED),
    ),
}
# Beginnings of variables that none of these modules has looked at while it was imported. Engines in a test's
# own process, transformers' generate and torch's compiler set some of them.
_READ_LATER = (
    *("CUDA_DEVICE_ORDER", "FLASHINFER_WORKSPACE_BASE", "GRPC_VERBOSITY", "HF_", "HOME", "KINETO_LOG_LEVEL"),
    *("PYTEST_CURRENT_TEST", "SSL_CERT_FILE", "TOKENIZERS_PARALLELISM", "TORCHINDUCTOR_CACHE_DIR"),
    *("TRITON_CACHE_DIR", "XDG_STATE_HOME"),
)
_PID = struct.Struct("!i")
_MOST_FILES = 2
# Numbers from here on are free in a process that has just been forked.
_FREE_NUMBER = 100
# Room for the command lines that forks show in its place.
_ROOM = "-" * 8192


class _Warm(ForkServer):
    """The process itself, started as `python -m` this module."""

    def __init__(self, purpose: str) -> None:
        self._control, theirs = socket.socketpair()
        self._environment = dict(os.environ)
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        command = [sys.executable, "-m", __spec__.name, purpose, _ROOM]
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), env=environment if purpose == "expert" else None, cwd=ROOT
            )

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Returns whether its modules were imported with the variables that they look at meanwhile."""
        different = dict(set(self._environment.items()) ^ set(environment.items()))
        return all(name.startswith(_READ_LATER) for name in different)


_start = functools.cache(_Warm)


def _warm(purpose: str = "expert") -> _Warm:
    if _start(purpose).ended:
        _start.cache_clear()
    return _start(purpose)


class WarmForkServer(ForkServer):
    """Takes the place of `ForkServer` in a gateway's pool: its process is a fork of the warm one."""

    def __init__(self, module: str, message: bytes, early: EarlyServer | None = None) -> None:
        assert early is None
        assert module == worker.__name__
        self._control, self._process = self.server().fork()  # type: ignore[assignment]
        self._control.sendall(_PROMPTS + message)

    @staticmethod
    def server() -> ForkServer:
        """Returns the process that is forked."""
        return _warm()


class Forked:
    """A fork of a warm process, with the methods of a `Popen`."""

    def __init__(self, server: ForkServer, kind: bytes, job: dict[str, Any], files: Sequence[int]) -> None:
        """Has a fork of the server's do what `job` says with this process's open files."""
        channel, self._fork = server.fork()
        with channel:
            assert len(files) <= _MOST_FILES
            socket.send_fds(channel, [kind], files)
            channel.sendall(json.dumps({"environment": dict(os.environ)} | job).encode())
            channel.shutdown(socket.SHUT_WR)
            (self.pid,) = _PID.unpack(channel.recv(_PID.size))

    def poll(self) -> int | None:
        """Returns the exit status, negative by a signal; None while it runs."""
        return self._fork.poll()

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status once there is one; TimeoutExpired after `timeout` seconds."""
        end = time.monotonic() + (timeout or 0)
        while timeout is not None and self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return self._fork.wait()

    def send_signal(self, number: int) -> None:
        """Sends a signal to a process that has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ExpertProcess(Forked):
    """An expert server."""

    def __init__(self, config: MoebiusConfig, log: Path) -> None:
        """Starts it with this process's environment; its output is appended to `log`."""
        with log.open("ab") as sink:
            job = {"config": config.model_dump_json()}
            super().__init__(_warm(), _EXPERT, job, [sink.fileno(), sink.fileno()])


class Service(Forked):
    """A service that a supervisor starts, where it would start a program, and what it uses of a `Popen`."""

    def __init__(self, server: ForkServer, command: Sequence[str], cpus: Sequence[int]) -> None:
        """Starts `command`, which is `python -P -m moebius …`, in a process group of its own."""
        output, theirs = os.pipe()
        self.stdout: IO[bytes] = os.fdopen(output, "rb")
        try:
            job = {"arguments": list(command[2:]), "shown": list(command), "cpus": list(cpus)}
            super().__init__(server, _PROGRAM, job, [theirs, theirs])
        finally:
            os.close(theirs)


class GatewayWorker(Forked):
    """One of several gateway processes of a port, with what its group uses of a `Popen`."""

    def __init__(self, server: ForkServer, command: Sequence[str], stdin: int, shared: int) -> None:
        """Starts `command`, which is `python -P -m gateway.workers.member`; it has `shared` by its number."""
        job = {"arguments": list(command[2:]), "shown": list(command), "numbers": [0, shared]}
        super().__init__(server, _PROGRAM, job, [stdin, shared])


def _fork_gateway_workers(server: ForkServer) -> None:
    """Has this process's group of gateways start them as forks of the server's."""

    def start(command: Sequence[str], stdin: int, pass_fds: tuple[int]) -> GatewayWorker:
        return GatewayWorker(server, command, stdin, *pass_fds)

    group.subprocess = types.SimpleNamespace(Popen=start)  # type: ignore[assignment, attr-defined]


def fork_services(server: Callable[[], ForkServer | None]) -> None:
    """Has this process's supervisors start services as forks of what `server` returns; None: as programs."""
    start = ManagedProcess._program

    def program(self: ManagedProcess) -> Any:
        command = self.spec.command
        found = server() if tuple(command[:4]) == (sys.executable, "-P", "-m", "moebius") else None
        return start(self) if found is None else Service(found, command, self.spec.cpus)

    ManagedProcess._program = program  # type: ignore[method-assign]


def warm_services() -> ForkServer | None:
    """Returns the process whose forks become services; None: with TLS, coverage, or another environment."""
    return _warm("moebius") if _may_fork(os.environ) else None


def _may_fork(environment: Mapping[str, str]) -> bool:
    return not tls_everywhere.is_on() and "coverage" not in sys.modules and _warm("moebius").fits(environment)


class _OwnServer(ForkServer):
    """A fork of a `moebius serve`, made before that has threads, whose forks become what it starts later."""

    def __init__(self) -> None:
        supervisor = os.getpid()

        def serve(control: socket.socket) -> int:
            tie_to_parent(supervisor)
            _show(["forks-services"])
            serve_forks(control, _run)
            return 0

        server = EarlyServer(serve)
        self._control, self._process = server.control, server.process


Program = Forked | subprocess.Popen[bytes]


def start_program(
    arguments: Sequence[str], stdout: IO[bytes], stderr: IO[bytes], env: Mapping[str, str] | None = None
) -> Program:
    """Starts `python ARGUMENTS` in the repository, for `-m moebius …` or `-c PROGRAM …`, with an empty input.

    It is a program of its own where a variable differs that a module may have read, and with TLS or coverage.
    """
    environment = dict(os.environ if env is None else env)
    if not _may_fork(environment):
        command = [sys.executable, *arguments]
        return subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment
        )
    job = {"arguments": list(arguments), "environment": environment}
    return Forked(_warm("moebius"), _PROGRAM, job, [stdout.fileno(), stderr.fileno()])


def run_program(
    arguments: Sequence[str], timeout: float = 240.0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Returns what it printed, once it has ended; TimeoutExpired when it has not after `timeout` seconds."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = start_program(arguments, out, err, env)
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
        printed = []
        for file in (out, err):
            file.seek(0)
            printed.append(file.read().decode())
    return subprocess.CompletedProcess(list(arguments), status, *printed)


def _run(channel: socket.socket) -> int:
    """Runs what the test asks for, as a process of its own would."""
    gc.freeze()
    random.seed()
    kind, files, _, _ = socket.recv_fds(channel, 1, _MOST_FILES)
    if kind == _PROMPTS:
        return worker.main(channel)
    with channel, channel.makefile("rb") as asked:
        job = json.load(asked)
        if "cpus" in job:  # what app/supervisor/child.py does
            os.setpgid(0, 0)
            tie_to_parent(os.getppid())
            if job["cpus"]:
                os.sched_setaffinity(0, job["cpus"])
        channel.sendall(_PID.pack(os.getpid()))
    os.environ.clear()
    os.environ.update(job["environment"])
    files.append(os.open(os.devnull, os.O_RDONLY))
    numbers = job.get("numbers", [1, 2])
    kept = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _FREE_NUMBER) for each in files]
    for each in files:
        os.close(each)
    for each, number in zip(kept, [*numbers, *({0} - set(numbers))], strict=False):
        os.dup2(each, number)
    for each in kept:
        os.close(each)
    if kind == _PROGRAM:
        return _run_program(job["arguments"], job.get("shown", [sys.executable, *job["arguments"]]))
    from expert_service.main import run

    try:
        status = run(MoebiusConfig.model_validate_json(job["config"]))
    except UserError as error:  # as the CLI does
        print(error, file=sys.stderr)
        status = error.exit_status
    atexit._run_exitfuncs()
    return status


def _run_program(arguments: list[str], shown: list[str]) -> int:
    """Runs what Python's own command line would, and returns the exit status; `ps` shows `shown`."""
    how, what, *rest = arguments
    _show(shown)
    sys.argv, sys.orig_argv = ["-c", *rest], shown
    if rest[:1] == ["serve"]:
        server = _OwnServer()
        fork_services(lambda: server)
    elif group.__name__ in what:
        _fork_gateway_workers(_OwnServer())
    elif what == member.__name__:
        prompts = _OwnServer()
        WarmForkServer.server = staticmethod(lambda: prompts)  # type: ignore[method-assign]
        pool.ForkServer = WarmForkServer  # type: ignore[attr-defined, misc]
    gc.collect()
    gc.freeze()
    status: object = None
    try:
        if how == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            main = sys.modules["__main__"] = type(sys)("__main__")
            exec(compile(what, "<string>", "exec"), main.__dict__)
    except SystemExit as end:
        status = end.code
        if not isinstance(status, int | None):
            print(status, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter does at its end
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return status if isinstance(status, int) else int(status is not None)


def _show(command: list[str]) -> None:
    """Has `ps` show this command line."""
    begin, size = early._command_line()
    shown = b"".join(os.fsencode(part) + b"\0" for part in command)[:size]
    ctypes.memset(begin, 0, size)
    ctypes.memmove(begin, shown, len(shown))


if __name__ == "__main__":
    gc.disable()  # a third of the time of imports
    for module in _MODULES[sys.argv[1]]:
        importlib.import_module(module)
    gc.enable()
    assert "huggingface_hub" not in sys.modules, "it reads its variables when it is imported"
    gc.collect()
    serve_forks(socket.socket(fileno=0), _run)
