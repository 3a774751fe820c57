"""Invariant: every Triton kernel compiles for GPUs from architecture 80 on, and fits in what they have.

Triton's interpreter, which the other tests use, knows neither types of loop variables nor shared memory, and
has every number format. At the sizes of published models; `make test-kernels-all` takes all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.demo_model import default_directory
from gpu_service.ops.triton.table import IMPLEMENTATIONS

ROOT = Path(__file__).resolve().parents[5]
# KiB of shared memory that a program may have (CUDA C++ programming guide, technical specifications).
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
# A few values that wait on the stack cost nothing; a tile of them would be read again and again.
STACK_BYTES = 384
EVERYWHERE = {
    "scan_kernel",
    "prepare_kernel",
    "_split_kernel",
    "_prefill_kernel",
    "_mla_kernel",
    "gate_up_tiles",
    "gate_up_dense",
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("extent", "architecture"),
    [
        # Least shared memory, and no 8-bit floats: what does not fit or exist elsewhere shows here first.
        ("key", 86),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in (
                *(("covering", architecture) for architecture in (86, 90, 120)),
                *(("key", architecture) for architecture in (80, 89, 100)),
            )
        ),
    ],
)
def test_kernels_fit(extent: str, architecture: int) -> None:
    """Kernels are compiled in a process of its own: the interpreter is chosen when a kernel's module is
    imported.

    What was compiled is kept by its source, in the user's cache: only the first run on a machine takes long,
    not each fresh clone's.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(default_directory().parent / "triton-of-tests")
    program = [sys.executable, "-m", "tests.helpers.compile_kernels", extent, str(architecture)]
    run = subprocess.run(
        program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=880
    )
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert not [row for row in rows if "error" in row]
    assert run.returncode == 0, run.stderr[-4000:]
    assert {row["kernel"] for row in rows} >= EVERYWHERE
    assert len(rows) > (3 if extent == "covering" else 1) * len(IMPLEMENTATIONS)
    for row in rows:
        assert row["shared"] <= SHARED_KIB[architecture] * 1024, row
        assert row["registers"] <= 255, row
        assert row["stack"] <= STACK_BYTES, row
