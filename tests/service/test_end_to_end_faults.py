"""Guards the end of the whole system without a word: nothing of it is left. The death of an expert server is
among the tests of test_end_to_end.py, whose system it shares."""

from __future__ import annotations

from pathlib import Path

import httpx
import psutil

from tests.drills.checkpoint import FLAGS, MODEL, write_checkpoint
from tests.helpers.stack import mailboxes_of, running_stack


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
