"""Invariant: every Triton kernel of the ops passes the real compiler for sm_90, GPU or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpu_service.ops.triton.table import IMPLEMENTATIONS

ROOT = Path(__file__).resolve().parents[2]


def test_kernels_compile_for_sm_90(tmp_path: Path) -> None:
    """In a process of its own: the interpreter is chosen when a kernel's module is imported."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    program = [sys.executable, "-m", "tests.helpers.compile_ops"]
    run = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    lines = [line.split() for line in run.stdout.splitlines()]
    assert {name for name, _ in lines} >= {
        "rms_norm_kernel",
        "qk_norm_rope_kernel",
        "route_kernel",
        "scan_kernel",
    }
    assert len(lines) > 2 * len(IMPLEMENTATIONS)
    assert all(int(size) > 0 for _, size in lines)
