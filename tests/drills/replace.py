"""The checkpoint is replaced on disk while it is served, and an expert server dies: never a wrong text."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

from tests.drills.checkpoint import write_checkpoint
from tests.drills.load import GreedyLoad, tally
from tests.drills.report import Report
from tests.drills.session import EXPERTS, Session, promise_right, served, undisturbed, wait_for

MAX_TOKENS = 96
# What the service says when it refuses a server of another checkpoint.
WORDS = ("refus", "differ", "another")
WEIGHTS = "model.safetensors"


def run(report: Report, duration_s: float, period_s: float, streams: int) -> None:
    """Puts other weights of the same shapes in place, kills an expert server, waits for `duration_s`.

    Done twice: by renaming a new file over the old one, and by writing into the old one.
    """
    for in_place in (False, True):
        with served(report, stops_well=False) as session:
            _replace(session, duration_s, period_s, streams, in_place)


def _replace(session: Session, duration_s: float, period_s: float, streams: int, in_place: bool) -> None:
    report, how = session.report, "written over" if in_place else "renamed over"
    cases = undisturbed(session, streams, MAX_TOKENS)
    other = write_checkpoint(session.model.with_name("other"), seed=12)
    with GreedyLoad(session.stack.base_url, cases, streams, deadline_s=duration_s + 400) as load:
        _put(other / WEIGHTS, session.model / WEIGHTS, in_place)
        report.inject(f"weights {how} the old ones")
        time.sleep(period_s)
        quiet = tally(list(load.outcomes))
        report.promise(f"{how}: no request fails before a server dies", quiet.sent == quiet.count("right"))
        logged = len(session.log())
        session.send(EXPERTS[0], signal.SIGKILL)
        ended = wait_for(lambda: session.stack.process.poll() is not None, duration_s)
        said = session.log()[logged:]
        if not ended:
            ready = session.ready()
            report.promise(f"{how}: not ready without its experts", not ready, ready)
            session.stack.process.terminate()
            wait_for(lambda: session.stack.process.poll() is not None, 60)
    report.outcomes += load.outcomes
    refusals = [line for line in said.splitlines() if any(word in line for word in WORDS)]
    report.facts[f"{how}: serve ended by itself"] = session.stack.process.poll() if ended else "no"
    report.facts[f"{how}: said"] = refusals[:3] + refusals[-1:]
    named = any(str(session.model) in line or WEIGHTS in line for line in refusals)
    report.promise(f"{how}: the refusal names the checkpoint", named)
    promise_right(report, load.outcomes)


def _put(new: Path, old: Path, in_place: bool) -> None:
    """Replaces the bytes of `old`, as a new file or in the same one."""
    if in_place:
        shutil.copyfile(new, old)
        return
    shutil.copyfile(new, old.with_suffix(".new"))
    old.with_suffix(".new").rename(old)
