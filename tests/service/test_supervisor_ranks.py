"""Guards that ranks live and die together: one killed brings all down, and all come back together."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from app.supervisor import supervisor as supervisor_module
from app.supervisor.health import ProcessSpec
from app.supervisor.supervisor import Supervisor
from moebius.errors import PEER_LOST_EXIT, StartupError
from tests.helpers.fake_programs import OBEDIENT, QUICK, FileProbe, plan, spec

# Ends, as a rank does, when the process whose pid is in the file argv[2] is gone.
FOLLOWER = f"""
import os, pathlib, sys, time
mark, leader = map(pathlib.Path, sys.argv[1:])
while not leader.exists() or not leader.read_text():
    time.sleep(0.01)
pid = int(leader.read_text())
mark.write_text(str(os.getpid()))
while True:
    time.sleep(0.01)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        print("the group of ranks ends: rank 0", flush=True)
        sys.exit({PEER_LOST_EXIT})
"""
# Says why it cannot start, a little after those that follow it have ended.
CULPRIT = "import sys, time; time.sleep(0.3); sys.exit('rank 0 has no weights')"
VICTIM = f"import sys; print('another rank is gone', flush=True); sys.exit({PEER_LOST_EXIT})"


def follower(marks: Path) -> ProcessSpec:
    """Returns a rank that notices rank 0's end by itself."""
    base = spec("gpu-1", FOLLOWER, marks, stop_stage=1)
    return replace(base, command=(*base.command, str(marks / "gpu")), group="ranks")


def restarted(supervisor: Supervisor, before: list[int | None]) -> list[int | None]:
    """Returns the pids of the ranks once both run again."""
    names = ("gpu", "gpu-1")
    ranks = [process for process in supervisor.processes if process.spec.name in names]

    def back() -> bool:
        return all(p.pid not in (None, old) and p.ready for p, old in zip(ranks, before, strict=True))

    end = time.monotonic() + 60
    supervisor.run(until=lambda: back() or time.monotonic() > end)
    assert back(), "the group did not come back"
    return [process.pid for process in ranks]


def test_one_rank_killed_restarts_all_of_them(tmp_path: Path) -> None:
    """Rank 0 dies, the other notices and ends; both start again, no other process does."""
    leader = replace(spec("gpu", OBEDIENT, tmp_path), group="ranks")
    other = spec("expert", OBEDIENT, tmp_path, stop_stage=2)
    with Supervisor(plan(tmp_path, leader, follower(tmp_path), other), QUICK) as supervisor:
        assert supervisor.wait_ready()
        before = [process.pid for process in supervisor.processes]
        (tmp_path / "gpu").unlink()
        (tmp_path / "gpu-1").unlink()
        os.kill(before[0] or 0, signal.SIGKILL)
        restarted(supervisor, before[:2])
        assert supervisor.processes[2].pid == before[2]
        assert [process.restarts for process in supervisor.processes] == [1, 1, 0]


def test_a_rank_that_does_not_notice_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the grace the survivors of a dead rank are ended, so that the group can start."""
    monkeypatch.setattr(supervisor_module, "GROUP_GRACE_S", 0.2)
    ranks = [replace(spec(name, OBEDIENT, tmp_path), group="ranks") for name in ("gpu", "gpu-1")]
    with Supervisor(plan(tmp_path, *ranks), QUICK) as supervisor:
        assert supervisor.wait_ready()
        before = [process.pid for process in supervisor.processes]
        os.kill(before[1] or 0, signal.SIGKILL)
        restarted(supervisor, before)


def test_the_rank_that_failed_first_is_blamed(tmp_path: Path) -> None:
    """At start the message is the culprit's, though those who follow it ended earlier."""
    never = FileProbe(tmp_path / "never")
    programs = {"gpu-1": VICTIM, "gpu": CULPRIT}
    ranks = [
        ProcessSpec(name, (sys.executable, "-S", "-c", program), never, 0, group="ranks")
        for name, program in programs.items()
    ]
    with (
        Supervisor(plan(tmp_path, *ranks), QUICK) as supervisor,
        pytest.raises(StartupError, match=r"^gpu could not start: .*rank 0 has no weights"),
    ):
        supervisor.wait_ready()
