"""Guards the benches with a real GPU: graphs are found in the trace, no host function is in a step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.random_model import RandomModelOptions, write_random_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("random") / "model"
    write_random_model(directory, RandomModelOptions("small", "int4_g32"))
    return directory


def bench(name: str, model: Path, target: Path, *flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "moebius", "bench", name, str(model), "--device", "cuda"]
    command += [
        "--expert-servers",
        "1",
        "--no-calibrate-kernels",
        "--kv-cache-gib",
        "1",
        "--json",
        str(target),
    ]
    ended = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    document: dict[str, Any] = json.loads(target.read_text())
    return document


def test_steps_have_no_host_function(model: Path, tmp_path: Path) -> None:
    """Ten decode steps with experts on the servers: one graph each, no function of the host."""
    found = bench("steps", model, tmp_path / "steps.json", "--streams", "2")
    assert found["steps"] == 10
    assert found["host_functions"] == {}
    # Four layers: attention, routing, and the two kernels of the hand-off at the least.
    assert found["kernels_per_step"] > 16
    assert 0 < found["gpu_busy_share"] <= 1


def test_engine_bench_on_a_gpu(model: Path, tmp_path: Path) -> None:
    """Experts counted by the servers, which compute all of them; bandwidths of both memories."""
    flags = "--streams", "1,4", "--prefill", "64", "--gpu-experts-ratio", "0", "--fetch", "off"
    found = bench("engine", model, tmp_path / "engine.json", *flags)
    one, four = found["decode"]
    assert one["cpu_experts_per_layer"] == pytest.approx(4.0)
    assert four["cpu_experts_per_layer"] > 4.0
    assert found["bandwidths"]["gpu"] > found["bandwidths"]["cpu"]
