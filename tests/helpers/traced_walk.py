"""Which Python files run while a chat is streamed, in every process of `moebius serve`.

    python -m tests.helpers.traced_walk    writes the table into docs/structures.md

The traced processes read one byte of memory that they share with the tracing one: the phase, zero for what
is not looked at. A process notes each function of the product when it first runs in a phase. What also runs
while there is no request is no part of the walk, nor is what runs in some rounds only.
"""

from __future__ import annotations

import ast
import contextlib
import mmap
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "MOEBIUS_TESTS_WALK"
PAGE = ROOT / "docs" / "structures.md"
BEGIN, END = "<!-- traced: begin -->\n", "<!-- traced: end -->\n"
_SITE = Path(__file__).parent / "walk_site"
_PRODUCT = tuple(f"{ROOT}/{top}/" for top in ("moebius", "app", "gateway", "gpu_service", "expert_service"))
_PHASE_FILE = "phase"
# What runs by the clock would be in some traces only.
_QUIET = ("--verify-interval-s", "0")
_IDLE_S, _ROUNDS, _TOKENS = 3.0, 3, 72
# The chunks of an answer between which every step is one of decoding alone.
_STEADY = range(8, 60)
# What a process is, by an argument of its command line.
_PROCESSES = {
    "gateway": "gateway",
    "gpu": "engine",
    "expert": "expert server",
}


@dataclass(frozen=True, slots=True)
class Visit:
    """A function that a process ran for the first time in a phase."""

    phase: int
    nanoseconds: int  # of CLOCK_MONOTONIC, the same for all processes
    function: str
    path: str  # below ROOT
    process: int


@dataclass(slots=True)
class TracedFile:
    """A row of the table: a file that a request runs."""

    path: str
    processes: list[str] = field(default_factory=list)
    is_steady: bool = False  # whether every step that decodes runs it

    @property
    def summary(self) -> str:
        """The first sentence of the module's docstring."""
        text = ast.get_docstring(ast.parse((ROOT / self.path).read_text())) or ""
        return " ".join(text.partition("\n\n")[0].split()).replace("`", "").replace("|", "/")


