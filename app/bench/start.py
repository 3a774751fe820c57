"""`moebius bench start`: how long a model takes to be served: cold, warm, and after a killed expert server.

Each start is a `moebius serve` of its own, whose processes log JSON; what they spent their time on is in
the summaries of their phases. Cold: nothing of the checkpoint is in the page cache and no GPU kernel is
compiled. Warm: both are as the start before left them. Killed: SIGKILL of one expert server of the warm
system; back is it when the supervisor says so, and a request sent at that moment tells what clients see.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import httpx

from app.bench.output import BenchTable, Column, or_dash, write_json
from app.client import ApiClient
from app.commands.once import for_this_process
from moebius.config import MoebiusConfig, Section
from moebius.config.loader import effective_config
from moebius.errors import UserError

Kind = Literal["cold", "warm", "killed"]
_POLL_S = 0.05
_STOP_S = 120.0
_PREFIX_LINES = 20


@dataclass(frozen=True)
class StartRow:
    """The keys of the JSON rows; filled by `run`. Seconds."""

    kind: Kind
    # From the start (or the kill) until the system (or the server) was ready.
    ready_s: float
    # Of a short request: after readiness, or sent at the moment of the kill.
    request_s: float
    # By process: what it did, and for how long; parts may overlap with other processes' only.
    phases: dict[str, dict[str, float]]


class ServeLog:
    """Reads a serving system's output in a thread; attributes may be read by any thread."""

    def __init__(self, stream: IO[str]) -> None:
        # Of each process, its last summary.
        self.phases: dict[str, dict[str, float]] = {}
        # Lines that say that a process is ready again, after it had ended.
        self.returned: list[str] = []
        self.last_lines: list[str] = []
        # Whether the supervisor has seen that all are ready, and restarts what ends from now on.
        self.is_supervised = False
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits until the output has ended."""
        self._thread.join()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.note(line.rstrip())

    def note(self, line: str) -> None:
        """One line of the output, a JSON object or not."""
        self.last_lines = [*self.last_lines, line][-_PREFIX_LINES:]
        if not line.startswith("{"):
            return
        try:
            entry: dict[str, Any] = json.loads(line)
        except ValueError:
            return
        if "phases" in entry:
            self.phases[str(entry["process"])] = entry["phases"]
        if entry.get("event") == "process ready":
            self.returned.append(str(entry["name"]))
        if entry.get("event") == "ready" and entry.get("process") == "supervisor":
            self.is_supervised = True


@dataclass(frozen=True)
class Serving:
    """A running `moebius serve`; filled by `serving`."""

    client: ApiClient
    model: str
    ready_s: float
    log: ServeLog
    run_file: Path
    process: subprocess.Popen[str]

    def ask(self) -> float:
        """Returns the seconds that a short request takes."""
        begin = time.monotonic()
        body = {"model": self.model, "prompt": "Once", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        for _ in self.client.stream("/v1/completions", body):
            pass
        return time.monotonic() - begin

    def expert_servers(self) -> dict[str, int]:
        """Returns process ids by name."""
        running = json.loads(self.run_file.read_text())["processes"]
        return {one["name"]: int(one["pid"]) for one in running if one["name"].startswith("expert-")}


@contextlib.contextmanager
def serving(config: MoebiusConfig, jit_cache: str) -> Iterator[Serving]:
    """Starts the system and stops it. Raises UserError with its last lines when it does not become ready."""
    with tempfile.TemporaryDirectory(prefix="mb-start-") as directory:
        state, file = Path(directory) / "state", Path(directory) / "serve.yaml"
        own = _own_settings(config, state, jit_cache)
        file.write_text(effective_config(own), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "moebius", "serve", own.model.model, "--config", str(file)]
        begin = time.monotonic()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        log = ServeLog(process.stdout)
        base_url = f"http://127.0.0.1:{own.gateway.port}"
        try:
            _wait_ready(base_url, process, log)
            ready_s = time.monotonic() - begin
            run_file = state / f"serve-{own.gateway.port}" / "run.json"
            client = ApiClient(base_url)
            yield Serving(client, client.first_model().name, ready_s, log, run_file, process)
            client.close()
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
            log.join()


def _own_settings(config: MoebiusConfig, state: Path, jit_cache: str) -> MoebiusConfig:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    config = for_this_process(config)
    changes: dict[str, dict[str, Any]] = {
        "gateway": {"port": port},
        "gpu": {"jit_cache_dir": jit_cache},
        "supervisor": {"state_dir": str(state)},
        "telemetry": {"log_format": "json", "log_level": "info"},
    }
    sections: dict[str, Section] = {
        name: getattr(config, name).model_copy(update=values) for name, values in changes.items()
    }
    return config.model_copy(update=sections)


def _wait_ready(base_url: str, process: subprocess.Popen[str], log: ServeLog) -> None:
    while process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{base_url}/ready", timeout=2.0, trust_env=False).status_code == 200:
                return
        time.sleep(_POLL_S)
    log.join()
    raise UserError("`moebius serve` ended before it was ready:\n" + "\n".join(log.last_lines))


def run(config: MoebiusConfig, json_file: Path | None, cold: bool = True) -> list[StartRow]:
    """Starts twice, kills once; prints a row each. Raises UserError.

    Without `cold` the first start is left out, and kernels come from where the configuration keeps them.
    """
    TABLE.print_header()
    rows = []
    with tempfile.TemporaryDirectory(prefix="mb-jit-") as directory:
        jit_cache = directory if cold else config.gpu.jit_cache_dir
        if cold:
            for path in filter(None, (config.model.model, config.model.expert_checkpoint)):
                drop_from_page_cache(Path(path))
            with serving(config, jit_cache) as first:
                rows.append(StartRow("cold", first.ready_s, first.ask(), dict(first.log.phases)))
                TABLE.print_row(rows[-1])
        with serving(config, jit_cache) as warm:
            rows.append(StartRow("warm", warm.ready_s, warm.ask(), dict(warm.log.phases)))
            TABLE.print_row(rows[-1])
            if warm.expert_servers():
                rows.append(_kill_one(warm))
                TABLE.print_row(rows[-1])
    for row in rows:
        _print_phases(row)
    write_json(rows, json_file)
    return rows


def _kill_one(system: Serving) -> StartRow:
    """Kills the first expert server by SIGKILL, and sends a request at once."""
    name, pid = min(system.expert_servers().items())
    system.log.phases.pop(name, None)
    answered: list[float] = []
    asking = threading.Thread(target=lambda: answered.append(system.ask()))
    while not system.log.is_supervised and system.process.poll() is None:
        time.sleep(_POLL_S / 10)
    begin = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    asking.start()
    while name not in system.log.returned:
        time.sleep(_POLL_S / 10)
        if system.process.poll() is not None or time.monotonic() - begin > _STOP_S * 10:
            raise UserError(f"{name} did not come back:\n" + "\n".join(system.log.last_lines))
    ready_s = time.monotonic() - begin
    asking.join()
    if not answered:
        raise UserError(f"a request failed while {name} was gone:\n" + "\n".join(system.log.last_lines))
    return StartRow("killed", ready_s, answered[0], {name: system.log.phases.get(name, {})})


def drop_from_page_cache(model: Path) -> None:
    """Lets the kernel forget a checkpoint's files, without privilege: they are read from disk again."""
    files = [path for path in model.iterdir() if path.is_file()] if model.is_dir() else [model]
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _print_phases(row: StartRow) -> None:
    for process, phases in sorted(row.phases.items()):
        listed = ", ".join(f"{what} {seconds:.1f}" for what, seconds in phases.items())
        print(f"{row.kind}, {process}: {listed or 'nothing'}")


TABLE = BenchTable[StartRow](
    Column("start", lambda row: row.kind, 7, left=True),
    Column("ready", lambda row: f"{row.ready_s:.2f} s", 9),
    Column("request", lambda row: or_dash(row.request_s, 2) + " s", 9),
    Column(
        "longest phase",
        lambda row: max(
            (
                (seconds, f"{process}: {what} {seconds:.1f} s")
                for process, phases in row.phases.items()
                for what, seconds in phases.items()
            ),
            default=(0.0, ""),
        )[1],
        50,
        left=True,
    ),
)
