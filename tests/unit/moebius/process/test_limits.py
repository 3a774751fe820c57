"""Invariant: a limit of the system that is too low is named in one line before anything is started."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import moebius.process.limits as limits
from app.commands.serve import container_note
from app.doctor.facts import Volume
from app.supervisor.expert_placement import usable_nodes
from app.supervisor.shortages import shared_memory_shortage
from moebius import _kernels
from moebius.errors import StartupError, UserError, shortage
from moebius.host.topology import Topology
from moebius.mailbox import Mailbox, MailboxError, MailboxGeometry
from moebius.process.limits import available_memory, check_limits, out_of_memory_kills

# Checked before the model is looked for, so no model is needed.
COMMANDS = ("serve", "gateway", "expert", "gpu")
LIMITED = """
import resource, sys
resource.setrlimit(getattr(resource, sys.argv[1]), (int(sys.argv[2]), int(sys.argv[3])))
from app.cli import main
main(sys.argv[4:])
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_too_few_files_are_one_line(command: str) -> None:
    """Every command that starts a process says the limit, what is needed, and how it is raised."""
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED, "RLIMIT_NOFILE", "40", "40", command, "/nowhere"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("moebius: error: ulimit -n: a process may open 40 files; needed: 128, ")
    assert ended.stderr.count("\n") == 1


def test_the_supervisors_children_check_too(tmp_path: Path) -> None:
    """They go past the command line; what starts them in a Pod may have other limits."""
    (tmp_path / "expert.yaml").write_text("")
    program = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
    program += "import runpy; runpy.run_module('moebius', run_name='__main__')"
    command = [sys.executable, "-c", program, "expert", "--config", str(tmp_path / "expert.yaml")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "ulimit -n: a process may open 40 files" in ended.stderr
    assert ended.stderr.count("\n") == 1


def given(monkeypatch: pytest.MonkeyPatch, **values: int) -> dict[int, tuple[int, int]]:
    """Returns the limits by name, the others unlimited; what is set is kept."""
    kept = {getattr(resource, name): (value, value) for name, value in values.items()}
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda which: kept.get(which, unlimited))
    monkeypatch.setattr(resource, "setrlimit", kept.__setitem__)
    return kept


@pytest.mark.parametrize(("role", "needed"), [("gateway", 1280), ("expert", 1536), ("gpu", 2816)])
def test_address_space(
    role: limits.Role, needed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Libraries abort the process without it, with no word of what was too little."""
    given(monkeypatch, RLIMIT_AS=needed << 20)
    check_limits(role, tmp_path)
    given(monkeypatch, RLIMIT_AS=(needed << 20) - 4096)
    with pytest.raises(UserError, match=f"ulimit -v: .* {needed - 1} MiB .* unlimited, or {needed} MiB"):
        check_limits(role, tmp_path)


def test_open_files_are_taken_as_far_as_allowed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The soft limit of most systems, 1024, is the number of clients otherwise; above, nothing changes."""
    for (soft, hard), expected in {
        (1024, 4096): 4096,
        (1024, 1 << 20): 65536,
        (1024, resource.RLIM_INFINITY): 65536,
        (1 << 20, 1 << 20): 1 << 20,
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY): resource.RLIM_INFINITY,
    }.items():
        kept = given(monkeypatch)
        kept[resource.RLIMIT_NOFILE] = (soft, hard)
        check_limits("gateway", tmp_path)
        assert kept[resource.RLIMIT_NOFILE] == (expected, hard)


def test_threads_of_a_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container's limit, its own or of a group above; none where the kernel says "max"."""
    given(monkeypatch)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/engine\n")
    inner = tmp_path / "sys/fs/cgroup/pod/engine"
    inner.mkdir(parents=True)
    (inner / "pids.max").write_text("max\n")
    (inner / "pids.current").write_text("20\n")
    check_limits("gpu", tmp_path)
    (inner.parent / "pids.max").write_text("100\n")
    (inner.parent / "pids.current").write_text("30\n")
    with pytest.raises(UserError, match=r"pod/pids.max is 100: 70 more threads .*; needed: 1\d\d"):
        check_limits("gpu", tmp_path)


