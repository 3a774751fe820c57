"""Guards that an engine which can not start says why in one line, and nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.checkpoints import TinyMoe

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_refused_device_is_one_line(tmp_path: Path) -> None:
    """A GPU where there is none: exit status 1, one line that names the value and what is allowed."""
    model = TinyMoe(family="qwen3_moe").write(tmp_path / "model")
    command = [sys.executable, "-m", "moebius", "gpu", str(model), "--no-show-config"]
    command += [
        "--device",
        "cuda",
        "--expert-transport",
        "local",
        "--gpu-address",
        f"unix:{tmp_path}/gpu.sock",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert "'cuda'" in lines[0]
    assert "cpu" in lines[0]
