"""Guards that instances of one host see each other's cores, and that a killed one leaves nothing behind."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from app.supervisor import core_claims
from app.supervisor.core_claims import CoreClaims, OtherInstance, open_claims

HOLDER = """
import sys
from pathlib import Path
from app.supervisor.core_claims import CoreClaims

claims = CoreClaims(Path(sys.argv[1]))
with claims.exclusive():
    claims.hold("port 8000", [0, 1, 2, 8])
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds CPUs 0-2 and 8 until its input ends, or it does."""
    command = [sys.executable, "-P", "-c", HOLDER, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process


def others(directory: Path) -> tuple[OtherInstance, ...]:
    """Returns the others as an instance that starts now sees them."""
    claims = CoreClaims(directory)
    with claims.exclusive():
        return claims.others()


def test_another_process_is_seen_while_it_lives(tmp_path: Path) -> None:
    """The process is seen by its name and CPUs; after an orderly end no file is left."""
    directory = tmp_path / "cores"
    assert others(directory) == ()
    with holder(directory):
        assert others(directory) == (OtherInstance("port 8000", frozenset((0, 1, 2, 8))),)
    assert list(directory.iterdir()) == []


def test_nothing_is_left_of_one_that_was_killed(tmp_path: Path) -> None:
    """Its file is there until the next instance looks, and says nothing."""
    directory = tmp_path / "cores"
    with holder(directory) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert len(list(directory.iterdir())) == 1
        assert others(directory) == ()
    assert list(directory.iterdir()) == []


def test_all_users_share_the_directory(tmp_path: Path) -> None:
    """Users share it whatever the umask; each can delete only what is theirs."""
    before = os.umask(0o077)
    try:
        claims = CoreClaims(tmp_path / "cores")
        claims.hold("port 1", [3])
    finally:
        os.umask(before)
    (file,) = (tmp_path / "cores").iterdir()
    assert stat.S_IMODE((tmp_path / "cores").stat().st_mode) == 0o1777
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    claims.release()
    assert not file.exists()


def test_instances_start_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that looked at once would take the same cores; one that hangs does not stop others for ever."""
    monkeypatch.setattr(core_claims, "_WAIT_S", 0.1)
    first, second = CoreClaims(tmp_path), CoreClaims(tmp_path)
    with first.exclusive(), pytest.raises(TimeoutError, match="stays locked"), second.exclusive():
        pass
    with second.exclusive():
        assert second.others() == ()


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"cpus": "x"}', '{"name": 3, "cpus": [1]}'])
def test_what_is_no_claim_takes_no_cores(tmp_path: Path, text: str) -> None:
    """A living process can hold any file in a directory of all users; other kinds of files are not opened."""
    (tmp_path / "mine").write_text(text)
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/etc/passwd")
    with (tmp_path / "mine").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert others(tmp_path) == ()
    assert (tmp_path / "link").is_symlink()


def test_without_the_directory_it_is_said(tmp_path: Path) -> None:
    """A link in its place leads elsewhere, and is not followed; the start goes on."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cores").symlink_to(tmp_path / "elsewhere")
    with capture_logs() as logs:
        assert open_claims(tmp_path / "cores") is None
    assert [line["event"] for line in logs] == ["other instances of this host are not seen"]
