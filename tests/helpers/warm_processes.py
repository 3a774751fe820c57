"""A process that has imported what prompt processes and expert servers need, forked by this test process.

Starting one of them takes most of a second of a core, and tests start hundreds. The processes that `moebius`
starts, and those of tests/unit/gateway/prompts, begin as they do for users.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

from gateway.prompts import worker
from gateway.prompts.fork_server import EarlyServer, ForkServer, serve_forks
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from tests.helpers.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
# What a fork becomes: its first byte.
_PROMPTS, _EXPERT = b"P", b"E"
# An expert server imports the others when it needs them.
_EXPERT_MODULES = ("expert_service.main", "expert_service.metrics", "moebius.models.served")
_PID = struct.Struct("!i")


class _Warm(ForkServer):
    """The process itself, started as `python -m` this module."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        command = [sys.executable, "-m", __spec__.name]
        with theirs:
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=environment, cwd=ROOT)


_start = functools.cache(_Warm)


def _warm() -> ForkServer:
    if _start().ended:
        _start.cache_clear()
    return _start()


class WarmForkServer(ForkServer):
    """Takes the place of `ForkServer` in a gateway's pool: its process is a fork of the warm one."""

    def __init__(self, module: str, message: bytes, early: EarlyServer | None = None) -> None:
        assert early is None
        assert module == worker.__name__
        self._control, self._process = _warm().fork()  # type: ignore[assignment]
        self._control.sendall(_PROMPTS + message)


class ExpertProcess:
    """An expert server, with the methods of a `Popen`."""

    def __init__(self, config: MoebiusConfig, log: Path) -> None:
        """Starts it with this process's environment; its output is appended to `log`."""
        log.touch()  # for a test that reads it before the process writes
        channel, self._fork = _warm().fork()
        job = {"config": config.model_dump_json(), "log": str(log), "environment": dict(os.environ)}
        with channel:
            channel.sendall(_EXPERT + json.dumps(job).encode())
            channel.shutdown(socket.SHUT_WR)
            (self.pid,) = _PID.unpack(channel.recv(_PID.size))

    def poll(self) -> int | None:
        """Returns the exit status, negative by a signal; None while it runs."""
        return self._fork.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status once there is one; AssertionError after `timeout` seconds."""
        if timeout is not None:
            wait_until(lambda: self.poll() is not None, limit_s=timeout)
        return self._fork.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to a process that has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _run(channel: socket.socket) -> int:
    """Runs what the test asks for, as a process of its own would."""
    gc.freeze()
    random.seed()
    if channel.recv(1) == _PROMPTS:
        return worker.main(channel)
    with channel, channel.makefile("rb") as asked:
        job = json.load(asked)
        channel.sendall(_PID.pack(os.getpid()))
    os.environ.clear()
    os.environ.update(job["environment"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(job["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    from expert_service.main import run

    try:
        status = run(MoebiusConfig.model_validate_json(job["config"]))
    except UserError as error:  # as the CLI does
        print(error, file=sys.stderr)
        status = error.exit_status
    atexit._run_exitfuncs()
    return status


if __name__ == "__main__":
    for module in _EXPERT_MODULES:
        importlib.import_module(module)
    serve_forks(socket.socket(fileno=0), _run)
