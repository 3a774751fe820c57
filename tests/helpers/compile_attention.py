"""Compiles the attention kernels for sm_90 by planning and "running" steps; see `compile_triton`.

Prints a line per kernel: its name and the bytes of shared memory it takes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from gpu_service.attention.flashinfer_backend.pages import list_pages
from gpu_service.attention.mla.triton_backend import TritonMlaAttention
from gpu_service.attention.triton_kernels.backend import TritonAttention
from gpu_service.cache.fp8 import E4M3
from tests.helpers.attention_cases import Geometry, Shape, make_case, run
from tests.helpers.compile_triton import SHARED_BYTES, launches_compile
from tests.helpers.mla_cases import DEEPSEEK, DEEPSEEK_SPARSE, make_mla_case, run_absorbed

BF16, FP32 = torch.bfloat16, torch.float32

GEOMETRIES = (
    Geometry(32, 4, 128, 16, BF16),
    Geometry(32, 4, 128, 16, BF16, E4M3),
    Geometry(8, 2, 64, 16, FP32),
    Geometry(64, 8, 64, 16, BF16, window=128, sinks=True),
    Geometry(64, 8, 64, 16, BF16, window=600),
)
# One request and several, in one piece and in splits, chunks and decodes.
SHAPES: tuple[Shape, ...] = ([(900, 1)], [(900, 1), (3, 7)])


def main() -> None:
    """Every kernel at the sizes of real models."""
    with launches_compile() as compiled:
        for geometry in GEOMETRIES:
            for shape in SHAPES:
                case = make_case(geometry, shape)
                run(case, TritonAttention(geometry.config(), case.cache))
        for dtype, storage in ((BF16, None), (BF16, E4M3)):
            latent = make_mla_case(DEEPSEEK, [(900, 1)], 64, dtype, storage)
            run_absorbed(latent, TritonMlaAttention(DEEPSEEK, latent.cache))
        sparse = make_mla_case(DEEPSEEK_SPARSE, [(900, 1)], 64, BF16)
        run_absorbed(sparse, TritonMlaAttention(DEEPSEEK_SPARSE, sparse.cache))
        # Programs of 64 heads.
        many_heads = replace(DEEPSEEK_SPARSE, num_heads=128)
        sparse = make_mla_case(many_heads, [(900, 140)], 64, BF16)
        run_absorbed(sparse, TritonMlaAttention(many_heads, sparse.cache))
        inputs = make_case(GEOMETRIES[0], SHAPES[1]).inputs
        list_pages(inputs.block_table, inputs.seq_lens_tensor, torch.zeros(99, dtype=torch.int32), 16)
    for kernel in compiled:
        print(kernel.metadata.name, kernel.metadata.shared)
        assert kernel.metadata.shared <= SHARED_BYTES, "more shared memory than there is"


if __name__ == "__main__":
    main()
