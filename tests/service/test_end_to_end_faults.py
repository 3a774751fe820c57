"""Guards the end of the whole system without a word: nothing of it is left. The death of an expert server is
among the tests of test_end_to_end.py, whose system it shares."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import psutil

from moebius.host.topology import Topology
from tests.drills.checkpoint import FLAGS, MODEL, write_checkpoint
from tests.helpers.stack import ROOT, mailboxes_of, running_stack


def threads_of(text: str) -> str:
    """Returns what a start, or doctor for each NUMA node, says of threads."""
    return "\n".join(line for line in text.splitlines() if "expert threads" in line)


def doctor() -> str:
    """Returns what it says of an instance that would start now."""
    command = [sys.executable, "-P", "-m", "moebius", "doctor"]
    return threads_of(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout)


def test_two_instances(tmp_path: Path) -> None:
    """The second says whose cores it shares; those of a first one that is killed are free at once."""
    model, cores = write_checkpoint(tmp_path / "model"), len(Topology.detect().cores())
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
    own, alone = ("--expert-threads", str(cores)), ("--expert-servers", "1")
    with running_stack(model, tmp_path / "1", *FLAGS, *own, *alone) as first:
        port = f"port {first.base_url.rpartition(':')[2]} "
        assert f"expert threads: {cores} (set by expert_threads" in threads_of(first.log.read_text())
        with running_stack(model, tmp_path / "2", *FLAGS, *alone) as second:
            assert port in threads_of(second.log.read_text())
            assert "cores are shared with other instances" in second.log.read_text()
            first.process.kill()
            first.process.wait()
            body = {"model": MODEL, "prompt": "One, two,", "max_tokens": 4, "ignore_eos": True}
            assert httpx.post(f"{second.base_url}/v1/completions", json=body, timeout=120).status_code == 200
            said = doctor()
            assert port not in said
            assert f"port {second.base_url.rpartition(':')[2]} " in said
    for name in mailboxes_of(first):  # no later start has the first one's directory
        Path("/dev/shm", name).unlink()


def test_killed_supervisor_leaves_nothing(tmp_path: Path) -> None:
    """kill -9 of the supervisor: its children die with it, and the next start removes the shared memory."""
    model, flags = write_checkpoint(tmp_path / "model"), [*FLAGS, "--expert-servers", "2"]
    with running_stack(model, tmp_path, *flags) as first:
        children = psutil.Process(first.process.pid).children(recursive=True)
        first.process.kill()
        first.process.wait()
        _, alive = psutil.wait_procs(children, timeout=60)
        assert alive == []
        assert len(mailboxes_of(first)) == 1
        links = sorted(first.state_dir.rglob("*.weights"))
        assert [(link.name, link.exists()) for link in links] == [
            ("expert-0.weights", False),
            ("expert-1.weights", False),
        ]
    with running_stack(model, tmp_path, *flags) as second:
        body = {"model": MODEL, "prompt": "One, two,", "max_tokens": 4, "ignore_eos": True}
        assert httpx.post(f"{second.base_url}/v1/completions", json=body, timeout=120).status_code == 200
        assert mailboxes_of(first) == []
        assert len(mailboxes_of(second)) == 1
    assert mailboxes_of(second) == []
