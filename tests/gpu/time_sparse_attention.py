"""Times one layer's sparse attention on the GPU that is here: `python -m tests.gpu.time_sparse_attention`.

Not a test. At the sizes of DeepSeek-V3.2 (128 heads, 64 index heads, 2048 tokens chosen, bfloat16) it prints
per step microseconds of the choice and of the attention to what was chosen (medians of launches in a queue),
and the least that their products take on an H200.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from gpu_service.attention.mla.base import IndexDimensions
from gpu_service.attention.mla.triton_backend import TritonMlaAttention
from gpu_service.ops.latent import absorb_query
from tests.gpu.time_attention import device_us
from tests.helpers.attention_cases import Shape
from tests.helpers.mla_cases import DEEPSEEK, LAYER, make_mla_case

TOP_K = 2048
SIZES = replace(DEEPSEEK, num_heads=128, index=IndexDimensions(64, 128, TOP_K))
# Dense bfloat16 operations of an H200 per second, as published.
OPERATIONS = 989e12
STEPS: dict[str, Shape] = {
    "1 decode at 16 k": [(16383, 1)],
    "32 decodes at 8 k": [(8191, 1)] * 32,
    "chunk of 1024 at 8 k": [(8192, 1024)],
    "chunk of 4096, first": [(0, 4096)],
    "chunk of  with 64 decodes at 4 k": [(4096, 512)] + [(4095, 1)] * 64,
}


def least_us(shape: Shape) -> tuple[float, float]:
    """Returns the least time of the indexer's products, and of the attention's."""
    assert SIZES.index is not None
    seen = [old + row + 1 for old, new in shape for row in range(new)]
    scored = 2 * SIZES.index.num_heads * SIZES.index.head_dim * sum(seen)
    attended = sum(min(length, TOP_K) for length in seen)
    products = 2 * SIZES.num_heads * (2 * SIZES.latent_dim + SIZES.rope_dim) * attended
    return scored / OPERATIONS * 1e6, products / OPERATIONS * 1e6


def time_step(name: str, shape: Shape) -> None:
    """Prints one line."""
    case = make_mla_case(SIZES, shape, 64, torch.bfloat16, None, "cuda")
    attention = TritonMlaAttention(SIZES, case.cache)
    attention.plan(case.inputs)
    query = absorb_query(case.query_nope, case.key_weight).contiguous()

    def choose() -> torch.Tensor:
        return attention.select(case.index_query, case.head_weights, 0)

    selection = choose()

    def attend() -> torch.Tensor:
        return attention.forward(query, case.query_rope, case.latent, case.key_rope, LAYER, selection)

    attend()
    torch.cuda.synchronize()
    least_choice, least_attention = least_us(shape)
    choice = f"choice {device_us(choose):9.1f} us (least {least_choice:.1f})"
    attended = f"attention {device_us(attend):9.1f} us (least {least_attention:.1f})"
    print(f"{name:<40} {choice}, {attended}", flush=True)


def main() -> None:
    """All steps."""
    for name, shape in STEPS.items():
        time_step(name, shape)


if __name__ == "__main__":
    main()
