"""Guards the supervisor's promises on small programs: what dies comes back, what stops is gone, in order."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from app.supervisor import process as process_module
from app.supervisor.health import Plan
from app.supervisor.runfile import RunDirectory
from app.supervisor.supervisor import Supervisor
from moebius.errors import ProcessFailed, StartupError
from tests.helpers.fake_programs import (
    FAILING,
    OBEDIENT,
    QUICK,
    STUBBORN,
    FileProbe,
    alive,
    plan,
    spec,
)
from tests.helpers.stack import ROOT
from tests.helpers.waiting import wait_until

SEGMENT = f"moebius-test-{os.getpid()}"


@pytest.fixture
def trio(tmp_path: Path) -> Plan:
    """Returns a gateway, an engine and an expert server in miniature, and one shared-memory segment."""
    return plan(
        tmp_path,
        spec("expert", OBEDIENT, tmp_path, stop_stage=2),
        spec("gpu", OBEDIENT, tmp_path, stop_stage=1),
        spec("gateway", OBEDIENT, tmp_path, stop_stage=0),
        segment=SEGMENT,
    )


def pids(supervisor: Supervisor) -> list[int]:
    """Returns the running children."""
    return [process.pid for process in supervisor.processes if process.pid is not None]


def test_starts_all_and_leaves_nothing(trio: Plan) -> None:
    """After the end no process, no shared memory and no run directory is left."""
    with Supervisor(trio, QUICK) as supervisor:
        assert supervisor.wait_ready()
        children = pids(supervisor)
        assert len(children) == 3
        assert Path("/dev/shm", SEGMENT).exists()
    assert not any(alive(pid) for pid in children)
    assert not Path("/dev/shm", SEGMENT).exists()
    assert not trio.directory.exists()


@pytest.mark.parametrize("error", [BrokenPipeError(32, "EPIPE"), OSError(28, "ENOSPC"), ValueError("closed")])
@pytest.mark.parametrize("state", ["starting", "ready", "stopped"])
def test_an_output_that_fails_leaves_nothing(trio: Plan, state: str, error: Exception) -> None:
    """The display of what happens may fail (a pipe without a reader, a full disk), from whatever
    moment on: no process, no shared memory, no run directory and no signal handler of ours is left."""
    former = signal.getsignal(signal.SIGTERM)
    broken: list[str] = []
    children: list[int] = []

    def show(_name: str, now: str) -> None:
        children.extend(pids(supervisor))
        if broken or now == state:
            broken.append(now)
            raise error

    supervisor = Supervisor(trio, QUICK, show)
    with contextlib.ExitStack() as stack:
        if state != "stopped":
            stack.enter_context(pytest.raises(type(error)))
        with supervisor:
            supervisor.wait_ready()
    assert broken[0] == state
    assert not any(alive(pid) for pid in children)
    assert not Path("/dev/shm", SEGMENT).exists()
    assert not trio.directory.exists()
    assert signal.getsignal(signal.SIGTERM) is former


# What `moebius serve` does about a start, on small programs; argv: a directory, the segment's name.
SHOWN_START = """
import sys
from pathlib import Path
from app.commands.running import LineView
from app.exits import exit_with
from app.supervisor.supervisor import Supervisor
from tests.helpers.fake_programs import OBEDIENT, QUICK, plan, spec
directory = Path(sys.argv[1])
def run():
    specs = [spec(name, OBEDIENT, directory) for name in ("a", "b", "c")]
    trio = plan(directory, *specs, segment=sys.argv[2])
    view = LineView(lambda line: print(line, file=sys.stderr, flush=True))
    with Supervisor(trio, QUICK, view.on_event, view.on_waiting) as supervisor:
        supervisor.wait_ready()
        print("Ready:", *(process.pid for process in supervisor.processes), flush=True)
        supervisor.run()
