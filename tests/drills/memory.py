"""Memory of packed experts changes while greedy streams run: found, repaired, not answered once it
is known.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence

from tests.drills.checkpoint import GreedyCase
from tests.drills.load import GreedyLoad, tally
from tests.drills.report import Report
from tests.drills.session import EXPERTS, Session, promise_right, served, undisturbed, wait_for
from tests.helpers.damaged_memory import REPAIRED, flip_bits, put_nan, segment_of

MAX_TOKENS = 96
INTERVAL_S = 5.0
# Beyond the interval: a busy machine gives the lowest priority little time.
LATE_S = 10.0


def run(report: Report, duration_s: float, period_s: float, streams: int, seed: int) -> None:
    """A third of the time each: NaN, bits flipped while a server is away, bits flipped while it serves."""
    chosen = random.Random(seed)
    with served(report, "--verify-interval-s", f"{INTERVAL_S:g}") as session:
        cases = undisturbed(session, streams, MAX_TOKENS)
        for phase in (_nan, _away, _flipped):
            phase(session, cases, duration_s / 3, period_s, chosen)
        injected = report.facts["experts damaged"]
        found = session.log().count(REPAIRED)
        report.promise("each damage is named once", found == injected, f"{found} lines for {injected}")
        report.promise("every expert server serves", wait_for(session.ready, 30))


def _nan(
    session: Session, cases: Sequence[GreedyCase], duration_s: float, period_s: float, chosen: random.Random
) -> None:
    """The call that meets it waits for the repair."""
    with greedy_load(session, cases) as load:
        end = time.monotonic() + duration_s
        while time.monotonic() < end:
            put_nan(segment_of(session.stack.state_dir, *_server(chosen)), *_expert(chosen))
            note_damage(session, "NaN in an expert")
            time.sleep(period_s)
    promise_unharmed(session.report, load, "NaN")


def _away(
    session: Session, cases: Sequence[GreedyCase], duration_s: float, period_s: float, chosen: random.Random
) -> None:
    """What the successor finds is compared before its first use."""
    with greedy_load(session, cases) as load:
        end = time.monotonic() + duration_s
        while time.monotonic() < end:
            (server,) = _server(chosen)
            segment, before = segment_of(session.stack.state_dir, server), session.log().count(REPAIRED)
            if session.send(EXPERTS[server], signal.SIGKILL) is not None:
                flip_bits(segment, *_expert(chosen), count=8, seed=chosen.randrange(1000))
                note_damage(session, "bits flipped while the server was away")
                wait_for(lambda known=before: session.log().count(REPAIRED) > known, 60)
            wait_for(session.ready, 60)
            time.sleep(period_s)
    promise_unharmed(session.report, load, "a server's return")


def _flipped(
    session: Session, cases: Sequence[GreedyCase], duration_s: float, period_s: float, chosen: random.Random
) -> None:
    def damage() -> float:
        before, begin = session.log().count(REPAIRED), time.monotonic()
        segment = segment_of(session.stack.state_dir, *_server(chosen))
        flip_bits(segment, *_expert(chosen), count=8, seed=chosen.randrange(1000))
        note_damage(session, "bits flipped while the server serves")
        wait_for(lambda: session.log().count(REPAIRED) > before, INTERVAL_S + 6 * LATE_S)
        return time.monotonic() - begin

    flip_under_load(session, cases, duration_s, period_s, damage)


def flip_under_load(
    session: Session,
    cases: Sequence[GreedyCase],
    duration_s: float,
    period_s: float,
    damage: Callable[[], float],
) -> None:
    """Answers are wrong until the comparison comes by, and no longer. `damage` flips bits, and returns the
    seconds until they were repaired.
    """
    report, found_after, wrong_after = session.report, list[float](), 0
    with greedy_load(session, cases) as load:
        end = time.monotonic() + duration_s
        while time.monotonic() < end:
            found_after.append(round(damage(), 1))
            found = time.monotonic()
            time.sleep(max(period_s, 2.0))
            wrong_after += sum(one.fate == "wrong" for one in load.since(found))
    numbers = tally(load.outcomes)
    report.outcomes += [one for one in load.outcomes if one.fate != "wrong"]
    report.facts["seconds until flipped bits were found"] = found_after
    report.facts["wrong while they were not"] = numbers.count("wrong")
    slowest = max(found_after, default=0.0)
    report.promise("flipped bits are found in time", slowest <= INTERVAL_S + LATE_S, f"{slowest} s")
    report.promise("flipped bits: no wrong text after the find", wrong_after == 0, wrong_after)
    failed = numbers.count("refused", "broken", "late")
    report.promise("flipped bits: no request failed", failed == 0, failed)


def greedy_load(session: Session, cases: Sequence[GreedyCase]) -> GreedyLoad:
    return GreedyLoad(session.stack.base_url, list(cases), len(cases), deadline_s=120)


def _server(chosen: random.Random) -> tuple[int]:
    return (chosen.randrange(len(EXPERTS)),)


def _expert(chosen: random.Random) -> tuple[int, int]:
    """Returns the expert of the drill's checkpoint: layer and expert."""
    return chosen.randrange(2), chosen.randrange(6)


def note_damage(session: Session, what: str) -> None:
    report = session.report
    report.inject(what)
    report.facts["experts damaged"] = report.facts.get("experts damaged", 0) + 1


def promise_unharmed(report: Report, load: GreedyLoad, what: str) -> None:
    numbers = tally(load.outcomes)
    failed = numbers.count("refused", "broken", "late")
    report.promise(
        f"{what}: no request failed", numbers.sent > 0 and failed == 0, f"{failed} of {numbers.sent}"
    )
    promise_right(report, load.outcomes)
    report.outcomes += load.outcomes
