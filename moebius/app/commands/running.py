"""A started system with a progress display; shared by `moebius serve` and `moebius demo`."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from moebius.app.supervisor.plan import ServePlan, process_names
from moebius.app.supervisor.supervisor import EventCallback, State, Supervisor


@contextlib.contextmanager
def running(serve_plan: ServePlan) -> Iterator[Supervisor]:
    """Starts the plan's processes, shows each one's state until all are ready, stops them at the end.

    When a signal came first, the supervisor that is yielded is already `stopping`.
    """
    with _readiness(serve_plan) as on_event:
        supervisor = Supervisor(serve_plan.plan, serve_plan.timing, on_event)
        with contextlib.ExitStack() as stack:
            stack.enter_context(supervisor)
            supervisor.wait_ready()
            supervisor.silence_events()
            started = stack.pop_all()
    with started:
        yield supervisor


@contextlib.contextmanager
def _readiness(serve_plan: ServePlan) -> Iterator[EventCallback]:
    """A callback that shows states: moving bars on a terminal, a line per event elsewhere."""
    begin = time.monotonic()
    if not sys.stderr.isatty():

        def print_event(name: str, state: State) -> None:
            print(f"{name}: {state} after {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)

        yield print_event
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as display:
        tasks = {
            name: display.add_task(f"{name:<9} waiting", total=1) for name in process_names(serve_plan.plan)
        }

        def show_event(name: str, state: State) -> None:
            display.update(tasks[name], description=f"{name:<9} {state}", completed=int(state == "ready"))

        yield show_event
