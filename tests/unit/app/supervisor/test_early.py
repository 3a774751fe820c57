"""Processes that are forked before they are needed: how `moebius serve` starts them where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# In a process of its own: the one of the tests has threads, and those that run tests side by side have more.
SCRIPT = """
import json, os, sys, threading
from pathlib import Path
from app.supervisor.early import EarlyChildren
from moebius.config.loader import load_config

PROGRAM = [sys.executable, "-P", "-m", "moebius"]
config = load_config(None, {"model": "/model", "device": "cpu"})
cpu = min(os.sched_getaffinity(0))
with EarlyChildren(config) as early:
    waiting = {role: child.pid for role, child in early._waiting.items()}
    child = early.take([*PROGRAM, "gateway", "--config", sys.argv[1]], [cpu])
    again = early.take([*PROGRAM, "gateway", "--config", sys.argv[1]], [])
    long = early.take([*PROGRAM, "gpu", "--config", "/" + "x" * 4096], [])
    output = child.stdout.read().decode()
    status = child.wait(60)
left = [pid for pid in waiting.values() if Path(f"/proc/{pid}").exists()]
gpu = EarlyChildren(load_config(None, {"model": "/model", "device": "cuda"}))._waiting
threading.Thread(target=threading.Event().wait, daemon=True).start()
threads = EarlyChildren(config)._waiting
print(json.dumps({
    "roles": sorted(waiting), "output": output, "status": status, "left": left,
    "none": [again is None, long is None, gpu == {}, threads == {}],
}))
"""


def test_a_fork_becomes_one_service_and_the_others_end(tmp_path: Path) -> None:
    """A fork runs the command that it is given, once, and reports as the program would. Nothing is forked
    where there are GPUs or threads, nor used where `ps` could not show it; what is not used does not stay.
    """
    missing = tmp_path / "missing.yaml"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(missing)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["roles"] == ["expert", "gateway", "gpu"]
    assert f"cannot read configuration file {missing}" in found["output"]
    assert found["status"] == 2
    assert found["left"] == []
    assert found["none"] == [True] * 4
