"""Invariant: kernels of resident experts touch no slot that has no memory, however few slots of a layer have.

In a process of its own: a touch of what is not mapped ends it.
"""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import torch
import tests.helpers.triton_interpreter
from gpu_service.device.host_virtual_memory import HostVirtualMemory
from gpu_service.device.virtual_memory import PhysicalPool
from gpu_service.experts.resident.experts import TorchResidentKernels
from gpu_service.experts.resident.triton_kernels import launch
from gpu_service.experts.resident.triton_kernels.backend import TritonResidentKernels
from tests.helpers.resident_layers import Shape, resident_layer, routed

shape, few = Shape(hidden=128, intermediate=64, experts=6, top_k=3, has_bias=True), launch.UNPACK_FROM
for kernels, few_rows, rows, dtype in (
    ("rows", 100, 3, torch.float32), ("tiles", 0, 5, torch.float32), ("unpacked", 0, 9, torch.float16)
):
    launch.UNPACK_FROM = 0 if kernels == "unpacked" else few
    for experts in ((), (5,), (2, 0, 3)):
        print(kernels, experts, flush=True)
        slots = resident_layer(shape, "int8", experts, pool=PhysicalPool(HostVirtualMemory(), 4096))
        inputs = routed(shape, rows, dtype=dtype)
        for partial in (None, torch.randn(rows, shape.hidden)):
            before = None if partial is None else partial.clone()
            expected = TorchResidentKernels(shape.geometry).forward(slots, *inputs, before)
            found = TritonResidentKernels(shape.geometry, few_rows).forward(slots, *inputs, partial)
            torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
"""


def test_kernels_read_what_has_memory() -> None:
    """The sums of layers with no slot, one and some are those of the reference, of all kernels."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(ended.stdout.splitlines()) == 9