def test_threads_of_a_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All of a user's threads count; root's are not limited."""
    for thread in range(40):
        (tmp_path / "proc/7/task" / str(thread)).mkdir(parents=True)
    given(monkeypatch, RLIMIT_NPROC=60)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UserError, match="ulimit -u: 20 more threads"):
        check_limits("gateway", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    check_limits("gateway", tmp_path)


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        ("DefaultCPUAllocator: can't allocate memory", "; ulimit -v is 3072 MiB: raise what is too low"),
        (
            "RuntimeError: can't start new thread",
            "; ulimit -v is 3072 MiB, ulimit -u is 900 threads and processes: raise what is too low",
        ),
        ("the model is too small", ""),
    ],
)
def test_what_runs_out_later_names_the_limit(cause: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's own words do not say that there is a limit at all."""
    given(monkeypatch, RLIMIT_AS=3 << 30, RLIMIT_NPROC=900)
    assert shortage(cause) == said
    given(monkeypatch)
    assert shortage(cause) == ""


def test_shared_memory_says_what_is_wrong_with_it() -> None:
    """Containers have 64 MiB unless set otherwise: the message has the sizes and each system's way."""
    small = Volume(Path("/dev/shm"), True, True, "tmpfs", 64 << 20, 60 << 20)
    said = str(shared_memory_shortage(100 << 20, small, "No space left on device"))
    assert "share 100 MiB of memory in /dev/shm, but it holds 64 MiB, and 60 MiB are free. " in said
    assert "--shm-size=1g" in said
    assert "medium: Memory" in said
    assert "it does not exist" in str(shared_memory_shortage(1, replace(small, exists=False)))
    assert "it is read-only" in str(shared_memory_shortage(1, replace(small, writable=False)))
    assert "but an error. " in str(shared_memory_shortage(1, small, "an error"))
    assert "--shm-size=3g;" in str(shared_memory_shortage(2100 << 20, small))
    assert shared_memory_shortage(1, small) is None


def test_kills_for_want_of_memory_are_counted(tmp_path: Path) -> None:
    """Kills are counted as the kernel counts them, where it does."""
    assert out_of_memory_kills(tmp_path) == 0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/vmstat").write_text("pgfault 7\noom_kill 3\n")
    assert out_of_memory_kills(tmp_path) == 3


def test_a_machine_that_shows_no_cpus_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is one line, as in a chroot without /sys and /proc."""

    def nothing() -> Topology:
        raise RuntimeError("no usable CPU found under /sys and /proc")

    monkeypatch.setattr(Topology, "detect", nothing)
    with pytest.raises(StartupError, match="under /sys and /proc: both have to be mounted"):
        usable_nodes()


def test_a_server_that_its_container_hides_says_so(tmp_path: Path) -> None:
    """A published port leads to the container's address, not to its loopback; elsewhere nothing is said."""
    assert container_note("127.0.0.1", tmp_path) == ""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.containerenv").touch()
    assert "--host 0.0.0.0" in container_note("127.0.0.1", tmp_path)
    assert container_note("0.0.0.0", tmp_path) == ""


def test_a_mailbox_that_an_engine_makes_alone_says_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """`moebius gpu` without a supervisor, as in a Pod or a compose file."""

    def full(*_: object) -> None:
        raise MailboxError("mailbox 'x' needs 9 bytes of shared memory (/dev/shm): No space left on device")

    monkeypatch.setattr(_kernels.Mailbox, "create", full)
    geometry = MailboxGeometry(1, 32, 2, 1, 8, 1, "float32")
    with pytest.raises(
        MailboxError, match=r"No space left on device: \d+ MiB are free. docker, podman: --shm"
    ):
        Mailbox.create("x", geometry)


@pytest.mark.parametrize(
    ("line", "group", "limit", "used"),
    [
        ("0::/a/b", "a", "memory.max", "memory.current"),
        ("4:memory:/a/b", "memory/a", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_memory_is_what_each_group_above_leaves(
    tmp_path: Path, line: str, group: str, limit: str, used: str
) -> None:
    """A scope of systemd below a slice with the limit, of both versions of cgroups."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{line}\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99999 kB\nMemAvailable: 88888 kB\n")
    place = tmp_path / "sys/fs/cgroup" / group
    (place / "b").mkdir(parents=True)
    assert available_memory(tmp_path) == 88888 << 10
    (place / limit).write_text("5000000\n")
    (place / used).write_text("1000000\n")
    (place / "memory.stat").write_text("active_file 10\ninactive_file 20\n")
    assert available_memory(tmp_path) == 4000030
