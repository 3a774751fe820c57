"""Guards the clean-up after `kill -9` of the supervisor: children die, the next start removes the rest."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from app.supervisor import runfile
from app.supervisor.runfile import RunDirectory, clean_up_stale, own_state_directory, start_ticks
from app.supervisor.supervisor import Supervisor
from moebius.errors import StartupError
from tests.helpers.fake_programs import OBEDIENT, QUICK, alive, plan, spec
from tests.helpers.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
SEGMENT = f"moebius-test-killed-{os.getpid()}"

SUPERVISOR_PROGRAM = """
import sys
from pathlib import Path
from app.supervisor.supervisor import Supervisor
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
        wait_until((tmp_path / "up").exists)
        document = json.loads((tmp_path / "run" / "run.json").read_text())
        process.kill()
    return [entry["pid"] for entry in document["processes"]]


@contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing."""
    with subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"]) as process:
        try:
            yield process
        finally:
            process.kill()


def crafted(state_dir: Path, document: object) -> Path:
    """Returns a run file as a killed supervisor leaves it, but with this content."""
    run = state_dir / "serve-1"
    run.mkdir(mode=0o700, parents=True)
    (run / "run.json").write_text(json.dumps(document))
    return run / "run.json"


def listing(process: subprocess.Popen[bytes], **changes: object) -> dict[str, object]:
    """Returns a run file's content that names that process."""
    entry = {"name": "gpu", "pid": process.pid, "start_ticks": start_ticks(process.pid)}
    return {"supervisor": {"pid": 1}, "processes": [entry], "segments": [], **changes}


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
    """The recorded pid with the recorded start time dies, a stranger that reused a pid lives."""
    with sleeping() as survivor, sleeping() as stranger:
        entries = [
            {"name": "gpu", "pid": survivor.pid, "start_ticks": start_ticks(survivor.pid)},
            {"name": "expert-0", "pid": stranger.pid, "start_ticks": (start_ticks(stranger.pid) or 0) - 1},
        ]
        crafted(tmp_path, {"supervisor": {"pid": 1}, "processes": entries, "segments": []})
        clean_up_stale(tmp_path)
        assert survivor.wait(60) == -9
        assert stranger.poll() is None


def test_living_supervisor_is_left_alone(tmp_path: Path) -> None:
    """Cleaning up touches nothing of a supervisor that still runs."""
    with Supervisor(plan(tmp_path, spec("gpu", OBEDIENT, tmp_path)), QUICK) as supervisor:
        supervisor.wait_ready()
        pid = supervisor.processes[0].pid
        assert clean_up_stale(tmp_path) == []
        assert supervisor.processes[0].pid == pid


def test_damaged_run_file_is_named(tmp_path: Path) -> None:
    """A run file that cannot be read is an error that names it, not a silent loss of what it listed."""
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(StartupError, match=r"run\.json is damaged"):
        RunDirectory(tmp_path)


def test_a_start_after_a_reboot_kills_no_process(tmp_path: Path) -> None:
    """Pids and start times count from the boot: after another one they mean other processes."""
    with sleeping() as stranger:
        crafted(tmp_path, listing(stranger, boot_id="another"))
        assert clean_up_stale(tmp_path) == ["serve-1"]
        assert stranger.poll() is None


def open_directory(run_file: Path) -> None:
    """Others may write in the run directory."""
    run_file.parent.chmod(0o777)


def open_file(run_file: Path) -> None:
    """Others may write the run file."""
    run_file.chmod(0o666)


