"""Guards `tools/setup`: that it ends with success when all went well, and says what did not when not."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Stands for the environment's interpreter and its pip: nothing is installed.
PYTHON = """#!/bin/sh
case "$*" in
  *--verbose*) echo "  [20/76] Building CXX object a.o"; echo "a.cc:1: error: no" >&2; exit $KERNELS ;;
esac
exit 0
"""

pytestmark = pytest.mark.skipif(
    not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="needs Python's headers, as setup does",
)


def run_setup(venv: Path, kernels: int) -> subprocess.CompletedProcess[str]:
    """The script with pip that installs all, or all but the kernels."""
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin" / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": sys.executable, "KERNELS": str(kernels)}
    command = [str(ROOT / "tools" / "setup"), str(venv)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_it_ends_with_success(tmp_path: Path) -> None:
    """Steps and files are counted, the environment is marked as ready, and make goes on."""
    run = run_setup(tmp_path / "venv", kernels=0)
    assert run.returncode == 0, run.stderr
    assert "20 of 76 files" in run.stdout
    assert run.stdout.splitlines()[-1].startswith("setup: done in ")
    assert (tmp_path / "venv" / ".ready").exists()


def test_kernels_that_do_not_compile_are_shown(tmp_path: Path) -> None:
    """The compiler's words and where all of them are; the environment is not marked as ready."""
    run = run_setup(tmp_path / "venv", kernels=1)
    assert run.returncode == 1
    assert "a.cc:1: error: no" in run.stderr
    assert "kernels.log" in run.stderr
    assert not (tmp_path / "venv" / ".ready").exists()
