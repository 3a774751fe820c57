"""Which systems run on this host, by their run files, and how one of them is ended."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from app.supervisor.plan import base_url
from app.supervisor.runfile import check_private, start_ticks
from moebius.config.loader import load_config
from moebius.errors import StartupError, UserError
from moebius.process.sleep_mark import SleepMark

_LOOK_S = 0.1  # between two looks whether a process has ended
_GRACE_S = 15.0  # beyond the time that running requests may continue


@dataclass(frozen=True)
class RunningSystem:
    """One `moebius serve` (or `moebius ranks`) of this user; filled by `running_systems`."""

    directory: Path
    pid: int  # of its supervisor
    ticks: int  # when that started, as `start_ticks`
    processes: tuple[str, ...]
    model: str  # its served name; empty: it has no gateway
    url: str  # empty: it has no gateway
    stop_timeout_s: float
    is_sleeping: bool = False
    model_path: Path = Path()  # of its checkpoint; empty: it has no gateway

    @property
    def seconds(self) -> float:
        """Returns how long it runs, seconds."""
        boot_s = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, boot_s - self.ticks / os.sysconf("SC_CLK_TCK"))

    @property
    def has_ended(self) -> bool:
        """Returns whether its supervisor runs no more."""
        return start_ticks(self.pid) != self.ticks


def running_systems(state_dir: Path) -> list[RunningSystem]:
    """Returns the systems whose supervisors run, by directory. Directories that others could write to, and
    run files that are being written, are left out."""
    found = []
    for run_file in sorted(state_dir.glob("*/run.json")):
        try:
            check_private(run_file.parent)
            document = json.loads(run_file.read_text(encoding="utf-8"))
            pid, ticks = (document["supervisor"][name] for name in ("pid", "start_ticks"))
            names = tuple(str(process["name"]) for process in document["processes"])
        except (OSError, StartupError, ValueError, KeyError, TypeError):
            continue
        if isinstance(pid, int) and isinstance(ticks, int) and start_ticks(pid) == ticks:
            found.append(_described(run_file.parent, pid, ticks, names))
    return found


def _described(directory: Path, pid: int, ticks: int, names: tuple[str, ...]) -> RunningSystem:
    settings = directory / "gateway.yaml"
    if not settings.is_file():
        return RunningSystem(directory, pid, ticks, names, "", "", load_config().supervisor.stop_timeout_s)
    config = load_config(settings)
    return RunningSystem(
        directory,
        pid,
        ticks,
        names,
        config.model.served_model_name or Path(config.model.model).name,
        base_url(config),
        config.supervisor.stop_timeout_s,
        SleepMark(config.model.sleep_file).exists,
        Path(config.model.model),
    )


def chosen_system(systems: list[RunningSystem], wanted: str) -> RunningSystem:
    """Returns the system on the port, or with the model, that `wanted` names; empty: the only one.

    Raises UserError when there is none, or more than one.
    """
    fitting = [
        one
        for one in systems
        if not wanted or wanted in (one.model, one.directory.name) or one.url.endswith(f":{wanted}")
    ]
    if len(fitting) == 1:
        return fitting[0]
    listed = ", ".join(f"{one.model or one.directory.name} at {one.url or one.directory}" for one in systems)
    if not systems:
        raise UserError("nothing runs here that this user has started")
    if not fitting:
        raise UserError(f"{wanted!r}: no such server runs here; running: {listed}")
    raise UserError(f"several servers run here, name one by its port: {listed}")


def stop_system(system: RunningSystem, on_wait: Callable[[], None] = lambda: None) -> bool:
    """Asks the supervisor to end, which lets running requests finish; returns whether it has ended.

    `on_wait` is called once, if it has not ended at once.
    """
    os.kill(system.pid, signal.SIGTERM)
    until = time.monotonic() + system.stop_timeout_s + _GRACE_S
    waited = False
    while not system.has_ended:
        if time.monotonic() > until:
            return False
        if not waited:
            waited = True
            on_wait()
        time.sleep(_LOOK_S)
    return True
