"""Invariant: the attention kernels compile for a Hopper GPU and fit in its shared memory.

The interpreter, which the other tests use, knows neither types of loop variables nor shared memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    finished = subprocess.run(
        [sys.executable, "-m", "tests.helpers.compile_attention"],
        cwd=Path(__file__).resolve().parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout.count("_kernel") >= 20