class Tracer:
    """Sets the phase of traced processes and reads what they noted."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        (directory / _PHASE_FILE).write_bytes(b"\0")
        with (directory / _PHASE_FILE).open("r+b") as file:
            self._phase = mmap.mmap(file.fileno(), 1)

    def enter(self, phase: int) -> None:
        """From now on functions are noted for this phase; 0: none is."""
        self._phase[0] = phase

    def visits(self) -> list[Visit]:
        """Returns what all processes have noted, by time."""
        found = []
        for file in self._directory.glob("*.visits"):
            for line in file.read_text().splitlines():
                phase, nanoseconds, function, path = line.split(" ", 3)
                found.append(Visit(int(phase), int(nanoseconds), function, path, int(file.stem)))
        return sorted(found, key=lambda visit: visit.nanoseconds)


@contextlib.contextmanager
def traced(directory: Path) -> Iterator[Tracer]:
    """Python processes that are started meanwhile are traced."""
    before = {name: os.environ.get(name) for name in (VARIABLE, "PYTHONPATH")}
    os.environ[VARIABLE] = str(directory)
    paths = (str(_SITE), str(ROOT), before["PYTHONPATH"])
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    try:
        yield Tracer(directory)
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def trace_this_process() -> None:
    """Notes functions from now on, in this thread and all that are started."""
    directory = Path(os.environ[VARIABLE])
    with (directory / _PHASE_FILE).open("r+b") as file:
        phase = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
    noted: dict[CodeType, int] = {}  # the phases of each function, as bits

    def called(frame: FrameType, event: str, _argument: object) -> None:
        current = phase[0]
        if not current or event != "call" or noted.get(frame.f_code, 0) >> current & 1:
            return
        code = frame.f_code
        noted[code] = noted.get(code, 0) | 1 << current
        if code.co_filename.startswith(_PRODUCT) and code.co_name != "<module>":
            path, name = os.path.relpath(code.co_filename, ROOT), code.co_qualname.replace(" ", "")
            with (directory / f"{os.getpid()}.visits").open("a") as notes:
                notes.write(f"{current} {time.monotonic_ns()} {name} {path}\n")

    threading.setprofile(called)
    sys.setprofile(called)


def trace_walk(directory: Path) -> list[TracedFile]:
    """Returns the files that a streamed chat runs, in the order in which it first does; starts the demo for
    it.
    """
    import psutil

    from gateway.prompts.worker import COMMAND
    from tests.helpers.demo import EXACT_FLAGS, demo_checkpoint
    from tests.helpers.stack import running_stack

    (directory / "stack").mkdir()
    with (
        traced(directory) as tracer,
        running_stack(demo_checkpoint(), directory / "stack", *EXACT_FLAGS, *_QUIET) as stack,
    ):
        supervisor = stack.process.pid
        _chat(stack.base_url, lambda chunk: None)
        names = {
            child.pid: "prompt process"
            if child.name() == COMMAND
            else next((name for key, name in _PROCESSES.items() if key in child.cmdline()), "")
            for child in psutil.Process(supervisor).children(recursive=True)
        }
        os.kill(supervisor, signal.SIGSTOP)  # it asks the others now and then how they are
        try:
            time.sleep(0.5)
            tracer.enter(1)
            time.sleep(_IDLE_S)
            for number in range(_ROUNDS):
                _trace_round(tracer, stack.base_url, number)
        finally:
            os.kill(supervisor, signal.SIGCONT)
    return _walk_of([visit for visit in tracer.visits() if visit.process != supervisor], names)


def _phases(number: int) -> tuple[int, int]:
    """Returns those of a round: all but its steady part, and that."""
    return 2 + 2 * number, 3 + 2 * number


def _trace_round(tracer: Tracer, base_url: str, number: int) -> None:
    other, steady = _phases(number)
    tracer.enter(other)
    _chat(base_url, lambda chunk: tracer.enter(steady if chunk in _STEADY else other))
    time.sleep(0.5)  # what follows an answer belongs to it
    tracer.enter(0)


def _chat(base_url: str, on_chunk: Callable[[int], None]) -> None:
    """Streams one answer; `on_chunk` gets the number of each chunk."""
    import httpx

    from tests.helpers.demo import MODEL

    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell me about the sea."}],
        "stream": True,
        "max_tokens": _TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    with httpx.stream("POST", f"{base_url}/v1/chat/completions", json=body, timeout=120) as response:
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        for chunk, _ in enumerate(lines):
            on_chunk(chunk)


def _walk_of(visits: list[Visit], names: dict[int, str]) -> list[TracedFile]:
    background = {(visit.path, visit.function) for visit in visits if visit.phase == 1}
    visits = [visit for visit in visits if (visit.path, visit.function) not in background]

    def in_all(of_round: Callable[[int], tuple[int, ...]]) -> set[str]:
        rounds = (
            {visit.path for visit in visits if visit.phase in of_round(number)} for number in range(_ROUNDS)
        )
        return set.intersection(*rounds)

    steady = in_all(lambda number: _phases(number)[1:])
    files = {path: TracedFile(path, is_steady=path in steady) for path in in_all(_phases)}
    order: dict[str, TracedFile] = {}
    for visit in visits:
        if visit.path in files:
            traced_file = order.setdefault(visit.path, files[visit.path])
            name = names.get(visit.process, "")
            if name and name not in traced_file.processes:
                traced_file.processes.append(name)
    return list(order.values())


def as_table(walk: list[TracedFile]) -> str:
    """Returns the table of docs/structures.md."""
    rows = []
    for number, row in enumerate(walk, 1):
        processes, mark = ", ".join(row.processes), "x" if row.is_steady else ""
        rows.append(f"| {number} | `{row.path}` | {processes} | {mark} | {row.summary} |")
    head = ["| | file | process | each step | what it says of itself |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows, ""])


def documented() -> dict[str, bool]:
    """Returns the files of the page's table, and whether each step runs them."""
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    cells = (line.split(" | ") for line in table.splitlines()[2:])
    return {row[1].strip("`"): row[3].strip() == "x" for row in cells}


def main() -> None:
    """Traces a chat and writes what it finds."""
    with tempfile.TemporaryDirectory() as directory:
        walk = trace_walk(Path(directory))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + as_table(walk) + END + rest.partition(END)[2])
    print(f"{len(walk)} files, {sum(row.is_steady for row in walk)} of them in each step that decodes")


if __name__ == "__main__":
    main()
