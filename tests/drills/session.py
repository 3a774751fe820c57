"""A served checkpoint for one drill, and helpers to hurt it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from tests.drills.checkpoint import FLAGS, GreedyCase, greedy_cases, write_checkpoint
from tests.drills.load import GreedyLoad, Outcome, tally
from tests.drills.report import Report
from tests.drills.watcher import Watcher, processes_of
from tests.helpers.stack import Stack, mailboxes_of, running_stack

EXPERTS = ("expert-0", "expert-1")
START_S = 300.0
# After the end of `moebius serve`, whatever it started has to be gone within this time.
GONE_S = 10.0


@dataclass(frozen=True)
class Session:
    """What a drill works with; filled by `served`."""

    report: Report
    stack: Stack
    model: Path
    watcher: Watcher

    def log(self) -> str:
        """Everything the processes have logged."""
        return self.stack.log.read_text(errors="replace")

    def one(self, name: str) -> psutil.Process | None:
        """Returns the (first) process of that name; None while there is none."""
        return next(iter(processes_of(self.stack).get(name, [])), None)

    def send(self, name: str, number: signal.Signals) -> psutil.Process | None:
        """Sends a signal to that process and counts it; None when there is no such process now."""
        process = self.one(name)
        if process is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
            self.report.inject(f"{number.name} {name}")
        return process

    def ready(self) -> bool:
        """Returns whether /ready answers 200 now."""
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.stack.base_url}/ready", timeout=2).status_code == 200
        return False


def serves_again(load: GreedyLoad, moment: float, timeout_s: float) -> float | None:
    """Seconds from `moment` to the first right answer to a request sent after it; None: not in time."""
    if not wait_for(lambda: any(one.fate == "right" for one in load.since(moment)), timeout_s):
        return None
    return min(one.started + one.seconds for one in load.since(moment) if one.fate == "right") - moment


def wait_for(condition: Callable[[], bool], timeout_s: float, pause_s: float = 0.1) -> bool:
    """Returns whether the condition came true in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause_s)
    return True


@contextlib.contextmanager
def served(report: Report, *flags: str, sample_s: float = 5.0, stops_well: bool = True) -> Iterator[Session]:
    """Serves a fresh checkpoint with two expert servers; afterwards checks what is left of it.

    `stops_well`: whether `moebius serve` has to run until the end and to stop with status 0.
    Files are kept, and named on stderr, when a promise is broken.
    """
    directory = Path(tempfile.mkdtemp(prefix=f"drill-{report.drill}-"))
    model = write_checkpoint(directory / "model")
    stack, watcher = None, None
    try:
        with running_stack(
            model, directory, *FLAGS, "--expert-servers", "2", *flags, timeout_s=START_S
        ) as stack:
            with Watcher(stack, sample_s) as watcher:
                yield Session(report, stack, model, watcher)
            watcher.seen.update(member for members in processes_of(stack).values() for member in members)
    except AssertionError as error:
        if stops_well or stack is None:
            report.promise("serve starts, runs to the end and stops with status 0", False, error)
    if stack is not None and watcher is not None:
        promise_nothing_left(report, stack, watcher)
        facts = re.findall(r"Traceback \(most recent call last\)", stack.log.read_text(errors="replace"))
        report.facts["tracebacks in the log"] = len(facts)
    if report.kept:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        print(f"kept for a look: {directory}", file=sys.stderr)


def promise_nothing_left(report: Report, stack: Stack, watcher: Watcher) -> None:
    """No process, no shared memory, no run directory of what was served."""
    _, alive = psutil.wait_procs(watcher.seen, timeout=GONE_S)
    left = mailboxes_of(stack)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.append(f"pid {process.pid} ({process.status()}): {' '.join(process.cmdline())}")
    left += [str(path) for path in stack.state_dir.glob("serve-*")]
    report.promise("no process, shared memory or run directory left", not left, ", ".join(left))


def undisturbed(session: Session, streams: int, max_tokens: int) -> list[GreedyCase]:
    """Greedy cases whose text is the same alone and among `streams` streams without any fault."""
    cases = greedy_cases(session.stack.base_url, streams, max_tokens)
    with GreedyLoad(session.stack.base_url, cases, streams, deadline_s=300) as load:
        wait_for(lambda: len(load.outcomes) >= 2 * streams, 300)
    numbers = tally(load.outcomes)
    session.report.facts["undisturbed: requests, slowest (s)"] = [numbers.sent, round(numbers.slowest_s, 2)]
    unequal = numbers.sent - numbers.count("right")
    session.report.promise("texts are equal without faults, alone and together", not unequal, unequal)
    return cases


def promise_right(report: Report, outcomes: list[Outcome]) -> None:
    """No answer is wrong, none is late."""
    numbers = tally(outcomes)
    report.promise("no wrong text", numbers.count("wrong") == 0, numbers.count("wrong"))
    report.promise("no request without an end", numbers.count("late") == 0, numbers.count("late"))
