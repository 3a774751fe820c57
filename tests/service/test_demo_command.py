"""Guards the first thing a new user sees: `moebius demo` answers, prints its figures and leaves nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.helpers.demo import demo_checkpoint

pytestmark = pytest.mark.demo
ROOT = Path(__file__).resolve().parents[2]


def test_demo_answers_and_cleans_up(tmp_path: Path) -> None:
    """The answer, tokens/s, time to first token and both servers' calls are printed; nothing stays behind."""
    demo_checkpoint()  # built before the clock of the command runs
    state_dir = tmp_path / "state"
    command = [sys.executable, "-m", "moebius", "demo", "--state-dir", str(state_dir)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    output = result.stdout
    assert "Paris" in output
    assert re.search(r"\d+ tokens, \d+\.\d tokens/s, time to first token \d+\.\d+ s", output)
    calls = [int(count) for count in re.findall(r"expert-\d: (\d+) calls", output)]
    assert len(calls) == 2
    assert calls[0] == calls[1] > 0
    assert list(state_dir.iterdir()) == []
    left = [child for child in psutil.process_iter(["cmdline"]) if str(state_dir) in str(child.info)]
    assert left == []
