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
from tests.helpers.stack import ROOT, Stack, mailboxes_of, running_stack


def threads_of(text: str) -> str:
    """Returns what a start, or doctor for each NUMA node, says of threads."""
    return "\n".join(line for line in text.splitlines() if "expert threads" in line)


def doctor() -> str:
    """Returns what it says of an instance that would start now."""
    command = [sys.executable, "-P", "-m", "moebius", "doctor"]
    return threads_of(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout)


def test_two_instances_and_a_killed_supervisor(tmp_path: Path) -> None:
    """The second says whose cores it shares; those of a first one that is killed are free at once, and its
    children die with it. The next start in its directory removes its shared memory."""
    model, cores = write_checkpoint(tmp_path / "model"), len(Topology.detect().cores())
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
    own, one = ("--expert-threads", str(cores)), ("--expert-servers", "1")
    body = {"model": MODEL, "prompt": "One, two,", "max_tokens": 4, "ignore_eos": True}

    def answers(stack: Stack) -> bool:
        return httpx.post(f"{stack.base_url}/v1/completions", json=body, timeout=120).status_code == 200

    with running_stack(model, tmp_path / "1", *FLAGS, *own, *one) as first:
        port = f"port {first.base_url.rpartition(':')[2]} "
        assert f"expert threads: {cores} (set by expert_threads" in threads_of(first.log.read_text())
        with running_stack(model, tmp_path / "2", *FLAGS, *one) as second:
            assert port in threads_of(second.log.read_text())
            assert "cores are shared with other instances" in second.log.read_text()
            children = psutil.Process(first.process.pid).children(recursive=True)
            first.process.kill()
            first.process.wait()
            _, alive = psutil.wait_procs(children, timeout=60)
            assert alive == []
            assert answers(second)
            said = doctor()
            assert port not in said
            assert f"port {second.base_url.rpartition(':')[2]} " in said
        assert mailboxes_of(second) == []
    assert len(mailboxes_of(first)) == 1
    links = sorted(first.state_dir.rglob("*.weights"))
    assert [(link.name, link.exists()) for link in links] == [("expert-0.weights", False)]
    with running_stack(model, tmp_path / "1", *FLAGS, *one) as third:
        assert answers(third)
        assert mailboxes_of(first) == []
        assert len(mailboxes_of(third)) == 1
    assert mailboxes_of(third) == []
