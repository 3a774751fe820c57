"""Guards that a frozen process is replaced, in start-up and later, and that no other is touched."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from app.supervisor import process as process_module
from app.supervisor import supervisor as supervisor_module
from app.supervisor.health import Liveness, ProcessSpec
from app.supervisor.process import MOST_CREDIT, USER_ERRORS_ALLOWED, ManagedProcess
from app.supervisor.supervisor import Supervisor
from moebius.errors import USER_ERROR_EXIT, StartupError
from tests.helpers.fake_programs import OBEDIENT, QUICK, FileProbe, plan, spec
from tests.helpers.waiting import wait_until

# Beats ten times a second into the file argv[1] + ".beat".
BEATING = """
import itertools, os, pathlib, sys, time
mark = pathlib.Path(sys.argv[1])
for beat in itertools.count(1):
    pathlib.Path(f"{mark}.beat").write_text(f"{os.getpid()} {beat}")
    mark.write_text(str(os.getpid()))
    time.sleep(0.1)
"""
# Beats once, then only computes.
COMPUTING = """
import os, pathlib, sys
mark = pathlib.Path(sys.argv[1])
pathlib.Path(f"{mark}.beat").write_text("1")
mark.write_text(str(os.getpid()))
while True: pass
"""
# Is ready once, and from then on ends like a process whose settings a user has to fix.
BROKEN = f"""
import os, pathlib, sys
mark = pathlib.Path(sys.argv[1])
starts = pathlib.Path(f"{{mark}}.starts")
first = not starts.exists()
with starts.open("a") as file:
    file.write("started\\n")
mark.write_text(str(os.getpid()) if first else "")
while first: pass
print("moebius: error: no such checkpoint: /models/gone", flush=True)
sys.exit({USER_ERROR_EXIT})
"""
# A process that beats may lack a processor for as long.
HASTY = replace(QUICK, hang_timeout_s=3.0)


@dataclass(frozen=True)
class FileLiveness(Liveness):
    """The content of a file."""

    path: Path

    def sign(self, pid: int, timeout_s: float) -> object:
        """None while there is none."""
        return self.path.read_text() or None if self.path.exists() else None


def beating(name: str, program: str, marks: Path) -> ProcessSpec:
    """Returns a process with a heartbeat file."""
    return replace(spec(name, program, marks), liveness=FileLiveness(marks / f"{name}.beat"))


def replaced(supervisor: Supervisor, process: ManagedProcess, former: int | None) -> None:
    """Runs the supervisor until the process has another pid and is ready."""

    def is_back() -> bool:
        return process.ready and process.pid not in (None, former)

    end = time.monotonic() + 60
    supervisor.run(lambda: is_back() or time.monotonic() > end)
    assert is_back()


def test_a_stopped_process_is_replaced_and_named(tmp_path: Path) -> None:
    """SIGSTOP: killed, started again, said in one line with pid and seconds; its neighbour lives on."""
    processes = [beating(name, BEATING, tmp_path) for name in ("expert-0", "expert-1")]
    with Supervisor(plan(tmp_path, *processes), HASTY) as supervisor, capture_logs() as logs:
        assert supervisor.wait_ready()
        frozen, neighbour = supervisor.processes
        pid, other = frozen.pid, neighbour.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        replaced(supervisor, frozen, pid)
        assert (neighbour.pid, neighbour.restarts) == (other, 0)
    lines = [line for line in logs if line["log_level"] == "warning"]
    assert len(lines) == 1, lines
    assert (lines[0]["name"], lines[0]["pid"]) == ("expert-0", pid)
    assert lines[0]["silent_s"] >= HASTY.hang_timeout_s
    assert "SIGSTOP" in lines[0]["why"]
    assert "killed it, restarting" in lines[0]["event"]


def test_a_stopped_rank_is_replaced_with_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that answers no probe is seen to be stopped; the whole group starts again."""
    monkeypatch.setattr(supervisor_module, "GROUP_GRACE_S", 0.2)
    ranks = [replace(spec(name, OBEDIENT, tmp_path), group="ranks") for name in ("gpu", "gpu-1")]
    ranks[0] = replace(ranks[0], probe=FileProbe(tmp_path / "gpu-1"))
    with Supervisor(plan(tmp_path, *ranks), HASTY) as supervisor:
        assert supervisor.wait_ready()
        leader, follower = supervisor.processes
        former = (leader.pid, follower.pid)
        os.kill(former[1] or 0, signal.SIGSTOP)
        replaced(supervisor, follower, former[1])
        replaced(supervisor, leader, former[0])


