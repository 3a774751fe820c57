"""A started system with a progress display; shared by `moebius serve` and `moebius demo`."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import structlog

from app.supervisor.early import EarlyChildren
from app.supervisor.placement import find_gpus, runs_on_gpus
from app.supervisor.plan import ServePlan, process_names
from app.supervisor.supervisor import State, Supervisor
from gateway.text.model_files import forget_tokenizer
from moebius.errors import ConfigError, StartupError
from moebius.host.instruction_sets import cpu_flags, what_it_costs
from moebius.kernels import isa_level
from moebius.network.tls import configure_tls
from moebius.process.memory import give_back_memory
from moebius.process.progress import amounts_of_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

# Seconds between two lines about what is waited for: when there is a new phase, and when there is none.
NEW_PHASE_S, SAME_PHASES_S = 2.0, 10.0


@contextlib.contextmanager
def running(serve_plan: ServePlan, early: EarlyChildren | None = None) -> Iterator[Supervisor]:
    """Starts the plan's processes, shows each one's state until all are ready, stops them at the end.

    `early`: what processes may be forks of, at their first start.
    When a signal came first, the supervisor that is yielded is already `stopping`. Raises ConfigError for
    certificates that cannot be used.
    """
    forget_tokenizer()  # `early` has been forked
    configure_tls(serve_plan.config.security)  # the supervisor asks its processes for their health
    with _start_view(serve_plan) as view:
        view.on_processor(*_processor(serve_plan))
        if serve_plan.servers:
            view.on_threads(" + ".join(map(str, serve_plan.servers)))
        # JSON lines stay what the processes log.
        on_waiting = None if serve_plan.plan.json_logs else view.on_waiting
        supervisor = Supervisor(
            serve_plan.plan,
            serve_plan.timing,
            view.on_event,
            on_waiting,
            view.on_line if view.takes_lines else None,
            early,
        )
        with contextlib.ExitStack() as stack:
            stack.enter_context(supervisor)
            try:
                supervisor.wait_ready()
            except StartupError:
                view.on_failure([process.spec.name for process in supervisor.processes if not process.ready])
                raise
            supervisor.silence_events()
            started = stack.pop_all()
    give_back_memory()
    with started:
        yield supervisor


class StartView(ABC):
    """Shows a start-up to people."""

    # Whether `on_line` is to be called with what processes print.
    takes_lines = False

    def on_line(self, name: str, line: str) -> None:
        """A process printed a line. From other threads."""
        return

    def on_failure(self, names: Sequence[str]) -> None:
        """The start has failed; `names` were not ready."""
        return

    @abstractmethod
    def on_processor(self, isa: str, cost: str) -> None:
        """Comes first: the instruction-set level of this host's kernels, and its cost, empty for none."""

    @abstractmethod
    def on_threads(self, threads: str) -> None:
        """Comes next: how many threads each expert server of this host computes with, and why."""

    @abstractmethod
    def on_event(self, name: str, state: State) -> None:
        """A process is in another state."""

    @abstractmethod
    def on_waiting(self, waiting: Mapping[str, str]) -> None:
        """Shows which processes are not ready yet, and what they do; called several times a second."""


class LineView(StartView):
    """A line per event, and one now and then that says what is waited for; `clock` is in seconds."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._begin = self._written_at = clock()
        self._phases: set[str] = set()

    def on_processor(self, isa: str, cost: str) -> None:
        self._write(processor_line(isa, cost))

    def on_threads(self, threads: str) -> None:
        self._write(f"expert threads: {threads}")

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


# A log line for people whose level is worth no interruption.
_QUIET = re.compile(r"^[^|]*\| [\d:.TZ-]+ \[(info|debug) *\]")
_KEPT_LINES = 200


class BarView(StartView):
    """A moving line per process, on a terminal: its phase and how far that is.

    What processes log meanwhile is kept, and shown if the start fails; warnings are shown at once.
    """

    takes_lines = True

    def __init__(self, display: Progress, names: Sequence[str]) -> None:
        self.display = display
        self._tasks = {
            name: display.add_task("waiting", total=None, start=False, process=name) for name in names
        }
        self._kept: dict[str, deque[str]] = {name: deque(maxlen=_KEPT_LINES) for name in names}

    def on_processor(self, isa: str, cost: str) -> None:
        self._print(processor_line(isa, cost))

    def on_threads(self, threads: str) -> None:
        self._print(f"expert threads: {threads}")

    def on_event(self, name: str, state: State) -> None:
        if state == "starting":
            self.display.start_task(self._tasks[name])
        is_ready = state == "ready"
        self._show(name, state, float(is_ready), 1.0 if is_ready else None)

    def on_waiting(self, waiting: Mapping[str, str]) -> None:
        for name, text in waiting.items():
            done, total = amounts_of_text(text) or (0.0, None)
            # How long the phase takes stands at its end; the column next to it is the whole start's time.
            self._show(name, text or "starting", done, total or None)

    def _show(self, name: str, text: str, done: float, total: float | None) -> None:
        """`total` None: how much there is to do is not known, and the bar only moves."""
        task = next(task for task in self.display.tasks if task.id == self._tasks[name])
        task.total = total  # `update` takes None for "as it was"
        self.display.update(task.id, description=text, completed=done)

    def on_line(self, name: str, line: str) -> None:
        if _QUIET.match(line):
            self._kept[name].append(line)
        else:
            self._print(line)

    def on_failure(self, names: Sequence[str]) -> None:
        for name in names:
            for line in self._kept[name]:
                self._print(line)

    def _print(self, line: str) -> None:
        self.display.console.print(line, markup=False, highlight=False, soft_wrap=True)


class LogView(StartView):
    """A log line per event, where logs are JSON: nothing else may stand among them."""

    def __init__(self) -> None:
        self._log = structlog.get_logger(__name__)

    def on_processor(self, isa: str, cost: str) -> None:
        self._log.info("processor", isa=isa, cost=cost)

    def on_threads(self, threads: str) -> None:
        self._log.info("expert threads", threads=threads)

    def on_event(self, name: str, state: State) -> None:
        self._log.info("process state", name=name, state=state)

    def on_waiting(self, waiting: Mapping[str, str]) -> None:
        """The processes themselves log what they do."""


def processor_line(isa: str, cost: str) -> str:
    """Returns a line for people: the level as the kernels name it, and its cost."""
    return f"CPU kernels: {isa}" + (f": {cost}" if cost else "")


def _processor(serve_plan: ServePlan) -> tuple[str, str]:
    """Returns the line of this host, where remote expert servers do not run.

    Raises ConfigError for a wrong MOEBIUS_ISA.
    """
    try:
        level = isa_level()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return level, what_it_costs(level, cpu_flags(), runs_on_gpus(serve_plan.config, find_gpus()))


@contextlib.contextmanager
def _start_view(serve_plan: ServePlan) -> Iterator[StartView]:
    if serve_plan.plan.json_logs:
        yield LogView()
        return
    if not sys.stderr.isatty():
        yield LineView(lambda line: print(line, file=sys.stderr, flush=True))
        return
    from rich.console import Console

    with start_display(Console(stderr=True)) as display:
        yield BarView(display, process_names(serve_plan.plan))


def start_display(console: Console) -> Progress:
    """Returns a line per process: name, bar, phase, time since its start."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    return Progress(
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.fields[process]:<9}"),
        BarColumn(bar_width=16),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
    )
