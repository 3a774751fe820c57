"""kill -9 of engine and gateway again and again: clean errors, service returns, nothing is left."""

from __future__ import annotations

import itertools
import signal
import time

from tests.drills.load import GreedyLoad, tally
from tests.drills.report import Report
from tests.drills.session import Session, promise_right, served, serves_again, undisturbed, wait_for

MAX_TOKENS = 96
# The next right answer comes within this time: a start of Python and torch, on a busy machine.
BACK_S = 60.0


def run(report: Report, duration_s: float, period_s: float, streams: int) -> None:
    """Kills the engine, the gateway and both in turn."""
    with served(report) as session:
        cases = undisturbed(session, streams, MAX_TOKENS)
        end = time.monotonic() + duration_s
        with GreedyLoad(session.stack.base_url, cases, streams, deadline_s=2 * BACK_S) as load:
            for victims in itertools.cycle([("gpu",), ("gateway",), ("gpu", "gateway")]):
                if time.monotonic() > end or session.stack.process.poll() is not None:
                    break
                _crash(session, load, victims)
                time.sleep(period_s)
        report.outcomes = load.outcomes
        promise_right(report, report.outcomes)
        report.promise("ready at the end", wait_for(session.ready, BACK_S))


def _crash(session: Session, load: GreedyLoad, victims: tuple[str, ...]) -> None:
    """One crash; what runs through a killed gateway breaks, everybody else gets an error with a shape."""
    report, what = session.report, f"{' and '.join(victims)} killed"
    begun = time.monotonic()
    for name in victims:
        if session.send(name, signal.SIGKILL) is None:
            report.inject(f"{name} was not back yet")
    again_s = serves_again(load, begun, BACK_S)
    worst = report.facts.setdefault(f"{what}: served again after (s)", [])
    worst.append(None if again_s is None else round(again_s, 1))
    meanwhile = [one for one in list(load.outcomes) if one.started + one.seconds >= begun]
    numbers = tally(meanwhile)
    seen = report.facts.setdefault(f"{what}: requests meanwhile", {})
    for fate, count in numbers.fates.items():
        seen[fate] = seen.get(fate, 0) + count
    if again_s is None:
        report.promise(f"{what}: serves again within {BACK_S:g} s", False)
    if "gateway" not in victims and numbers.count("broken"):
        report.promise(f"{what}: errors have OpenAI's shape", False, numbers.details)
