"""A process that has imported what prompt processes need, forked by gateways of this test process.

Starting one takes most of a second of a core, and tests start more than a hundred. The processes that
`moebius` starts, and those of tests/unit/gateway/prompts, begin as they do for users.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from gateway.prompts import worker
from gateway.prompts.fork_server import EarlyServer, ForkServer, serve_forks

ROOT = Path(__file__).resolve().parents[2]


class _Warm(ForkServer):
    """The process itself, started as `python -m` this module."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        command = [sys.executable, "-m", __spec__.name]
        with theirs:
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=environment, cwd=ROOT)


class WarmForkServer(ForkServer):
    """Takes the place of `ForkServer` in a gateway's pool: its process is a fork of the warm one."""

    _warm: _Warm | None = None

    def __init__(self, module: str, message: bytes, early: EarlyServer | None = None) -> None:
        assert early is None
        assert module == worker.__name__
        if WarmForkServer._warm is None or WarmForkServer._warm.ended:
            WarmForkServer._warm = _Warm()
        self._control, self._process = WarmForkServer._warm.fork()  # type: ignore[assignment]
        self._control.sendall(message)


if __name__ == "__main__":
    serve_forks(socket.socket(fileno=0), worker.main)
