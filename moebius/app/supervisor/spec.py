"""What the supervisor is asked to run; filled by `plan.make_plan` (tests fill it with small programs)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moebius.app.supervisor.probes import Liveness, Probe


@dataclass(frozen=True)
class ProcessSpec:
    """One child process."""

    # Unique; the prefix of its log lines, e.g. "expert-0".
    name: str
    # The program and its arguments; the program as an absolute path.
    command: tuple[str, ...]
    probe: Probe
    # Processes of a lower stage are stopped, and gone, before a higher one is told to stop.
    stop_stage: int
    # CPUs the process may run on; empty: those of the supervisor.
    cpus: tuple[int, ...] = ()
    # Processes of the same group are restarted together; empty: alone.
    group: str = ""
    # Its signs of life; None: others notice its silence, only that it is stopped is seen here.
    liveness: Liveness | None = None


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
    # In the order of their start; nobody waits for another process to start.
    processes: tuple[ProcessSpec, ...]
    segments: tuple[Segment, ...] = ()
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
