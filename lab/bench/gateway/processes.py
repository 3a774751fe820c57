"""The processes of `moebius bench gateway`, and the processor time that they take."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from moebius.config import MoebiusConfig
from moebius.errors import UserError

_START_S = 120.0
_STOP_S = 15.0
_PROMPT_PROCESS = b"gateway.prompts.worker"
# Not `moebius gateway`, which wants a whole checkpoint: the scripted engine has but a tokenizer.
_GATEWAY = """
import sys
from pathlib import Path
from gateway.main import run
from moebius.config import MoebiusConfig
sys.exit(run(MoebiusConfig.model_validate_json(Path(sys.argv[1]).read_bytes())))
"""


def free_port() -> int:
    """A TCP port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yields a process whose output goes to `log`; it is ended with the context."""
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-P", *command], stdin=subprocess.PIPE, stdout=sink, stderr=sink
        )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def scripted_engine(address: str, directory: Path, step_ms: float) -> Iterator[None]:
    """The bench's own engine at `address`, with the tokenizer in `directory`."""
    command = ["-m", "lab.bench.gateway.engine", address, str(directory), str(step_ms)]
    with running(command, directory / "engine.log"):
        yield


@contextlib.contextmanager
def gateway(config: MoebiusConfig, directory: Path) -> Iterator[int]:
    """Runs the gateway with these settings; yields its process id once it is ready. Raises UserError."""
    settings, log = directory / "gateway.json", directory / "gateway.log"
    settings.write_text(config.model_dump_json())
    with running(["-c", _GATEWAY, str(settings)], log) as process:
        wait_for(config.gateway.port, "/ready", process, log)
        yield process.pid


@contextlib.contextmanager
def bare_server(port: int, directory: Path, step_ms: float) -> Iterator[int]:
    """Runs the limit's server; yields its process id. Raises UserError."""
    command = ["-m", "lab.bench.gateway.bare", str(port), str(directory), str(step_ms)]
    log = directory / "bare.log"
    with running(command, log) as process:
        wait_for(port, "/", process, log)
        yield process.pid


def wait_for(port: int, path: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until `path` is answered with 200. Raises UserError with the process's last words."""
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                connection.close()
                return
        connection.close()
        time.sleep(0.05)
    lines = log.read_text(errors="replace").strip().splitlines()
    raise UserError(f"a process of the bench did not start: {(lines or ['it said nothing'])[-1]}")


def descendants(pid: int) -> list[int]:
    """Returns `pid` and all processes below it that live."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += descendants(int(child))
    return found


def is_prompt_process(pid: int) -> bool:
    """Returns whether it is one of those that read requests."""
    with contextlib.suppress(OSError):
        return _PROMPT_PROCESS in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def cpu_seconds(pids: Sequence[int]) -> float:
    """Returns processor time that the processes have taken, all their threads together."""
    # How the kernel numbers the clocks of other processes: include/linux/posix-timers_types.h.
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def http_processes(pid: int) -> list[int]:
    """Returns those below the gateway's first process, itself included, that speak HTTP."""
    return [one for one in descendants(pid) if not is_prompt_process(one)]


def own_affinity() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))
