"""kill -9 of one or both expert servers again and again while greedy streams run: no request fails."""

from __future__ import annotations

import itertools
import signal
import time

from tests.drills.load import GreedyLoad, tally
from tests.drills.report import Report
from tests.drills.session import EXPERTS, promise_right, served, undisturbed, wait_for
from tests.drills.watcher import drifts

MAX_TOKENS = 160
# The promise: no request takes longer.
SLOWEST_S = 15.0


def run(report: Report, duration_s: float, period_s: float, streams: int) -> None:
    """Kills expert-0, expert-1 and both in turn, every `period_s` for `duration_s` seconds."""
    with served(report) as session:
        cases = undisturbed(session, streams, MAX_TOKENS)
        del session.watcher.samples[:]
        end = time.monotonic() + duration_s
        with GreedyLoad(session.stack.base_url, cases, streams, deadline_s=120) as load:
            for victims in itertools.cycle([EXPERTS[:1], EXPERTS[1:], EXPERTS]):
                if time.monotonic() > end:
                    break
                for name in victims:
                    if session.send(name, signal.SIGKILL) is None:
                        report.inject(f"{name} was not back yet")
                wait_for(lambda: session.stack.process.poll() is not None, period_s)
        report.outcomes = load.outcomes
        samples = session.watcher.samples
        _judge(report)
        report.promise("every expert server was back", wait_for(session.ready, 30))
        report.promise_flat(drifts(samples))


def _judge(report: Report) -> None:
    numbers = tally(report.outcomes)
    failed = numbers.count("refused", "broken", "late")
    report.promise("no request failed", numbers.sent > 0 and failed == 0, f"{failed} of {numbers.sent}")
    promise_right(report, report.outcomes)
    slowest = f"{numbers.slowest_s:.1f} s"
    report.promise(f"no request slower than {SLOWEST_S:g} s", numbers.slowest_s <= SLOWEST_S, slowest)
    ordered = sorted(outcome.seconds for outcome in report.outcomes)
    if ordered:
        report.facts["seconds per request, median and 99 %"] = [
            round(ordered[len(ordered) // 2], 2),
            round(ordered[int(len(ordered) * 0.99)], 2),
        ]