def linked_file(run_file: Path) -> None:
    """The run file is somebody's file elsewhere."""
    run_file.rename(run_file.parent.parent / "elsewhere.json")
    run_file.symlink_to(run_file.parent.parent / "elsewhere.json")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (open_directory, r"serve-1 is open to others \(mode 0777\)"),
        (open_file, r"run\.json is not trusted: .*-rw-rw-rw-"),
        (linked_file, r"run\.json is not trusted: it is a link"),
    ],
)
def test_what_others_may_have_written_is_not_believed(
    tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    """A start neither kills nor deletes what such a run file lists; it says why and ends."""
    with sleeping() as victim:
        run_file = crafted(tmp_path, listing(victim))
        spoil(run_file)
        for start in (lambda: clean_up_stale(tmp_path), lambda: RunDirectory(run_file.parent)):
            with pytest.raises(StartupError, match=message):
                start()
        assert victim.poll() is None
        assert run_file.exists()


def test_directories_of_other_users_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shared state directory one user's leftovers are no other one's business."""
    with sleeping() as victim:
        run_file = crafted(tmp_path, listing(victim))
        monkeypatch.setattr(os, "getuid", lambda: run_file.stat().st_uid + 1)
        assert clean_up_stale(tmp_path) == []
        with pytest.raises(StartupError, match=r"serve-1 belongs to user \d+; give another --state-dir"):
            RunDirectory(run_file.parent)
        assert victim.poll() is None
        assert run_file.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"segments": ["../../tmp/precious"]},
        {"segments": ["/etc/passwd"]},
        {"segments": [".."]},
        {"segments": [7]},
        {"segments": None},
        {"processes": [{"pid": -1, "start_ticks": 1}]},
        {"processes": [{"pid": True, "start_ticks": 1}]},
        {"processes": [{"pid": 4}]},
        {"processes": 4},
    ],
)
def test_contents_we_never_write_are_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    """Paths instead of names, no pids, missing fields: the file is damaged, and nothing is touched."""
    with sleeping() as victim:
        crafted(tmp_path, listing(victim, **changes))
        with pytest.raises(StartupError, match=r"run\.json is damaged"):
            clean_up_stale(tmp_path)
        assert victim.poll() is None


def test_shared_memory_of_other_programs_is_not_removed(tmp_path: Path) -> None:
    """A listed name has to be a mailbox: links and other files are named, not deleted."""
    precious = tmp_path / "precious"
    precious.write_text("weights")
    for path in (Path("/dev/shm", f"{SEGMENT}-link"), Path("/dev/shm", f"{SEGMENT}-other")):
        path.symlink_to(precious) if "link" in path.name else path.write_text("not a mailbox")
        try:
            run_file = crafted(tmp_path, {"processes": [], "segments": [path.name]})
            with pytest.raises(StartupError, match=f"lists {path}, which is not a Moebius mailbox"):
                clean_up_stale(tmp_path)
            assert path.is_symlink() or path.exists()
            run_file.unlink()
            run_file.parent.joinpath("lock").unlink()
            run_file.parent.rmdir()
        finally:
            path.unlink()


def test_shared_memory_that_can_not_be_removed_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only /dev/shm: the clean-up goes on, so that the reason why nothing started is what is heard."""

    def read_only(path: Path, **_: bool) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    segment = Path("/dev/shm", SEGMENT)
    segment.touch()
    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(Path, "unlink", read_only)
        patch.setattr(runfile, "_clear", lambda directory: None)
        for name in (SEGMENT, "moebius-test-absent"):
            run_file = crafted(tmp_path / name, {"processes": [], "segments": [name]})
            assert clean_up_stale(tmp_path / name) == [run_file.parent.name]
    segment.unlink()
    assert [(line["path"], line["error"]) for line in logs] == [(str(segment), os.strerror(errno.EROFS))]


def test_state_directories_that_others_can_change_are_refused(tmp_path: Path) -> None:
    """Writable by others without the sticky bit; with it, or with a group of one's own, it is used."""
    directory = tmp_path / "state"
    assert own_state_directory(directory) == directory
    assert directory.stat().st_mode & 0o777 == 0o700
    for mode, allowed in ((0o1777, True), (0o755, True), (0o777, False)):
        directory.chmod(mode)
        if allowed:
            own_state_directory(directory)
            continue
        with pytest.raises(StartupError, match=r"others may write .* --state-dir .*/state/moebius"):
            own_state_directory(directory)


def test_a_state_directory_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    """One sentence with directory, need and remedy."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "state", Path("/proc/moebius-state")):
        with pytest.raises(StartupError, match=rf"cannot use .* {path}: .*; it has to take .* --state-dir"):
            own_state_directory(path)
        with pytest.raises(StartupError, match=rf"cannot use .* {path}/run: "):
            RunDirectory(path / "run")
