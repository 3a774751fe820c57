"""Invariant: whichever of torch and our modules is imported first, each computes with its own C++ library."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["_kernels", "_kernels_testing"])
def test_a_module_brings_its_c_plus_plus_library_along(module: str) -> None:
    """With the system's loaded before torch 2.11 for CUDA, `import torch` crashed in an output stream."""
    code = f"import moebius.{module}; print('libstdc++' in open('/proc/self/maps').read())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


AT_EXIT = """
import threading
import time

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(1.0)  # the interpreter is shutting down, and lets other threads run

slow = Slow()
from moebius.kernels import ExpertEngine

engine = ExpertEngine(64, 64, 2, 1, weight_format="int8", activation="silu", num_threads=1)
started = threading.Event()

def compute():
    started.set()
    while True:
        engine.calibrate()

threading.Thread(target=compute, daemon=True).start()
started.wait()
time.sleep(0.1)
"""


def test_a_call_that_runs_at_exit_does_not_abort_the_process() -> None:
    """A background thread inside a kernel (a server compares checksums) outlives the interpreter quietly."""
    found = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=120, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")
