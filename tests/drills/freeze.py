"""SIGSTOP of each process in turn while greedy streams run: what stays frozen is replaced, nothing hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import psutil

from tests.drills.load import GreedyLoad, Outcome, tally
from tests.drills.report import Report
from tests.drills.session import EXPERTS, Session, promise_right, served, serves_again, undisturbed, wait_for

MAX_TOKENS = 96
# Frozen for this part of `hang_timeout_s`, a process is left alone.
BRIEF = 0.4
# From being taken for hung to serving again: a start of Python and torch, on a busy machine.
START_S = 60.0
# Requests during whose life this process is frozen do not fail.
SURVIVED = (*EXPERTS, "supervisor")
TARGETS = (*EXPERTS, "gpu", "gateway", "prompts", "supervisor")


def run(report: Report, duration_s: float, period_s: float, streams: int, hang_timeout_s: float) -> None:
    """Freezes each process briefly and then for `duration_s` seconds, with pauses of `period_s`.

    A process that the supervisor replaces meanwhile is never continued.
    """
    with served(report, "--hang-timeout-s", f"{hang_timeout_s:g}") as session:
        cases = undisturbed(session, streams, MAX_TOKENS)
        # Nothing may take longer than a hang, its replacement and a request together.
        limit_s = hang_timeout_s * 2 + START_S + duration_s
        with GreedyLoad(session.stack.base_url, cases, streams, deadline_s=limit_s) as load:
            for name in TARGETS:
                for seconds in (BRIEF * hang_timeout_s, duration_s):
                    if session.stack.process.poll() is not None:
                        break
                    _freeze(session, load, name, seconds, hang_timeout_s)
                    time.sleep(period_s)
        report.outcomes = load.outcomes
        promise_right(report, report.outcomes)
        report.promise("ready at the end", wait_for(session.ready, START_S))


def _freeze(session: Session, load: GreedyLoad, name: str, seconds: float, hang_timeout_s: float) -> None:
    """One process, for so long; judges what happened meanwhile."""
    report, what = session.report, f"{name} frozen for {seconds:g} s"
    begun = time.monotonic()
    victim = session.send(name, signal.SIGSTOP)
    if victim is None:
        report.promise(f"{what}: it was there", False)
        return
    gone = wait_for(lambda: not victim.is_running() or _is_dead(victim), seconds)
    replaced_s = time.monotonic() - begun
    if not gone:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGCONT)
    after = time.monotonic()
    again_s = serves_again(load, after, hang_timeout_s + START_S)
    overlapping = [one for one in list(load.outcomes) if one.started + one.seconds >= begun]
    report.facts[what] = _words(gone, replaced_s, again_s, overlapping)
    report.promise(f"{what}: serves again", again_s is not None)
    if name == "prompts":  # the gateway's own: its limits are longer than a hang of the gateway would be
        return
    if seconds > 2 * hang_timeout_s - 1 and name != "supervisor":
        # Looks come every tenth of the time and take a fifth of it; the machine may be busy.
        in_time = gone and replaced_s <= 1.5 * hang_timeout_s + 5
        report.promise(f"{what}: replaced", in_time, f"{replaced_s:.0f} s")
    if seconds < hang_timeout_s:
        report.promise(f"{what}: not replaced", not gone)
    if name in SURVIVED or (seconds < hang_timeout_s):
        failed = tally(overlapping).count("refused", "broken", "late")
        report.promise(f"{what}: no request failed", failed == 0, failed)


def _is_dead(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _words(gone: bool, replaced_s: float, again_s: float | None, overlapping: list[Outcome]) -> str:
    numbers = tally(overlapping)
    what = f"replaced after {replaced_s:.1f} s" if gone else "continued"
    back = "never served again" if again_s is None else f"served {again_s:.1f} s later"
    return f"{what}, {back}; requests meanwhile {numbers.fates}, slowest {numbers.slowest_s:.1f} s"
