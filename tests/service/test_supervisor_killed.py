"""Guards the clean-up after `kill -9` of the supervisor: children die, the next start removes the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moebius.app.supervisor.runfile import RunDirectory, clean_up_stale, start_ticks
from moebius.app.supervisor.supervisor import Supervisor
from moebius.errors import StartupError
from tests.helpers.fake_programs import OBEDIENT, QUICK, alive, plan, spec, wait_until

ROOT = Path(__file__).resolve().parents[2]
SEGMENT = f"moebius-test-killed-{os.getpid()}"

SUPERVISOR_PROGRAM = """
import sys
from pathlib import Path
from moebius.app.supervisor.supervisor import Supervisor
from tests.helpers.fake_programs import OBEDIENT, QUICK, plan, spec
directory, segment = Path(sys.argv[1]), sys.argv[2]
with Supervisor(plan(directory, spec("gpu", OBEDIENT, directory), segment=segment), QUICK) as supervisor:
    supervisor.wait_ready()
    (directory / "up").touch()
    supervisor.run()
"""


def killed_supervisor(tmp_path: Path) -> list[int]:
    """Runs a supervisor in a process of its own, kills it with SIGKILL; returns its children's pids."""
    command = [sys.executable, "-c", SUPERVISOR_PROGRAM, str(tmp_path), SEGMENT]
    with subprocess.Popen(command, cwd=ROOT) as process:
        wait_until((tmp_path / "up").exists, 20)
        document = json.loads((tmp_path / "run" / "run.json").read_text())
        process.kill()
    return [entry["pid"] for entry in document["processes"]]


def test_children_die_with_the_supervisor(tmp_path: Path) -> None:
    """No child outlives a killed supervisor; shared memory does, until the next start takes it away."""
    children = killed_supervisor(tmp_path)
    wait_until(lambda: not any(alive(pid) for pid in children))
    assert Path("/dev/shm", SEGMENT).exists()
    with Supervisor(plan(tmp_path, spec("gpu", OBEDIENT, tmp_path)), QUICK) as supervisor:
        assert not Path("/dev/shm", SEGMENT).exists()
        assert supervisor.wait_ready()


def test_stale_directories_of_other_ports_are_cleaned(tmp_path: Path) -> None:
    """A start cleans the run directory of any dead supervisor of the same state directory."""
    killed_supervisor(tmp_path)
    assert clean_up_stale(tmp_path) == ["run"]
    assert not Path("/dev/shm", SEGMENT).exists()
    assert not (tmp_path / "run").exists()
    assert clean_up_stale(tmp_path) == []


def test_survivor_is_killed_and_a_reused_pid_is_not(tmp_path: Path) -> None:
    """Of two recorded pids, the one with the recorded start time dies, a stranger that reused a pid lives."""
    sleep = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
    with subprocess.Popen(sleep) as survivor, subprocess.Popen(sleep) as stranger:
        run = tmp_path / "serve-1"
        run.mkdir()
        entries = [
            {"name": "gpu", "pid": survivor.pid, "start_ticks": start_ticks(survivor.pid)},
            {"name": "expert-0", "pid": stranger.pid, "start_ticks": (start_ticks(stranger.pid) or 0) - 1},
        ]
        document = {"supervisor": {"pid": 1}, "processes": entries, "segments": []}
        (run / "run.json").write_text(json.dumps(document))
        clean_up_stale(tmp_path)
        assert survivor.wait(10) == -9
        assert stranger.poll() is None
        stranger.kill()


def test_living_supervisor_is_left_alone(tmp_path: Path) -> None:
    """Cleaning up touches nothing of a supervisor that still runs."""
    with Supervisor(plan(tmp_path, spec("gpu", OBEDIENT, tmp_path)), QUICK) as supervisor:
        supervisor.wait_ready()
        pid = supervisor.processes[0].pid
        assert clean_up_stale(tmp_path) == []
        assert supervisor.processes[0].pid == pid


def test_damaged_run_file_is_named(tmp_path: Path) -> None:
    """A run file that can not be read is an error that names it, not a silent loss of what it listed."""
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(StartupError, match=r"run\.json is damaged"):
        RunDirectory(tmp_path)
