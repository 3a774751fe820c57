"""A started system with a progress display; shared by `moebius serve` and `moebius demo`."""

from __future__ import annotations

import contextlib
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import structlog

from moebius.app.supervisor.plan import ServePlan, process_names
from moebius.app.supervisor.supervisor import State, Supervisor

if TYPE_CHECKING:
    from rich.progress import Progress

# Seconds between two lines about what is waited for: when there is a new phase, and when there is none.
NEW_PHASE_S, SAME_PHASES_S = 2.0, 10.0


@contextlib.contextmanager
def running(serve_plan: ServePlan) -> Iterator[Supervisor]:
    """Starts the plan's processes, shows each one's state until all are ready, stops them at the end.

    When a signal came first, the supervisor that is yielded is already `stopping`.
    """
    with _start_view(serve_plan) as view:
        # JSON lines stay what the processes log.
        on_waiting = None if serve_plan.plan.json_logs else view.on_waiting
        supervisor = Supervisor(serve_plan.plan, serve_plan.timing, view.on_event, on_waiting)
        with contextlib.ExitStack() as stack:
            stack.enter_context(supervisor)
            supervisor.wait_ready()
            supervisor.silence_events()
            started = stack.pop_all()
    with started:
        yield supervisor


class StartView(ABC):
    """Shows a start-up to people."""

    @abstractmethod
    def on_event(self, name: str, state: State) -> None:
        """A process is in another state."""

    @abstractmethod
    def on_waiting(self, waiting: Mapping[str, str]) -> None:
        """Which processes are not ready yet, and what they do; called several times a second."""


class LineView(StartView):
    """A line per event, and one now and then that says what is waited for; `clock` is in seconds."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._begin = self._written_at = clock()
        self._phases: set[str] = set()

    def on_event(self, name: str, state: State) -> None:
        self._write(f"{name}: {state} after {self._clock() - self._begin:.1f} s")

    def on_waiting(self, waiting: Mapping[str, str]) -> None:
        now = self._clock()
        phases = {f"{name} {text.partition(',')[0]}" for name, text in waiting.items() if text}
        pause_s = NEW_PHASE_S if phases - self._phases else SAME_PHASES_S
        if now - self._written_at < pause_s:
            return
        self._written_at, self._phases = now, phases
        listed = ", ".join(f"{name} ({text})" if text else name for name, text in waiting.items())
        self._write(f"waiting for {listed}; {now - self._begin:.0f} s since the start")


class BarView(StartView):
    """A moving line per process, on a terminal."""

    def __init__(self, display: Progress, names: Sequence[str]) -> None:
        self._display = display
        self._tasks = {name: display.add_task(f"{name:<9} waiting", total=1) for name in names}

    def on_event(self, name: str, state: State) -> None:
        description = f"{name:<9} {state}"
        self._display.update(self._tasks[name], description=description, completed=int(state == "ready"))

    def on_waiting(self, waiting: Mapping[str, str]) -> None:
        for name, text in waiting.items():
            self._display.update(self._tasks[name], description=f"{name:<9} {text or 'starting'}")


class LogView(StartView):
    """A log line per event, where logs are JSON: nothing else may stand among them."""

    def __init__(self) -> None:
        self._log = structlog.get_logger(__name__)

    def on_event(self, name: str, state: State) -> None:
        self._log.info("process state", name=name, state=state)

    def on_waiting(self, waiting: Mapping[str, str]) -> None:
        """The processes themselves log what they do."""


@contextlib.contextmanager
def _start_view(serve_plan: ServePlan) -> Iterator[StartView]:
    if serve_plan.plan.json_logs:
        yield LogView()
        return
    if not sys.stderr.isatty():
        yield LineView(lambda line: print(line, file=sys.stderr, flush=True))
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as display:
        yield BarView(display, process_names(serve_plan.plan))