exit_with(run)
"""


@pytest.mark.parametrize(
    ("redirected", "statuses"),
    [
        (">/dev/full", (2,)),
        (">/dev/full 2>&1", (2,)),
        ("2>&1 | head -1", (141,)),
        ("2>&1 | head -4", (141,)),
        ("| true", (141,)),
    ],
)
def test_shells_that_take_the_output_away(tmp_path: Path, redirected: str, statuses: tuple[int, ...]) -> None:
    """`serve >/dev/full`, `serve | head`: it ends with a status that says so, and cleans up."""
    name = f"{SEGMENT}-shell"
    program = f"{sys.executable} -c {shlex.quote(SHOWN_START)} {tmp_path} {name}"
    command = f"{program} {redirected}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, timeout=120, capture_output=True, text=True)
    assert done.returncode in statuses, done.stderr
    assert "Traceback" not in done.stderr
    assert not Path("/dev/shm", name).exists()
    assert not plan(tmp_path, segment=name).directory.exists()
    for started in ("a", "b", "c"):
        mark = tmp_path / started
        assert not mark.exists() or not alive(int(mark.read_text() or 0))


def test_stops_in_order(trio: Plan, tmp_path: Path) -> None:
    """The gateway goes first, the expert servers last, each by its own SIGTERM handler."""
    with Supervisor(trio, QUICK) as supervisor:
        supervisor.wait_ready()
    assert (tmp_path / "stopped").read_text().split() == ["gateway", "gpu", "expert"]


def test_restarts_what_was_killed_and_only_that(trio: Plan, tmp_path: Path) -> None:
    """SIGKILL of one process: a new one takes its place, the others and the segment are not touched."""
    with Supervisor(trio, QUICK) as supervisor:
        supervisor.wait_ready()
        before = pids(supervisor)
        inode = Path("/dev/shm", SEGMENT).stat().st_ino
        os.kill(before[0], signal.SIGKILL)
        (tmp_path / "expert").unlink()
        supervisor.run(until=lambda: (tmp_path / "expert").exists() and supervisor.processes[0].ready)
        after = pids(supervisor)
        assert after[0] != before[0]
        assert after[1:] == before[1:]
        assert supervisor.processes[0].restarts == 1
        assert Path("/dev/shm", SEGMENT).stat().st_ino == inode


def test_what_was_ready_is_restarted_while_others_load(tmp_path: Path) -> None:
    """An engine may load for minutes; an expert server that is killed meanwhile does not end the start, but
    once: one that dies again and again shows an error."""
    slow = replace(spec("gpu", OBEDIENT, tmp_path), probe=FileProbe(tmp_path / "loaded"))
    with Supervisor(plan(tmp_path, spec("expert", OBEDIENT, tmp_path), slow), QUICK) as supervisor:
        expert = supervisor.processes[0]

        def kill_when_ready(restarts: int) -> None:
            wait_until(lambda: expert.ready and expert.restarts == restarts)
            os.kill(expert.pid or 0, signal.SIGKILL)

        def kill_once() -> None:
            kill_when_ready(0)
            wait_until(lambda: expert.ready and expert.restarts == 1)
            (tmp_path / "loaded").write_text("1")

        helper = threading.Thread(target=kill_once)
        helper.start()
        assert supervisor.wait_ready()
        helper.join()
        assert expert.restarts == 1
    (tmp_path / "loaded").unlink()
    with Supervisor(plan(tmp_path, spec("expert", OBEDIENT, tmp_path), slow), QUICK) as supervisor:
        expert = supervisor.processes[0]
        helper = threading.Thread(target=lambda: [kill_when_ready(restarts) for restarts in (0, 1)])
        helper.start()
        with pytest.raises(ProcessFailed, match="expert could not start: killed by SIGKILL"):
            supervisor.wait_ready()
        helper.join()


def test_a_full_directory_does_not_end_what_serves(trio: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run file that cannot be written is logged; the dead process is restarted all the same."""
    with Supervisor(trio, QUICK) as supervisor:
        supervisor.wait_ready()

        def full(*arguments: object) -> None:
            raise StartupError("No space left on device")

        monkeypatch.setattr(RunDirectory, "record", full)
        os.kill(supervisor.processes[0].pid or 0, signal.SIGKILL)
        supervisor.run(until=lambda: supervisor.processes[0].restarts == 1)


def test_signal_ends_run(trio: Plan) -> None:
    """SIGTERM to the supervisor ends `run`; the former handler is back afterwards."""
    former = signal.getsignal(signal.SIGTERM)
    with Supervisor(trio, QUICK) as supervisor:
        supervisor.wait_ready()
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        supervisor.run()
        assert supervisor.stopping
    assert signal.getsignal(signal.SIGTERM) is former


def test_an_ignored_hangup_stays_ignored(trio: Plan) -> None:
    """Under nohup SIGHUP does not end us; where it was not ignored it does."""
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Supervisor(trio, QUICK) as supervisor:
            os.kill(os.getpid(), signal.SIGHUP)
            assert supervisor.wait_ready()
            assert not supervisor.stopping
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with Supervisor(trio, QUICK) as supervisor:
            os.kill(os.getpid(), signal.SIGHUP)
            supervisor.run()
            assert supervisor.stopping
    finally:
        signal.signal(signal.SIGHUP, former)


def test_stubborn_process_is_killed_with_its_children(tmp_path: Path) -> None:
    """What ignores SIGTERM is killed after the grace, with everything in its process group."""
    with Supervisor(plan(tmp_path, spec("stubborn", STUBBORN, tmp_path)), QUICK) as supervisor:
        supervisor.wait_ready()
        family = [int(pid) for pid in (tmp_path / "stubborn").read_text().split()]
        assert all(alive(pid) for pid in family)
    wait_until(lambda: not any(alive(pid) for pid in family))


def test_failure_before_ready_is_reported_once(tmp_path: Path) -> None:
    """A process that ends during start-up stops the start with its own last words, without restarts."""
    failing = replace(spec("gpu", FAILING, tmp_path), probe=FileProbe(tmp_path / "never"))
    other = spec("gateway", OBEDIENT, tmp_path)
    message = r"^gpu could not start: exit code 1, after it logged: no such weights: layer 3\n"
    with (
        Supervisor(plan(tmp_path, failing, other), QUICK) as supervisor,
        pytest.raises(StartupError, match=message),
    ):
        supervisor.wait_ready()
    assert (tmp_path / "gpu").read_text().count("started") == 1


