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
