"""The checkpoint is replaced on disk while it is served, and a process dies: never a wrong text."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

from tests.drills.checkpoint import write_checkpoint
from tests.drills.load import GreedyLoad, tally
from tests.drills.report import Report
from tests.drills.session import EXPERTS, Session, served, undisturbed, wait_for

MAX_TOKENS = 96
WEIGHTS = "model.safetensors"
# What the service says when it refuses a process of another checkpoint.
WORDS = f"{WEIGHTS} has changed since the engine was started"


# (how the weights are replaced, who is killed then).
CASES = (
    ("renamed", EXPERTS[:1]),
    ("written", EXPERTS[:1]),
    ("renamed", EXPERTS),
    ("renamed", ("gpu",)),
    ("renamed", ("gpu", "expert-0")),
)


def run(report: Report, duration_s: float, period_s: float, streams: int) -> None:
    """Puts other weights of the same shapes over the old ones, kills processes, waits for `duration_s`."""
    for how, victims in CASES:
        with served(report, stops_well=False) as session:
            _replace(session, duration_s, period_s, streams, how, victims)


def _replace(
    session: Session, duration_s: float, period_s: float, streams: int, how: str, victims: tuple[str, ...]
) -> None:
    report, what = session.report, f"weights {how} over, {' and '.join(victims)} killed"
    cases = undisturbed(session, streams, MAX_TOKENS)
    other = write_checkpoint(session.model.with_name("other"), seed=12)
    with GreedyLoad(session.stack.base_url, cases, streams, deadline_s=duration_s + 400) as load:
        _put(other / WEIGHTS, session.model / WEIGHTS, how == "written")
        report.inject(f"weights {how} over the old ones")
        time.sleep(period_s)
        quiet = tally(list(load.outcomes))
        report.promise(f"{what}: no request fails before that", quiet.sent == quiet.count("right"))
        logged = len(session.log())
        for name in victims:
            session.send(name, signal.SIGKILL)
        ended = wait_for(lambda: session.stack.process.poll() is not None, duration_s)
        said = session.log()[logged:]
        if not ended:
            report.promise(f"{what}: not ready meanwhile", not session.ready())
            session.stack.process.terminate()
            wait_for(lambda: session.stack.process.poll() is not None, 60)
    report.outcomes += load.outcomes
    refusals = [line for line in said.splitlines() if WORDS in line]
    report.facts[f"{what}: requests"] = tally(load.outcomes).fates
    report.facts[f"{what}: status of serve"] = session.stack.process.poll() if ended else "stopped by us"
    report.facts[f"{what}: said"] = refusals[-1:]
    report.promise(f"{what}: refused by name", bool(refusals))
    wrong = tally(load.outcomes).count("wrong", "late")
    report.promise(f"{what}: no wrong text, no request without an end", wrong == 0, wrong)


def _put(new: Path, old: Path, in_place: bool) -> None:
    """Replaces the bytes of `old`, as a new file or in the same one."""
    if in_place:
        shutil.copyfile(new, old)
        return
    shutil.copyfile(new, old.with_suffix(".new"))
    old.with_suffix(".new").rename(old)
