"""MOEBIUS_ISA forces a level this machine has, and other and unknown ones are a clear error."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from moebius.kernels import supported_isas

ENGINE_ISA = (
    "from moebius.kernels import ExpertEngine, isa_level\n"
    "print(isa_level(), ExpertEngine(8, 8, 1, 1, weight_format='float32', num_threads=1).isa)"
)


def run_with(level: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MOEBIUS_ISA": level}
    return subprocess.run(
        [sys.executable, "-c", ENGINE_ISA],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("level", supported_isas())
def test_environment_forces_level(level: str) -> None:
    assert run_with(level).stdout.split() == [level, level]


def test_empty_variable_means_highest() -> None:
    assert run_with("").stdout.split() == [supported_isas()[-1]] * 2


def test_unknown_level_is_refused() -> None:
    result = run_with("avx1024")
    assert result.returncode != 0
    assert "MOEBIUS_ISA='avx1024' is unknown; allowed: scalar" in result.stderr


def test_levels_ascend_from_scalar() -> None:
    """Each level implies the ones below it, so callers may take any of them."""
    order = ["scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"]
    assert list(supported_isas()) == order[: len(supported_isas())]
