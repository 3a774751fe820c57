"""Compiles the kernels of resident experts for sm_90; a program of its own, see `compile_triton`."""

from __future__ import annotations

import torch

from gpu_service.experts.resident.triton_kernels.backend import TritonResidentKernels
from tests.helpers.compile_triton import launches_compile
from tests.helpers.resident_layers import Shape, resident_layer, routed


def main() -> None:
    """Prints a line per kernel: its name and the bytes of its machine code."""
    shape = Shape(hidden=256, intermediate=128, experts=8, activation="gpt_oss", has_bias=True)
    with launches_compile() as compiled:
        for weight_format in ("bfloat16", "int4_g128_zeros", "int4_g32_minimums", "nvfp4"):
            slots = resident_layer(shape, weight_format, (0, 1, 2))
            for few_rows in (8, 0):
                kernels = TritonResidentKernels(shape.geometry, few_rows)
                hidden_states, ids, weights = routed(shape, 4, dtype=torch.bfloat16)
                kernels.forward(slots, hidden_states, kernels.cpu_ids(slots, ids), weights, None)
    for kernel in compiled:
        print(kernel.metadata.name, len(kernel.asm["cubin"]))


if __name__ == "__main__":
    main()