def test_who_computes_is_left_alone(tmp_path: Path) -> None:
    """No heartbeat for three times the limit, but CPU time: a long computation."""
    busy = beating("expert-0", COMPUTING, tmp_path)
    with Supervisor(plan(tmp_path, busy), HASTY) as supervisor:
        assert supervisor.wait_ready()
        end = time.monotonic() + 3 * HASTY.hang_timeout_s
        supervisor.run(lambda: time.monotonic() > end)
        assert supervisor.processes[0].restarts == 0


def test_a_process_stopped_while_it_starts_is_noticed(tmp_path: Path) -> None:
    """The process is noticed long before ready_timeout_s, with its name; a stop of the whole does not wait
    for it either.
    """
    frozen = spec("gpu", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", tmp_path)
    begin = time.monotonic()
    with (
        Supervisor(plan(tmp_path, frozen), replace(HASTY, ready_timeout_s=600)) as supervisor,
        pytest.raises(StartupError, match=r"gpu \(pid \d+\) hangs: no sign of life .*SIGSTOP"),
    ):
        supervisor.wait_ready()
    assert time.monotonic() - begin < 60


def test_a_stopped_process_can_still_stop_in_order(tmp_path: Path) -> None:
    """Asked to stop, it is let run, so that it ends by its own handler."""
    with Supervisor(plan(tmp_path, spec("gpu", OBEDIENT, tmp_path)), QUICK) as supervisor:
        assert supervisor.wait_ready()
        os.kill(supervisor.processes[0].pid or 0, signal.SIGSTOP)
    assert (tmp_path / "stopped").read_text().split() == ["gpu"]


def test_a_restart_that_never_gets_ready_is_repeated(tmp_path: Path) -> None:
    """The time to get ready counts after a restart, too."""
    probe = FileProbe(tmp_path / "gate")
    (tmp_path / "gate").write_text("open")
    impatient = replace(QUICK, ready_timeout_s=0.5)
    gated = replace(spec("gpu", OBEDIENT, tmp_path), probe=probe)
    with Supervisor(plan(tmp_path, gated), impatient) as supervisor, capture_logs() as logs:
        assert supervisor.wait_ready()
        (tmp_path / "gate").write_text("")
        process = supervisor.processes[0]
        os.kill(process.pid or 0, signal.SIGKILL)
        supervisor.run(lambda: process.restarts > 1)
    assert any("ready_timeout_s allows 0.5 s" in str(line.get("why")) for line in logs)


def test_who_has_served_returns_at_once(tmp_path: Path) -> None:
    """However often it is killed, and however soon after that."""
    timing = replace(HASTY, restart_backoff_s=600, restart_backoff_max_s=600)
    with Supervisor(plan(tmp_path, beating("gpu", BEATING, tmp_path)), timing) as supervisor:
        assert supervisor.wait_ready()
        process = supervisor.processes[0]
        for _ in range(MOST_CREDIT + 2):
            wait_until(lambda: process.has_served)
            former = process.pid
            (tmp_path / "gpu").unlink()
            os.kill(former or 0, signal.SIGKILL)
            wait_until(lambda: process.exit_code is not None)
            assert process.note_exit(time.monotonic()) == 0.0
            assert process.restart_if_due(time.monotonic())
            replaced(supervisor, process, former)


def test_gives_up_on_what_only_a_user_can_mend(tmp_path: Path) -> None:
    """After too many failed restarts in a row the end says which process, its own words, and what to do."""
    processes = [spec("expert-0", BROKEN, tmp_path), spec("gateway", OBEDIENT, tmp_path)]
    with Supervisor(plan(tmp_path, *processes), QUICK) as supervisor:
        assert supervisor.wait_ready()
        (tmp_path / "expert-0").unlink()  # it is not taken for ready again
        os.kill(supervisor.processes[0].pid or 0, signal.SIGKILL)
        with pytest.raises(StartupError, match=r"\(exit code 2\): no such .*/gone; fix that"):
            supervisor.run()
    assert (tmp_path / "expert-0.starts").read_text().count("started") == 1 + USER_ERRORS_ALLOWED


def test_other_failures_are_tried_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash may heal: however often it happens, the process is started again."""
    monkeypatch.setattr(process_module, "USER_ERRORS_ALLOWED", 1)
    program = BROKEN.replace(f"sys.exit({USER_ERROR_EXIT})", "sys.exit(1)")
    with Supervisor(plan(tmp_path, spec("expert-0", program, tmp_path)), QUICK) as supervisor:
        assert supervisor.wait_ready()
        process = supervisor.processes[0]
        os.kill(process.pid or 0, signal.SIGKILL)
        supervisor.run(lambda: process.restarts >= 4)
