"""Guards that an engine which cannot start says why in one line, and nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moebius.config import MoebiusConfig
from moebius.errors import USER_ERROR_EXIT
from tests.helpers.checkpoints import TinyMoe
from tests.helpers.tiny_models import TinyModel, write_tiny_model
from tests.helpers.warm_processes import run_program

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_refused_device_is_one_line(tmp_path: Path) -> None:
    """A GPU where there is none: a user's error, one line that names the value and what is allowed."""
    model = TinyMoe(family="qwen3_moe").write(tmp_path / "model")
    command = [sys.executable, "-m", "moebius", "gpu", str(model)]
    command += [
        "--device",
        "cuda",
        "--expert-transport",
        "local",
        "--gpu-address",
        f"unix:{tmp_path}/gpu.sock",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == USER_ERROR_EXIT
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert "--device cuda" in lines[0]
    assert "CPU" in lines[0]


FAILS_AFTER_BUILDING = """
import sys
from gpu_service.assembly.warm_up import WarmUpGate
from gpu_service.main import run
from moebius.config import MoebiusConfig
from moebius.errors import UserError

warm_up = WarmUpGate.run

def fail(*arguments):
    warm_up(*arguments)
    raise UserError("a warm-up step failed: a NaN")

WarmUpGate.run = fail
sys.exit(run(MoebiusConfig.model_validate_json(sys.argv[1])))
"""


def test_failure_after_building_ends_in_order(tmp_path: Path) -> None:
    """Threads of a built engine are gone before Python ends, or its end would abort the process: three starts
    each end with the cause as their last line."""
    tiny = TinyModel("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2})
    write_tiny_model(tiny, tmp_path / "model", seed=5)
    document = {
        "model": {"model": str(tmp_path / "model")},
        "gpu": {"device": "cpu", "gpu_address": f"unix:{tmp_path}/gpu.sock"},
        "experts": {"expert_transport": "local"},
    }
    config = MoebiusConfig.model_validate(document).model_dump_json()
    for _ in range(3):
        result = run_program(["-c", FAILS_AFTER_BUILDING, config])
        assert result.returncode == USER_ERROR_EXIT, result.stderr
        assert result.stderr.splitlines()[-1] == "moebius: error: a warm-up step failed: a NaN"
        assert "Traceback" not in result.stderr