@pytest.mark.parametrize("kills", [0, 1])
def test_a_process_that_memory_was_too_small_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    """The kernel's SIGKILL leaves no words of the process: its count of them says why."""
    counted = iter([5])
    monkeypatch.setattr(process_module, "out_of_memory_kills", lambda: next(counted, 5 + kills))
    never = FileProbe(tmp_path / "never")
    killed = replace(spec("gpu", FAILING, tmp_path), command=("/bin/sh", "-c", "kill -9 $$"), probe=never)
    with (
        Supervisor(plan(tmp_path, killed), QUICK) as supervisor,
        pytest.raises(StartupError, match=r"^gpu could not start: killed by SIGKILL") as failure,
    ):
        supervisor.wait_ready()
    assert ("as memory ran out" in str(failure.value)) == (kills > 0)


def test_pauses_between_restarts_grow_to_the_limit(tmp_path: Path) -> None:
    """A process that keeps dying is started again after doubling pauses, never longer than the limit;

    at most half of a pause is left to chance.
    """
    # To a probe that finds it ready in its short life it would have served.
    dying = replace(spec("gpu", FAILING, tmp_path), probe=FileProbe(tmp_path / "never"))
    with Supervisor(plan(tmp_path, dying), QUICK) as supervisor:
        process = supervisor.processes[0]
        pauses = []
        for _ in range(5):
            wait_until(lambda: process.exit_code is not None)
            pauses.append(process.note_exit(now=0.0))
            assert not process.restart_if_due(now=pauses[-1] * 0.99)
            assert process.restart_if_due(now=pauses[-1])
    for pause, longest in zip(pauses, (0.02, 0.04, 0.08, 0.1, 0.1), strict=True):
        assert longest / 2 <= pause <= longest


def test_not_ready_in_time_names_the_process(tmp_path: Path) -> None:
    """The ready timeout says which process was late, and stops all."""
    silent = spec("gpu", "import signal; signal.pause()", tmp_path)
    impatient = replace(QUICK, ready_timeout_s=0.2)
    with Supervisor(plan(tmp_path, silent), impatient) as supervisor:
        children = pids(supervisor)
        with pytest.raises(StartupError, match=r"ready_timeout_s\): gpu$"):
            supervisor.wait_ready()
    assert not any(alive(pid) for pid in children)


def test_output_is_forwarded_with_the_process_name(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Lines of a child reach our stderr with its name before them."""
    with Supervisor(plan(tmp_path, spec("gpu", OBEDIENT, tmp_path)), QUICK) as supervisor:
        supervisor.wait_ready()
    assert b"gpu      | hello from gpu\n" in capfdbinary.readouterr().err


def test_second_supervisor_is_refused(trio: Plan) -> None:
    """One run directory has one supervisor; the error names the one that runs."""
    with Supervisor(trio, QUICK), pytest.raises(StartupError, match=f"pid {os.getpid()}"):
        Supervisor(trio, QUICK)


def test_a_cause_is_reported_once_and_last(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """What a process says of its own failure is not among its log lines, but the error, with what to do."""
    program = "import sys; print('loading'); sys.exit('moebius: error: no such weights: layer 3')"
    failing = replace(spec("gpu", program, tmp_path), probe=FileProbe(tmp_path / "never"))
    message = r"^gpu could not start: no such weights: layer 3\n  Fix that and start again"
    with (
        Supervisor(plan(tmp_path, failing), QUICK) as supervisor,
        pytest.raises(ProcessFailed, match=message),
    ):
        supervisor.wait_ready()
    log = capfdbinary.readouterr().err
    assert b"gpu      | loading\n" in log
    assert b"no such weights" not in log


# Goes on after the first SIGTERM, as one does that waits for its requests; notes its end at the second.
DRAINING = OBEDIENT.replace(
    "def stop(*_):", "def stop(*_):\n    signal.signal(signal.SIGTERM, end)\ndef end(*_):"
)


def test_a_drain_that_can_not_end_well_is_hurried(tmp_path: Path) -> None:
    """With an expert server gone for good, the gateway is signalled a second time, long before it is
    killed.
    """
    processes = (spec("expert", OBEDIENT, tmp_path, stop_stage=2), spec("gateway", DRAINING, tmp_path))
    with Supervisor(plan(tmp_path, *processes), replace(QUICK, stop_timeout_s=600)) as supervisor:
        supervisor.wait_ready()
        os.kill(int((tmp_path / "expert").read_text()), signal.SIGKILL)
        wait_until(lambda: supervisor.processes[0].exit_code is not None)
    assert (tmp_path / "stopped").read_text().split() == ["gateway"]
    assert supervisor.processes[1].exit_code == 0
