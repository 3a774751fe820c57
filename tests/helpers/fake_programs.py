"""Small child programs for supervisor tests: each runs in a fresh Python in a few ms."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from app.supervisor.health import Plan, Probe, ProcessSpec, Segment, Timing

# Writes its pid to the file in argv[1], says so, and stops cleanly on SIGTERM, noting that it did.
OBEDIENT = """
import os, pathlib, signal, sys
mark = pathlib.Path(sys.argv[1])
def stop(*_):
    with open(mark.parent / "stopped", "a") as order:
        order.write(mark.name + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("hello from", mark.name, flush=True)
mark.write_text(str(os.getpid()))
while True:
    signal.pause()
"""

# Ignores SIGTERM and has a child of its own that does, too.
STUBBORN = """
import os, pathlib, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child:
    pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {child}")
while True:
    signal.pause()
"""

# Notes that it was started and dies at once.
FAILING = """
import sys
with open(sys.argv[1], "a") as starts:
    starts.write("started\\n")
sys.exit("no such weights: layer 3")
"""

QUICK = Timing(
    ready_timeout_s=60,
    restart_backoff_s=0.02,
    restart_backoff_max_s=0.1,
    stop_timeout_s=1.0,
    hang_timeout_s=30,
)


@dataclass(frozen=True)
class FileProbe(Probe):
    """Ready once the file has content."""

    path: Path

    def ready(self) -> bool:
        """Looks at the file."""
        return self.path.exists() and bool(self.path.read_text())


def spec(name: str, program: str, marks: Path, stop_stage: int = 0) -> ProcessSpec:
    """A process that runs `program` with its mark file `marks/name`, and is ready when that is written."""
    mark = marks / name
    return ProcessSpec(name, (sys.executable, "-S", "-c", program, str(mark)), FileProbe(mark), stop_stage)


def plan(directory: Path, *processes: ProcessSpec, segment: str = "") -> Plan:
    """Returns a plan, with a shared-memory segment of that name if one is given."""
    segments = (Segment(segment, Path("/dev/shm", segment).touch),) if segment else ()
    return Plan(directory / "run", tuple(processes), segments)


def alive(pid: int) -> bool:
    """Returns whether the process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
