"""Starts the whole system as a user would (`moebius serve`) and stops it again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.helpers import tls_everywhere
from tests.helpers.ports import free_port
from tests.helpers.waiting import LIMIT_S, wait_ready
from tests.helpers.warm_processes import ROOT as ROOT
from tests.helpers.warm_processes import Program, start_program


@dataclass(frozen=True)
class Stack:
    """A running `moebius serve`; filled by `running_stack`."""

    process: Program
    base_url: str
    log: Path
    state_dir: Path
    metrics_url: str  # without /metrics

    def children(self, command: str) -> list[psutil.Process]:
        """Returns the live child processes running `moebius <command>`, oldest first."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                arguments = child.cmdline()
                if "moebius" in arguments and command in arguments:
                    found.append(child)
        return sorted(found, key=lambda child: child.create_time())


@contextlib.contextmanager
def running_stack(
    model: Path, directory: Path, *flags: str, timeout_s: float = LIMIT_S, scheme: str = ""
) -> Iterator[Stack]:
    """Runs `moebius serve model flags…` on a free port; on exit stops it with SIGTERM and checks the exit.

    With the scheme https the flags name a certificate, and its CA has to be in SSL_CERT_FILE. Files and
    batches are below `directory`, too, so that a second server there goes on with the first one's.
    """
    port, metrics_port = free_port(), free_port()
    if not scheme:
        scheme = tls_everywhere.scheme()
        for name, value in tls_everywhere.https_files().items():
            flags += (f"--{name.replace('_', '-')}", value)
    log = directory / "serve.log"
    state_dir = directory / "state"
    command = ["-m", "moebius", "serve", str(model), "--port", str(port)]
    # One process prepares prompts, unless a flag says otherwise: each takes a second of a core to start.
    command += ["--state-dir", str(state_dir), "--prompt-workers", "1", *flags]
    metrics_url = base_url = f"{scheme}://127.0.0.1:{port}"
    if scheme == "https" and "--gateway-metrics-port" not in flags:
        command += ["--gateway-metrics-port", str(metrics_port)]
        metrics_url = f"http://127.0.0.1:{metrics_port}"
    user = {**os.environ, "XDG_STATE_HOME": str(directory / "user-state")}
    with log.open("wb") as sink:
        process = start_program(command, sink, sink, user)
    try:
        wait_ready(base_url, process, log, limit_s=timeout_s)
        yield Stack(process, base_url, log, state_dir, metrics_url)
        if process.poll() != -signal.SIGKILL:  # a test may have killed it on purpose
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0, log.read_text()[-4000:]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # a failed test shall leave no shared memory behind
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=40)
            process.kill()
            process.wait()


def mailboxes_of(stack: Stack) -> list[str]:
    """Names of the mailboxes that exist now and that were made for that gateway's port."""
    port = stack.base_url.rsplit(":", 1)[1]
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"moebius-{port}-")]
